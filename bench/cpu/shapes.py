"""A forward's milliseconds by rows at the shapes of published models, with random weights: nothing is fetched.

Weights are packed a few rows at a time, so the whole model never stands in floats. A model that is too large for the
machine is cut in layers; time and memory of all layers are then extrapolated, and records say so: layers are timed
without the head of the vocabulary, and that time grows with their number. Shapes are typed here from model cards, and
random routers spread rows over more experts than texts do. A record also serves as costs (`bench.mtp --costs FILE`):
a draft pass is taken to be one layer and the head. Run each shape in a process of its own:

    python -m bench.cpu.shapes qwen3.5-0.8b --kind int8 --out FILE
    python -m bench.cpu.shapes qwen3-30b-a3b --kind q4_0 --layers 8 --out FILE
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import zlib
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from bench import provenance
from bench.cpu.forwards import in_bursts, ratio, tree
from bench.random_gguf import OF_EMBEDDINGS, SMALL, blocks
from specengine.models.configs import family_of, layer_template
from specengine.models.extension import thread_count
from specengine.models.native import NativeLM, NativeTarget
from specengine.models.native.weights import Source, Weight

ROWS = (1, 2, 4, 8, 16)
KINDS = ("int8", "q4_0", "q8_0")
POOL = 509  # rows that matrices are made of: as many are drawn, and each matrix begins elsewhere among them
READ = 256 * 2**20  # bytes that are read to time reading


class Shape(NamedTuple):
    """The config of a model as published, and how many of its layers a machine of 16 GiB holds in int8."""

    config: dict[str, Any]
    layers: int


def _qwen3_5(**sizes: int) -> dict[str, Any]:
    linear = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "head_dim": 256,
        "num_attention_heads": 8,
    }
    types = (["linear_attention"] * 3 + ["full_attention"]) * 6
    same = {
        "num_key_value_heads": 2,
        "num_hidden_layers": 24,
        "layer_types": types,
        "tie_word_embeddings": True,
    }
    return {"model_type": "qwen3_5_text", "vocab_size": 248320, **linear, **same, **sizes}


SHAPES = {
    "llama-3.1-8b": Shape(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        16,
    ),
    "qwen3.5-0.8b": Shape(_qwen3_5(hidden_size=1024, intermediate_size=3584), 24),
    "qwen3.5-2b": Shape(_qwen3_5(hidden_size=2048, intermediate_size=6144), 24),
    "lfm2-1.2b": Shape(
        {
            "model_type": "lfm2",
            "vocab_size": 65536,
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "block_auto_adjust_ff_dim": True,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": [
                "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
            ],
        },
        16,
    ),
    "gpt-oss-20b": Shape(
        {
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
        },
        6,
    ),
    "qwen3-30b-a3b": Shape(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "mlp_only_layers": [],
        },
        8,
    ),
}


class RandomSource(Source):
    """Random weights of a config: numbers in bfloat16, or matrices in blocks of a kind of GGUF files."""

    dtype = torch.bfloat16

    def __init__(self, name: str, config: PretrainedConfig, kind: str) -> None:
        self.name, self.config, self._kind = name, config, kind
        self._pools: dict[tuple[int, bool], Tensor] = {}
        self.blocks = () if kind == "int8" else (kind,)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return layer_template(self.config)

    def weights(self, *, blocks: Collection[str] = ()) -> Iterator[Weight]:
        for name, shape in self.shapes().items():
            if not self._is_matrix(name, shape):
                yield Weight.of(name, self.tensor(name))
                continue
            if (
                len(shape) == 3 and family_of(self.config).alternating
            ):  # experts whose inputs are rows
                shape = shape[0], shape[2], shape[1]
            begin, outputs, inputs = zlib.crc32(name.encode()), prod(shape[:-1]), shape[-1]
            pool = self._pool(
                inputs, name.startswith(family_of(self.config).embedding.transformers)
            )

            def rows(first: int, last: int, pool: Tensor = pool, begin: int = begin) -> Tensor:
                return pool[(torch.arange(first, last) + begin) % POOL]

            kind = "bf16" if pool.dtype is torch.bfloat16 else self._kind
            yield Weight(name, kind, (outputs, inputs), rows)

    def tensor(self, name: str) -> Tensor:
        shape = self.shapes()[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        norm = len(shape) == 1 and name.endswith("norm.weight")
        numbers = torch.full(shape, float(not family_of(self.config).one_is_zero)) if norm else None
        if numbers is None:
            numbers = 0.02 * torch.randn(shape, generator=generator)
        return numbers if self.is_exact(name) else numbers.to(self.dtype)

    def model(self, *, packed: bool = False) -> PreTrainedModel:
        raise NotImplementedError("random weights have no model on transformers")

    @staticmethod
    def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1 and not name.endswith("_bias") and 1 not in shape

    def _pool(self, inputs: int, embeddings: bool) -> Tensor:
        """Return rows of so many inputs: bfloat16, or uint8 in blocks where these fill a row. Those of embeddings are
        larger, so that tokens make rows of states differ."""
        if (inputs, embeddings) not in self._pools:
            if self._kind == "int8" or inputs % 32:
                numbers = torch.randn(POOL, inputs, generator=torch.Generator().manual_seed(inputs))
                self._pools[inputs, embeddings] = (numbers * (1.0 if embeddings else 0.02)).to(
                    self.dtype
                )
            else:
                kind, scale = (
                    GGMLQuantizationType[self._kind.upper()],
                    OF_EMBEDDINGS if embeddings else SMALL,
                )
                drawn = blocks(POOL, inputs, kind, numpy.random.default_rng(inputs), scale)
                self._pools[inputs, embeddings] = torch.from_numpy(drawn)
        return self._pools[inputs, embeddings]


class Untried(NativeLM):
    """A native model that is not compared with transformers' modules: a layer of experts in floats fills the memory."""

    def _check(self, source: Source) -> None: ...

    def _checked_layer(self, number: int = 0) -> Any:
        return self.source


