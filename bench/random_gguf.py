"""Write a GGUF file of a Llama's shape with random blocks: for timing, without fetching a model of that size.

python -m bench.random_gguf build/llama-1b.gguf --kind Q4_K
python -m bench.random_gguf build/moe.gguf --kind Q4_0 --experts 128 8 768 --heads 32 4 --head 128 --layers 4

With experts it is of Qwen3-MoE's shape.
"""

from __future__ import annotations

import argparse
import os
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
SMALL = numpy.float16(1e-3)  # the scale of blocks: logits stay finite
# rows of states differ by their tokens more than by what they saw
OF_EMBEDDINGS = numpy.float16(0.1)


def blocks(
    outputs: int,
    inputs: int,
    kind: GGMLQuantizationType,
    random: numpy.random.Generator,
    scale: numpy.float16 = SMALL,
) -> numpy.ndarray:
    """Return a matrix of random blocks, uint8 [outputs, bytes], of this scale; a scale that stands alone has signs.

    Without signs the mean of 4-bit numbers, which is not 0, would make all rows of states alike.
    """
    each, size = GGML_QUANT_SIZES[kind]
    found = random.integers(0, 256, (outputs, inputs // each, size), dtype=numpy.uint8)
    scales = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (size - 2,)}[
        kind.name
    ]
    for at in scales:
        found[..., at : at + 2] = numpy.frombuffer(scale.tobytes(), numpy.uint8)
    if len(scales) == 1:
        found[..., scales[0] + 1] |= random.integers(0, 2, found.shape[:2], dtype=numpy.uint8) << 7
    return found.reshape(outputs, -1)


class Experts(NamedTuple):
    """Experts of a layer, those of a token, and channels of one."""

    number: int
    used: int
    inner: int


def write(  # noqa: PLR0913
    file: Path,
    kind: str,
    *,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    words: int,
    head: int | None = None,
    experts: Experts | None = None,
) -> None:
    """Write the file; heads: of queries and of keys; head: channels of one. It takes its name when it is complete."""
    random, quantized = numpy.random.default_rng(0), GGMLQuantizationType[kind]
    file.parent.mkdir(parents=True, exist_ok=True)
    growing = file.with_suffix(".part")
    architecture, size = "llama" if experts is None else "qwen3moe", head or hidden // heads[0]
    writer = GGUFWriter(growing, architecture)
    counts = {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "vocab_size": words,
    }
    if experts is not None:
        counts |= {"expert_count": experts.number, "expert_used_count": experts.used}
        counts["expert_feed_forward_length"] = experts.inner
    for key, value in counts.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 500000.0)
    writer.add_tokenizer_model("no_vocab")
    matrices: dict[str, tuple[int, ...]] = {
        "attn_q": (heads[0] * size, hidden),
        "attn_k": (heads[1] * size, hidden),
        "attn_v": (heads[1] * size, hidden),
        "attn_output": (hidden, heads[0] * size),
    }
    vectors = {"attn_norm": hidden, "ffn_norm": hidden}
    if experts is None:
        matrices |= {
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
    else:
        up, down = (experts.number, experts.inner, hidden), (experts.number, hidden, experts.inner)
        matrices |= {"ffn_gate_exps": up, "ffn_up_exps": up, "ffn_down_exps": down}
        vectors |= {"attn_q_norm": size, "attn_k_norm": size}
    writer.add_tensor(
        "token_embd.weight",
        blocks(words, hidden, quantized, random, OF_EMBEDDINGS),
        raw_dtype=quantized,
    )
    writer.add_tensor("output_norm.weight", numpy.ones(hidden, numpy.float32))
    for layer in range(layers):
        for name, shape in matrices.items():
            found = blocks(prod(shape[:-1]), shape[-1], quantized, random).reshape(*shape[:-1], -1)
            writer.add_tensor(f"blk.{layer}.{name}.weight", found, raw_dtype=quantized)
        for name, length in vectors.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", numpy.ones(length, numpy.float32))
        if experts is not None:
            router = random.standard_normal((experts.number, hidden), numpy.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(growing, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="Q4_K")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--inner", type=int, default=8192, help="channels of the feed-forward network"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(32, 8), help="of queries and of keys"
    )
    parser.add_argument(
        "--head", type=int, help="channels of a head; default: hidden over heads of queries"
    )
    parser.add_argument("--experts", type=int, nargs=3, metavar=("COUNT", "USED", "INNER"))
    parser.add_argument("--vocabulary", type=int, default=128256)
    args = parser.parse_args()
    shape = {"hidden": args.hidden, "inner": args.inner, "layers": args.layers}
    more = {"head": args.head, "experts": Experts(*args.experts) if args.experts else None}
    write(args.file, args.kind, heads=tuple(args.heads), words=args.vocabulary, **shape, **more)


if __name__ == "__main__":
    main()
