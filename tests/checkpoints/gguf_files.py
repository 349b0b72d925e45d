"""Small GGUF files: whole models by the gguf package's writer, and damaged ones byte by byte."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specengine.checkpoints.gguf import KINDS, GGUFFile, read

ARCHITECTURES = ("llama", "qwen2", "qwen3")
HIDDEN, INNER, HEADS, KEY_HEADS, HEAD, LAYERS, CONTEXT = 64, 96, 4, 2, 16, 2, 128

# ---- tensors


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random packed rows: uint8 [rows, bytes of a row], whose numbers are about 1/8."""
    random = np.random.default_rng(seed)
    if kind == "iq1_m":
        return _iq1_m(rows * columns // 256, random).reshape(rows, -1)
    if kind == "nvfp4":
        made = random.integers(0, 256, (rows * columns // 64, 36), np.uint8)
        made[:, :4] = made[:, :4] % 8 + 16  # scales of 1/32 to 1/17
        return made.reshape(rows, -1)
    if kind in _RANDOM:
        count = rows * columns // KINDS[kind].elements
        return _random_blocks(kind, count, random).reshape(rows, -1)
    numbers = random.standard_normal((rows, columns), dtype=np.float32) / 8
    if kind in ("f32", "f16"):
        return numbers.astype({"f32": "<f4", "f16": "<f2"}[kind], copy=False).view(np.uint8)
    return gguf.quants.quantize(numbers, GGMLQuantizationType[kind.upper()]).view(np.uint8)


# Kinds that the gguf package does not write: the size of a block's scale, which integers follow or precede; its place,
# and of how many halves it is, as some have a scale of the minima too.
_RANDOM = {
    "q2_k": (8e-3, "last", 2),
    "q3_k": (3e-3, "last", 1),
    "q4_k": (6e-4, "first", 2),
    "q5_k": (3e-4, "first", 2),
    "q6_k": (1e-4, "last", 1),
    "iq4_nl": (1e-3, "first", 1),
    "iq4_xs": (8e-5, "first", 1),
    "q1_0": (1e-1, "first", 1),
    "q2_0": (1e-1, "first", 1),
    "iq1_s": (2e-2, "first", 1),
    "iq2_xxs": (1e-3, "first", 1),
    "iq2_xs": (1e-3, "first", 1),
    "iq2_s": (1e-3, "first", 1),
    "iq3_xxs": (1e-3, "first", 1),
    "iq3_s": (1e-3, "first", 1),
}


def _random_blocks(kind: str, count: int, random: np.random.Generator) -> np.ndarray:
    scale, place, halves = _RANDOM[kind]
    scales = random.uniform(scale, 2 * scale, (count, halves)).astype("<f2").view(np.uint8)
    others = random.integers(0, 256, (count, KINDS[kind].bytes - 2 * halves), np.uint8)
    return np.concatenate([scales, others] if place == "first" else [others, scales], axis=1)


def _iq1_m(count: int, random: np.random.Generator) -> np.ndarray:
    """Blocks whose scale, a half, stands in the upper four bits of the last four 16-bit words."""
    made = random.integers(0, 256, (count, 56), np.uint8)
    scales = random.uniform(2e-2, 4e-2, count).astype("<f2").view("<u2")
    for word in range(4):
        made[:, 49 + 2 * word] = (
            made[:, 49 + 2 * word] & 15 | (scales >> 4 * word & 15).astype(np.uint8) << 4
        )
    return made


def add(writer: GGUFWriter, name: str, kind: str, shape: tuple[int, ...], seed: int = 0) -> None:
    rows = int(np.prod(shape[:-1], dtype=int))
    block = KINDS[kind]
    # the package lists no Q2_0
    number: Any = block.number
    gguf.GGML_QUANT_SIZES.setdefault(number, (block.elements, block.bytes))
    data = blocks(kind, rows, shape[-1], seed)
    writer.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=number)


# ---- whole models


def byte_level_vocabulary() -> dict[str, Any]:
    """A BPE vocabulary like GPT-2's: each byte, a few merges, two control tokens and one of the user's."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
    tokens = [
        "<|end|>",
        "<|im_start|>",
        *bytes_to_unicode().values(),
        *(merge.replace(" ", "") for merge in merges),
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, "<think>"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2), 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|end|>{% endfor %}",
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """A vocabulary like Llama 2's: bytes, letters, and pieces whose scores are the order of the merges."""
    letters = ["▁", *"helowrd!"]
    pieces = ["he", "ll", "hell", "hello", "▁hello"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        *pieces,
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - len(pieces))
        + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sizes(architecture: str) -> dict[str, Any]:
    """The metadata of a model with two layers."""
    values = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEY_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50_000.0,
        "rope.dimension_count": HEAD,
    }
    if architecture == "qwen3":
        values |= {"attention.key_length": HEAD, "attention.value_length": HEAD}
    return {f"{architecture}.{key}": value for key, value in values.items()}


def weights(
    architecture: str, vocabulary: int, kind: str = "q8_0", *, tied: bool = False
) -> dict[str, Any]:
    """Name -> (kind, shape) of the model's tensors; vectors in float32, as llama.cpp stores them."""
    linear = {
        "attn_q": (HEADS * HEAD, HIDDEN),
        "attn_k": (KEY_HEADS * HEAD, HIDDEN),
        "attn_v": (KEY_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    vectors = {"attn_norm.weight": HIDDEN, "ffn_norm.weight": HIDDEN}
    if architecture == "qwen2":
        vectors |= {f"attn_{part}.bias": linear[f"attn_{part}"][0] for part in "qkv"}
    if architecture == "qwen3":
        vectors |= {"attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD}
    named = {
        "token_embd.weight": (kind, (vocabulary, HIDDEN)),
        "output_norm.weight": ("f32", (HIDDEN,)),
    }
    if not tied:
        named["output.weight"] = (kind, (vocabulary, HIDDEN))
    for layer in range(LAYERS):
        named |= {f"blk.{layer}.{name}.weight": (kind, shape) for name, shape in linear.items()}
        named |= {f"blk.{layer}.{name}": ("f32", (size,)) for name, size in vectors.items()}
    return named


def write_model(
    path: Path,
    architecture: str = "llama",
    *,
    kind: str = "q8_0",
    tied: bool = False,
    vocabulary: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Random weights; `metadata` and `tensors` (name -> (kind, shape)) add, replace, or with None remove."""
    words = byte_level_vocabulary() if vocabulary is None else vocabulary
    named = weights(
        architecture, len(words.get("tokenizer.ggml.tokens", range(300))), kind, tied=tied
    )
    values = {**sizes(architecture), **words, **(metadata or {})}
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        if value is not None and key != "general.architecture":
            _add_value(writer, key, value)
    for seed, (name, tensor) in enumerate({**named, **(tensors or {})}.items()):
        if isinstance(tensor, np.ndarray):
            writer.add_tensor(name, tensor)
        elif tensor is not None:
            add(writer, name, *tensor, seed)
    return finish(writer, path)


def opened(folder: Path, architecture: str = "llama", **changes: Any) -> GGUFFile:
    return read(write_model(folder / "model.gguf", architecture, **changes))


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, tuple):  # of a type that is named
        writer.add_key_value(key, value[1], GGUFValueType[value[0]])
    else:
        types = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
        writer.add_key_value(key, value, types.get(type(value), GGUFValueType.STRING))


# ---- byte by byte


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, code: int, value: bytes) -> bytes:
    """Return one metadata entry of ggml's value type `code`."""
    return text(key) + struct.pack("<I", code) + value


def info(name: str, dimensions: Iterable[int], number: int = 0, offset: int = 0) -> bytes:
    """Return one entry of the tensor list; dimensions as in the file, inputs first."""
    sizes = list(dimensions)
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset)


def encode(
    entries: Iterable[bytes] = (),
    infos: Iterable[bytes] = (),
    data: int = 64,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A file of these entries and tensors, with `data` bytes of zeros behind."""
    entries, infos = list(entries), list(infos)
    head = (
        b"GGUF"
        + struct.pack("<IQQ", version, len(infos), len(entries))
        + b"".join([*entries, *infos])
    )
    return head + bytes(-len(head) % alignment + data)


def written(folder: Path, raw: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    return path