def config_of(shape: Shape, layers: int) -> PretrainedConfig:
    """Return the config with so many layers, the first ones."""
    fields = {**shape.config, "num_hidden_layers": layers}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def parameters_of(config: PretrainedConfig) -> int:
    return sum(prod(shape) for shape in layer_template(config).values())


@torch.inference_mode()
def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one record."""
    shape = SHAPES[args.shape]._replace(**({"layers": args.layers} if args.layers else {}))
    all_layers = int(shape.config["num_hidden_layers"])
    layers = min(shape.layers, all_layers)
    config = config_of(shape, layers)
    quantize = "int8" if args.kind == "int8" else None
    lm = Untried(RandomSource(args.shape, config, args.kind), quantize=quantize, numerics="integer")
    target = NativeTarget(lm)
    target.reserve(args.context + max(args.rows), max(args.rows))
    target.prefill([token % lm.vocab_size for token in range(1, args.context + 1)])
    buffer = torch.ones(READ // 8, dtype=torch.int64)
    calls: dict[tuple[str, int], Any] = {("read", 0): buffer.sum}
    for rows in args.rows:
        grown = tree(rows, lm.vocab_size)
        calls["all", rows] = lambda grown=grown: target.verify(grown)
        calls["layers", rows] = lambda grown=grown: target._run(grown, greedy=False)
    with target.running():
        ms = in_bursts(calls, args.rounds)
    experts = {}
    for rows in args.rows:
        target.verify(tree(rows, lm.vocab_size))
        experts[str(rows)] = lm.experts
    scale = (all_layers - layers) / layers
    whole = {
        rows: [a + scale * b for a, b in zip(ms["all", rows], ms["layers", rows], strict=True)]
        for rows in args.rows
    }
    best = {key: min(times) for key, times in ms.items()}
    passes = {
        rows: best["all", rows] - best["layers", rows] * (1 - 1 / layers) for rows in args.rows
    }
    share = parameters_of(config_of(shape, all_layers)) / parameters_of(config)
    yield {
        "record": "shape",
        "shape": args.shape,
        "kind": args.kind,
        "backend": target.backend,
        "threads": thread_count(),
        "context": args.context,
        "layers_run": layers,
        "layers": all_layers,
        "extrapolated": layers < all_layers,
        "ms_of_layers_run": {str(rows): _median(ms["all", rows]) for rows in args.rows},
        "ms_without_head": {str(rows): _median(ms["layers", rows]) for rows in args.rows},
        "verify_ms_by_nodes": {str(rows): _median(whole[rows]) for rows in args.rows},
        "draft_pass_ms_by_width": {str(rows): round(spent, 3) for rows, spent in passes.items()},
        "over_1_row": {str(rows): ratio(whole[rows], whole[min(args.rows)]) for rows in args.rows},
        "experts_of_layers_run": experts if lm.routes.layers else {},
        "experts_there": lm.routes.all,
        "read_gb_per_s": round(READ / 1e6 / _median(ms["read", 0]), 2),
        "weights_mb_of_layers_run": round(lm.weight_bytes / 1e6),
        "weights_mb": round(lm.weight_bytes / 1e6 * share),
        "peak_mb_of_process": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def table(found: list[dict[str, Any]]) -> str:
    """Return the records of shapes as a table in Markdown."""
    rows = [record for record in found if record["record"] == "shape"]
    counts = list(rows[0]["verify_ms_by_nodes"]) if rows else []
    heads = ["shape", "kind", "layers run", f"{counts[0]} row, ms" if counts else "", "weights, MB"]
    lines = ["| " + " | ".join([*heads, *(f"{count} rows / 1" for count in counts[1:])]) + " |"]
    lines.append("|---" * (len(heads) + len(counts) - 1) + "|")
    for record in rows:
        layers = f"{record['layers_run']} of {record['layers']}" + (
            ", extrapolated" if record["extrapolated"] else ""
        )
        cells = [
            record["shape"],
            record["kind"],
            layers,
            f"{record['verify_ms_by_nodes'][counts[0]]:.1f}",
            str(record["weights_mb"]),
        ]
        lines.append(
            "| "
            + " | ".join([*cells, *(f"{record['over_1_row'][count]:.2f}" for count in counts[1:])])
            + " |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.shapes", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--kind", choices=KINDS, default="int8", help="how matrices are kept")
    parser.add_argument(
        "--layers", type=int, help="run so many; default: what a machine of 16 GiB holds"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--context", type=int, default=200, help="tokens before the rows")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a result file")
    args = parser.parse_args(arguments)
    args.rows = sorted({1, *args.rows})
    print(table(provenance.show(measure(args), args.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
