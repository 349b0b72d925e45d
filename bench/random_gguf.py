"""Write a GGUF file of a Llama's shape with random blocks: for timing, without fetching a model of that size.

python -m bench.random_gguf build/llama-1b.gguf --kind Q4_K
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
SMALL = numpy.float16(1e-3)  # the scale of every block: logits stay finite


def blocks(outputs: int, inputs: int, kind: GGMLQuantizationType, random: numpy.random.Generator) -> numpy.ndarray:
    """Return a matrix of random blocks, uint8 [outputs, bytes], with small scales and minima."""
    each, size = GGML_QUANT_SIZES[kind]
    found = random.integers(0, 256, (outputs, inputs // each, size), dtype=numpy.uint8)
    scales = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (size - 2,)}[kind.name]
    for at in scales:
        found[..., at : at + 2] = numpy.frombuffer(SMALL.tobytes(), numpy.uint8)
    return found.reshape(outputs, -1)


def write(file: Path, kind: str, *, hidden: int, inner: int, layers: int, heads: tuple[int, int], words: int) -> None:
    """Write the file; heads: of queries and of keys. It takes its name when it is complete."""
    random, quantized = numpy.random.default_rng(0), GGMLQuantizationType[kind]
    file.parent.mkdir(parents=True, exist_ok=True)
    growing = file.with_suffix(".part")
    writer = GGUFWriter(growing, "llama")
    counts = {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "rope.dimension_count": hidden // heads[0],
        "vocab_size": words,
    }
    for key, value in counts.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 500000.0)
    writer.add_tokenizer_model("no_vocab")
    size = hidden // heads[0]
    matrices = {
        "attn_q": (heads[0] * size, hidden),
        "attn_k": (heads[1] * size, hidden),
        "attn_v": (heads[1] * size, hidden),
        "attn_output": (hidden, heads[0] * size),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    ones = numpy.ones(hidden, numpy.float32)
    writer.add_tensor("token_embd.weight", blocks(words, hidden, quantized, random), raw_dtype=quantized)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(layers):
        for name, shape in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks(*shape, quantized, random), raw_dtype=quantized)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
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
    parser.add_argument("--inner", type=int, default=8192, help="channels of the feed-forward network")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries and of keys")
    parser.add_argument("--vocabulary", type=int, default=128256)
    args = parser.parse_args()
    shape = {"hidden": args.hidden, "inner": args.inner, "layers": args.layers}
    write(args.file, args.kind, heads=tuple(args.heads), words=args.vocabulary, **shape)


if __name__ == "__main__":
    main()
