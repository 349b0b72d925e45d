"""Two ways of models that are not native: packed layers, and trees path by path on a model's own cache.

    python -m bench.other_forwards --out bench/results/other-forwards-amd.jsonl

Weights are random, so answers mean nothing; times and which tokens repeat do not depend on what they say. Ways are
interleaved, a record a way and round; the last record of a model has medians of their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, OPTConfig, OPTForCausalLM

from bench.provenance import Record, show
from specengine import Engine
from specengine.models.huggingface import HuggingFaceTarget

ROUNDS, TOKENS = 5, 48
PROMPT = list(range(100, 116)) * 4  # it repeats itself, as text does that a draft can copy


def packed() -> Iterator[Record]:
    """Yield tokens/s of an OPT shape in bfloat16 without and with packed copies of its weights."""
    config = OPTConfig(
        vocab_size=32_000,
        hidden_size=1024,
        ffn_dim=4096,
        num_hidden_layers=12,
        num_attention_heads=16,
        max_position_embeddings=1024,
        word_embed_proj_dim=1024,
    )
    model = OPTForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    engines = {
        name: Engine(HuggingFaceTarget(model, pack=pack))
        for name, pack in {"as they are": False, "packed": True}.items()
    }
    yield from interleaved("OPT shape, bfloat16", {n: speed(e) for n, e in engines.items()})


def paths() -> Iterator[Record]:
    """Yield tokens/s of an LFM2 shape on transformers' modules, whose trees are verified path by path."""
    config = Lfm2Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        layer_types=["conv", "conv", "full_attention"] * 4,
    )
    model = Lfm2ForCausalLM(config).eval()
    loaded = {
        draft: Engine.from_pretrained(model, draft, backend="huggingface", memory="off")
        for draft in ("none", "recycling")
    }
    ways = {"plain": speed(loaded["none"])}
    for policy in ("auto", "chain"):
        ways[policy] = speed(loaded["recycling"], policy)
    yield from interleaved("LFM2 shape, float32, own cache", ways)


def speed(engine: Engine, policy: str | None = None) -> Callable[[], Record]:
    """Return what answers once, and says how fast: tokens/s, and tokens per verification."""

    def measured() -> Record:
        answer = engine.generate(PROMPT, max_new_tokens=TOKENS, eos_token_id=[], policy=policy)
        return {
            "tokens_per_second": round(answer.stats.tokens_per_second, 2),
            "mean_acceptance_length": round(answer.stats.mean_acceptance_length, 2),
        }

    return measured


def interleaved(model: str, ways: dict[str, Callable[[], Record]]) -> Iterator[Record]:
    """Yield a record of every way and round, then the medians of each way over the first one."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, measured in ways.items():
            figures = measured()
            if turn:  # the first one warms up
                speeds[name].append(figures["tokens_per_second"])
                yield {"record": "round", "model": model, "way": name, "round": turn} | figures
    first, *others = speeds
    for name in others:
        ratios = [new / old for new, old in zip(speeds[name], speeds[first], strict=True)]
        yield {
            "record": "ratio",
            "model": model,
            "way": name,
            "over": first,
            "median": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }


def records() -> Iterator[Record]:
    torch.manual_seed(0)
    yield from packed()
    yield from paths()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.other_forwards", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a result file")
    show(records(), parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
