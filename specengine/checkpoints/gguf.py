"""GGUF files: their tensors as packed blocks, their configuration and tokenizer as transformers has them.

Version 2 and 3, little endian, one file. Everything is checked against the file's size before it is believed; what is
wrong is a CheckpointError with the file's path. Source of the format: ggml's docs/gguf.md and ggml/src/gguf.cpp.
"""

import itertools
import math
import os
import re
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers

from specengine.errors import CheckpointError, InputError, UnsupportedModelError

# ---- what a file may hold


class Kind(NamedTuple):
    """How numbers are stored: `elements` of one row share a block of `bytes`. `number` is ggml's for the type."""

    number: int
    elements: int
    bytes: int


KINDS = {
    "f32": Kind(0, 1, 4),
    "f16": Kind(1, 1, 2),
    "bf16": Kind(30, 1, 2),
    "q4_0": Kind(2, 32, 18),
    "q4_1": Kind(3, 32, 20),
    "q8_0": Kind(8, 32, 34),
    "q4_k": Kind(12, 256, 144),
    "q6_k": Kind(14, 256, 210),
}
_KIND_OF = {kind.number: name for name, kind in KINDS.items()}

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = struct.Struct("<Q")
_LONGEST_KEY = 65535  # docs/gguf.md
_LEAST_ENTRY = 8 + 4 + 1  # bytes: length of the key, type, value
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes: length of the name, dimensions, one dimension, type, offset


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: `nbytes` from byte `offset` of the file on; `shape` as in torch, outputs before inputs."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file: what `read` found in it, and the tensors' blocks on demand.

    `metadata` maps keys to int, float, bool, str or lists of one of them. The descriptor is freed by `close`, by the
    end of a `with` block, or with the object.
    """

    def __init__(self, source: "_Source", metadata: dict[str, Any], tensors: dict[str, GGUFTensor]) -> None:
        self.path = source.path
        self.metadata = metadata
        self.tensors = tensors
        self._source = source

    def read(self, name: str, *, out: np.ndarray | None = None) -> np.ndarray:
        """Copies the blocks of one tensor: uint8 [nbytes], in `out` where given (uint8, contiguous, of that size).

        Raises CheckpointError where the file has changed since it was opened, and InputError for an unknown name.
        """
        if name not in self.tensors:
            raise InputError(f"{self.path} has no tensor {name!r}")
        tensor = self.tensors[name]
        if out is None:
            out = np.empty(tensor.nbytes, np.uint8)
        elif out.dtype != np.uint8 or out.shape != (tensor.nbytes,) or not out.flags.c_contiguous:
            raise InputError(f"out must be contiguous uint8 [{tensor.nbytes}] for {name}, not {out.dtype} {out.shape}")
        self._source.read_into(out.data, tensor.offset)
        return out

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Copies the blocks of rows [first, last) of one tensor: uint8 [bytes]. Raises as `read`."""
        tensor = self.tensors[name]
        each = tensor.nbytes // tensor.shape[0]
        out = np.empty((last - first) * each, np.uint8)
        self._source.read_into(out.data, tensor.offset + first * each)
        return out

    def numbers(self, name: str) -> np.ndarray:
        """One tensor in float32, in its shape."""
        blocks = self.read(name)
        return dequantize(self.tensors[name].kind, blocks, self.tensors[name].shape)

    def close(self) -> None:
        """Frees the descriptor; what was read stays."""
        self._source.close()

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def read(path: Path) -> GGUFFile:
    """Opens a file and reads all but its tensors' blocks. Raises CheckpointError for whatever is wrong with it."""
    source = _Source(Path(path))
    try:
        cursor = _Cursor(source)
        tensor_count, entry_count = _read_header(cursor)
        metadata = _read_metadata(cursor, entry_count)
        _refuse_parts(source.path, metadata)
        infos = _read_tensor_infos(cursor, tensor_count)
        return GGUFFile(source, metadata, _placed(cursor, infos, _alignment(source.path, metadata)))
    except BaseException:
        source.close()
        raise


def dequantize(kind: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What the blocks `data` (uint8, any shape) stand for, as float32 of `shape`."""
    block = KINDS.get(kind)
    if block is None:
        raise InputError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    elements, row = math.prod(shape), shape[-1] if shape else 1
    if row % block.elements or data.dtype != np.uint8 or data.size != elements // block.elements * block.bytes:
        raise InputError(f"{data.dtype} {data.shape} does not hold {list(shape)} numbers in {kind}")
    data = np.ascontiguousarray(data).reshape(-1)
    if kind == "f32":
        return data.view("<f4").astype(np.float32).reshape(shape)
    if kind == "f16":
        return data.view("<f2").astype(np.float32).reshape(shape)
    if kind == "bf16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return _unpacked(block, data, row).reshape(shape)


def _unpacked(block: Kind, data: np.ndarray, row: int) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    rows = data.reshape(-1, row // block.elements * block.bytes)
    return quants.dequantize(rows, GGMLQuantizationType(block.number))


# ---- reading


class _Source:
    """An open file whose bytes must stay what they were: copied, never mapped, so that no reader can be cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                raise CheckpointError(f"{path} is not a file")
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self._state = self._present_state()
        self.size = self._state[0]

    def read_into(self, out: bytearray | memoryview, offset: int) -> None:
        """Fills `out` (bytes) from byte `offset` on."""
        if not self.close.alive:  # the number may already belong to another file
            raise CheckpointError(f"{self.path} is closed")
        view, done = memoryview(out), 0
        try:
            while done < len(view) and (count := os.preadv(self._descriptor, [view[done:]], offset + done)):
                done += count
            changed = done < len(view) or self._present_state() != self._state
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        finally:
            view.release()
        if changed:
            raise CheckpointError(f"{self.path} was changed while it was read: load it again once it is complete")

    def _present_state(self) -> tuple[int, int]:
        state = os.fstat(self._descriptor)
        return state.st_size, state.st_mtime_ns


class _Cursor:
    """The values of a file one after the other from its start; `place` says in an error what is being read."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.position = 0
        self.place = "the header"
        self._data = bytearray()

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.source.path}: {self.place} {message}")

    def take(self, count: int) -> bytearray:
        start = self.position
        self._load(start + count)
        self.position = start + count
        return self._data[start : start + count]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, position, found = self._data, self.position, []
        for _ in range(count):
            start = position + _LENGTH.size
            if start > len(data):
                self._load(start)
            position = start + _LENGTH.unpack_from(data, start - _LENGTH.size)[0]
            if position > len(data):
                self._load(position)
            found.append(data[start:position])
        self.position = position
        try:
            return [piece.decode() for piece in found]
        except UnicodeDecodeError as error:
            raise self.error(f"is not UTF-8 ({error.reason})") from error

    def require_room(self, count: int, least: int) -> None:
        """Refuses a count of things of at least `least` bytes each that the rest of the file cannot hold."""
        if count * least > self.source.size - self.position:
            raise self.error(f"claims {count} entries, more than the file of {self.source.size} bytes can hold")

    def _load(self, end: int) -> None:
        if end > self.source.size:
            raise self.error(f"reaches to byte {end}, and the file has {self.source.size}: it is cut off or damaged")
        have = len(self._data)
        if end > have:
            more = bytearray(min(self.source.size, max(end, 2 * have, 1 << 20)) - have)
            self.source.read_into(more, have)
            self._data += more


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Counts of tensors and of metadata entries."""
    magic = bytes(cursor.take(4))
    if magic != b"GGUF":
        raise CheckpointError(f"{cursor.source.path} is no GGUF file: it begins with {magic!r}")
    version = cursor.number("I")
    if version and version & 0xFFFF == 0:
        raise CheckpointError(f"{cursor.source.path} is big endian: only little-endian GGUF files are read")
    if version not in (2, 3):
        raise CheckpointError(f"{cursor.source.path} has GGUF version {version}: only 2 and 3 are read")
    tensor_count, entry_count = cursor.number("Q"), cursor.number("Q")
    cursor.require_room(tensor_count, _LEAST_TENSOR)
    cursor.require_room(entry_count, _LEAST_ENTRY)
    return tensor_count, entry_count


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(count):
        cursor.place = f"the key of metadata entry {number}"
        key = cursor.string()
        if len(key) > _LONGEST_KEY:
            raise cursor.error(f"has {len(key)} characters, more than {_LONGEST_KEY}")
        cursor.place = f"metadata {key[:80]!r}"
        if key in metadata:
            raise cursor.error("stands there twice")
        metadata[key] = _read_value(cursor, cursor.number("I"))
    return metadata


def _read_value(cursor: _Cursor, code: int) -> Any:
    if code == _STRING:
        return cursor.string()
    if code == _ARRAY:
        return _read_array(cursor, cursor.number("I"), cursor.number("Q"))
    return _read_numbers(cursor, code, 1)[0]


def _read_array(cursor: _Cursor, code: int, count: int) -> list[Any]:
    if code == _ARRAY:
        raise cursor.error("is an array of arrays, which is not read")
    if code != _STRING:
        return _read_numbers(cursor, code, count)
    cursor.require_room(count, _LENGTH.size)
    return cursor.strings(count)


def _read_numbers(cursor: _Cursor, code: int, count: int) -> list[Any]:
    if code == _BOOL:
        values = list(cursor.take(count))
        if max(values, default=0) > 1:
            raise cursor.error("is a truth value that is neither 0 nor 1")
        return [bool(value) for value in values]
    if code not in _NUMBERS:
        raise cursor.error(f"has the unknown type {code}")
    dtype = np.dtype(_NUMBERS[code])
    return np.frombuffer(cursor.take(count * dtype.itemsize), dtype).tolist()


def _refuse_parts(path: Path, metadata: Mapping[str, Any]) -> None:
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise CheckpointError(f"{path} is one of {str(parts)[:80]} parts: join them with llama-gguf-split --merge")


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value <= 0 or value & (value - 1):
        raise CheckpointError(f"{path}: general.alignment must be a power of two, not {str(value)[:80]}")
    return value


def _read_tensor_infos(cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
    """The tensors with their offsets still counted from the start of the data."""
    infos: dict[str, GGUFTensor] = {}
    for number in range(count):
        cursor.place = f"the name of tensor {number}"
        name = cursor.string()
        cursor.place = f"tensor {name[:80]!r}"
        if name in infos:
            raise cursor.error("stands there twice")
        infos[name] = _read_tensor_info(cursor, name)
    return infos


def _read_tensor_info(cursor: _Cursor, name: str) -> GGUFTensor:
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= 4:
        raise cursor.error(f"has {dimensions} dimensions, and 1 to 4 are accepted")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in _KIND_OF:
        raise cursor.error(f"is of type {_type_name(number)}, and accepted are {', '.join(KINDS).upper()}")
    kind = KINDS[_KIND_OF[number]]
    if 0 in shape:
        raise cursor.error(f"is empty: {list(shape)}")
    if shape[-1] % kind.elements:
        raise cursor.error(f"has rows of {shape[-1]}, no multiple of the {kind.elements} in a block")
    return GGUFTensor(name, shape, _KIND_OF[number], offset, math.prod(shape) // kind.elements * kind.bytes)


def _type_name(number: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return f"number {number}"


def _placed(cursor: _Cursor, infos: dict[str, GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
    """The tensors with their offsets in the file, in the order of the file's list."""
    start = -(-cursor.position // alignment) * alignment
    placed = {name: replace(info, offset=start + info.offset) for name, info in infos.items()}
    taken, last = start, ""
    for tensor in sorted(placed.values(), key=lambda tensor: tensor.offset):
        cursor.place = f"tensor {tensor.name[:80]!r}"
        if tensor.offset % alignment:
            raise cursor.error(f"begins at byte {tensor.offset - start} of the data, no multiple of {alignment}")
        if tensor.offset < taken:
            raise cursor.error(f"overlaps tensor {last[:80]!r}")
        taken, last = tensor.offset + tensor.nbytes, tensor.name
        if taken > cursor.source.size:
            raise cursor.error(f"ends at byte {taken}, and the file has {cursor.source.size}: it is cut off or damaged")
    return placed


# ---- names and shapes

_MODULES = {  # within a layer: ggml's name -> Hugging Face's
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING, _NORM, _OUTPUT = "token_embd.weight", "output_norm.weight", "output.weight"
_ROPE_FACTORS = "rope_freqs.weight"  # no weight of the model: it says what rope_parameters says


def tensor_names(layers: int) -> dict[str, str]:
    """Hugging Face's name for each tensor that a model of so many layers may have, biases and head norms included."""
    names = {_EMBEDDING: "model.embed_tokens.weight", _NORM: "model.norm.weight", _OUTPUT: "lm_head.weight"}
    for layer, (module, name) in itertools.product(range(layers), _MODULES.items()):
        names[f"blk.{layer}.{module}.weight"] = f"model.layers.{layer}.{name}.weight"
        if name.endswith("_proj"):
            names[f"blk.{layer}.{module}.bias"] = f"model.layers.{layer}.{name}.bias"
    return names


def tensor_shapes(config: transformers.PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that the model must have by their names in the file, and their shapes."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (vocabulary, hidden), _NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_OUTPUT] = (vocabulary, hidden)
    layer = dict(_layer_shapes(config))
    for number in range(config.num_hidden_layers):
        shapes.update({f"blk.{number}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(config: transformers.PretrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    biased = _biased_modules(config)
    linear = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for name, (outputs, inputs) in linear.items():
        yield f"{name}.weight", (outputs, inputs)
        if name in biased:
            yield f"{name}.bias", (outputs,)
    yield "attn_norm.weight", (hidden,)
    yield "ffn_norm.weight", (hidden,)
    if config.model_type == "qwen3":
        yield "attn_q_norm.weight", (config.head_dim,)
        yield "attn_k_norm.weight", (config.head_dim,)


def _biased_modules(config: transformers.PretrainedConfig) -> set[str]:
    if config.model_type == "qwen2":
        return {"attn_q", "attn_k", "attn_v"}
    attention = {"attn_q", "attn_k", "attn_v", "attn_output"} if config.attention_bias else set()
    return attention | ({"ffn_gate", "ffn_up", "ffn_down"} if getattr(config, "mlp_bias", False) else set())


def require_complete(file: GGUFFile, config: transformers.PretrainedConfig) -> None:
    """Raises CheckpointError with the tensors that are missing, of another shape, or not used by this model."""
    wanted = tensor_shapes(config)
    found = {name: tensor.shape for name, tensor in file.tensors.items()}
    if config.rope_parameters.get("rope_type") == "llama3":
        found.pop(_ROPE_FACTORS, None)
    differ = [
        f"{name} {list(found[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    problems = {
        "missing": [name for name in wanted if name not in found],
        "of another shape": differ,
        "not used by this model": [name for name in found if name not in wanted],
    }
    listed = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if listed:
        raise CheckpointError(f"{file.path} does not fit a {config.model_type} of its size; {'; '.join(listed)}")


def _some(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name[:120] for name in names[:most]) + more


def row_order(config: transformers.PretrainedConfig, name: str) -> np.ndarray | None:
    """For each row of Hugging Face's tensor, the row of the file's tensor `name` that holds it: int32 [rows], or None.

    llama.cpp turns neighbouring elements of a head, Hugging Face one of the first half with one of the second, so its
    converter interleaves the halves of q and k for llama (convert_hf_to_gguf.py: LlamaModel.permute).
    """
    module = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", name)
    if config.model_type != "llama" or module is None:
        return None
    heads = config.num_attention_heads if module[1] == "q" else config.num_key_value_heads
    rows = np.arange(heads * config.head_dim, dtype=np.int32)
    return rows.reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


# ---- configuration

_CONFIGS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # keys that would change the forward, and the values that do not
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "nextn_predict_layers": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


class _Fields:
    """The metadata of one architecture, each value checked where it is asked for."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointError(f"{file.path} lacks general.architecture, or it is no text")
        if architecture not in _CONFIGS:
            raise UnsupportedModelError(
                f"{file.path} has architecture {architecture[:80]!r}, and accepted are {', '.join(_CONFIGS)}"
            )
        self.architecture = architecture

    def value(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        value = default if self.value(key) is None else self.value(key)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.error(key, value, "a positive integer")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = default if self.value(key) is None else self.value(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, value, "a positive number")
        return float(value)

    def error(self, key: str, value: object, accepted: str) -> CheckpointError:
        shown = "missing" if value is None else str(value)[:80]
        return CheckpointError(f"{self.file.path}: {self.architecture}.{key} must be {accepted}; it is {shown}")

    def unsupported(self, key: str, reason: str) -> UnsupportedModelError:
        shown = str(self.value(key))[:80]
        return UnsupportedModelError(f"{self.file.path}: {self.architecture}.{key} = {shown} {reason}")


def config(file: GGUFFile) -> transformers.PretrainedConfig:
    """The model's configuration: LlamaConfig (for Mistral too: stored as llama), Qwen2Config or Qwen3Config.

    Raises UnsupportedModelError for another architecture and for what no such configuration can say, CheckpointError
    for values that are missing or contradict the tensors; which tensors there must be, `require_complete` checks.
    """
    fields = _Fields(file)
    for key, values in _WITHOUT_EFFECT.items():
        if fields.value(key) is not None and fields.value(key) not in values:
            raise fields.unsupported(key, "is not supported")
    sizes, epsilon = _sizes(fields), fields.positive("attention.layer_norm_rms_epsilon")
    rope = _rope_parameters(fields, sizes["head_dim"])
    ids = _special_ids(file, sizes["vocab_size"])
    name = _CONFIGS[fields.architecture]
    try:
        return getattr(transformers, name)(
            **sizes,
            **ids,
            **_biases(fields),
            rms_norm_eps=epsilon,
            rope_parameters=rope,
            tie_word_embeddings=_OUTPUT not in file.tensors,
            architectures=[name.replace("Config", "ForCausalLM")],
        )
    except Exception as error:  # transformers' own checks, whose errors have no common base
        raise CheckpointError(f"{file.path} makes no {name}: {error}") from error


def _biases(fields: _Fields) -> dict[str, bool]:
    tensors = fields.file.tensors
    attention = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    mlp = {"mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return {"llama": attention | mlp, "qwen2": {}, "qwen3": attention}[fields.architecture]


def _sizes(fields: _Fields) -> dict[str, int]:
    hidden, layers, heads = (fields.count(key) for key in ("embedding_length", "block_count", "attention.head_count"))
    tensors = fields.file.tensors
    embedding = tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        shown = "there is none" if embedding is None else f"it is {list(embedding.shape)}"
        raise CheckpointError(f"{fields.file.path}: {_EMBEDDING} must be [vocabulary, {hidden}]; {shown}")
    tokens = fields.file.metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        rows = embedding.shape[0]
        raise CheckpointError(f"{fields.file.path}: {_EMBEDDING} has {rows} rows for {len(tokens)} tokens")
    if layers > len(tensors):
        raise fields.error("block_count", layers, f"at most the number of tensors, {len(tensors)}")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(fields, heads),
        "head_dim": _head_dim(fields, hidden, heads),
        "max_position_embeddings": fields.count("context_length"),
    }


def _key_value_heads(fields: _Fields, heads: int) -> int:
    count = fields.count("attention.head_count_kv", heads)
    if heads % count:
        raise fields.error("attention.head_count_kv", count, f"a divisor of the {heads} heads")
    return count


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    size = fields.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.count(key, size) != size:
            raise fields.unsupported(key, f"is not supported: it must be the size of a head, {size}")
    if size % 2:
        raise CheckpointError(f"{fields.file.path}: heads of {size} elements cannot be rotated: the size must be even")
    return size


def _special_ids(file: GGUFFile, vocabulary: int) -> dict[str, int | None]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: _token_id(file, key, vocabulary) for name, key in keys.items()}


def _token_id(file: GGUFFile, key: str, vocabulary: int) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and (type(value) is not int or not 0 <= value < vocabulary):
        shown = str(value)[:80]
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} must be one of {vocabulary} token ids, not {shown}")
    return value


def _rope_parameters(fields: _Fields, head_dim: int) -> dict[str, Any]:
    theta = fields.positive("rope.freq_base", 10_000.0)
    kind = fields.value("rope.scaling.type")
    factor = fields.positive("rope.scaling.factor", fields.positive("rope.scale_linear", 1.0))
    if kind == "none" or (kind in (None, "linear") and factor == 1):  # llama.cpp: linear where nothing is said
        plain = {"rope_type": "default", "rope_theta": theta}
        return _llama3_rope(fields, theta, head_dim) if _ROPE_FACTORS in fields.file.tensors else plain
    if kind not in (None, "linear", "yarn") or _ROPE_FACTORS in fields.file.tensors:
        raise fields.unsupported("rope.scaling.type", f"with {_ROPE_FACTORS} or of that kind is not supported")
    if kind != "yarn":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": fields.count("rope.scaling.original_context_length"),
        "beta_fast": fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.positive("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_rope(fields: _Fields, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters that the file's factors were made from; all Llama 3 models share them but for the factor."""
    stored = fields.file.numbers(_ROPE_FACTORS)
    low, high, context = 1.0, 4.0, 8192
    factor = float(stored.max())
    turns = context * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    with np.errstate(all="ignore"):  # a damaged file's numbers
        known = stored.shape == smooth.shape and np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4)
    if not known:
        raise UnsupportedModelError(
            f"{fields.file.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3 models "
            f"(low {low}, high {high}, context {context}), so their meaning is unknown"
        )
    frequencies = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": context}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **frequencies}


# ---- tokenizer

_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer(file: GGUFFile) -> transformers.PreTrainedTokenizerFast:
    """The tokenizer that AutoTokenizer makes of the file, chat template included. Raises CheckpointError."""
    _require_vocabulary(file)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    ids = {name: _token_id(file, key, len(tokens)) for name, key in _SPECIAL_TOKENS.items()}
    special = {name: None if number is None else tokens[number] for name, number in ids.items()}
    try:
        return _build_tokenizer(file, special)
    except Exception as error:  # whatever transformers and tokenizers meet in a vocabulary that contradicts itself
        raise CheckpointError(f"{file.path}: no tokenizer can be built from its vocabulary: {error}") from error


def _build_tokenizer(file: GGUFFile, special: dict[str, str | None]) -> transformers.PreTrainedTokenizerFast:
    try:
        from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    except ImportError:  # an older transformers, which takes only the file, and its time
        return transformers.AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    metadata = {key.removeprefix("tokenizer."): value for key, value in file.metadata.items()}
    parts = {
        part: {name: metadata[key] for key, name in names.items() if key in metadata}
        for part, names in GGUF_TOKENIZER_MAPPING.items()
    }
    options = parts["tokenizer_config"]
    if parts["tokenizer"]["tokenizer_type"] == "llama":
        options.setdefault("add_bos_token", True)  # as llama.cpp, where an older file does not say
    backend, more = convert_gguf_tokenizer(file.metadata["general.architecture"], parts["tokenizer"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options, **special, **more)


def _require_vocabulary(file: GGUFFile) -> None:
    """Refuses a vocabulary of another sort, and lists of the wrong type or length."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        shown = "no tokenizer" if model is None else f"a tokenizer of kind {str(model)[:80]!r}"
        raise UnsupportedModelError(f"{file.path} has {shown}, and accepted are gpt2 (byte-level BPE) and llama (SPM)")
    tokens = _listed(file, "tokens", str)
    for name, kind in {"token_type": int, "scores": float}.items():
        if f"tokenizer.ggml.{name}" in file.metadata and len(_listed(file, name, kind)) != len(tokens):
            raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} must be as long as the {len(tokens)} tokens")
    if model == "gpt2" or "tokenizer.ggml.merges" in file.metadata:
        _require_pairs(file, _listed(file, "merges", str))
    else:
        _listed(file, "scores", float)
    if not isinstance(file.metadata.get("tokenizer.chat_template", ""), str):
        raise CheckpointError(f"{file.path}: tokenizer.chat_template must be text")


def _require_pairs(file: GGUFFile, merges: list[str]) -> None:
    wrong = next((merge for merge in merges if merge.count(" ") != 1), None)
    if wrong is not None:
        raise CheckpointError(f"{file.path}: a merge must be two pieces with one space between, not {wrong[:80]!r}")


def _listed(file: GGUFFile, name: str, kind: type) -> list[Any]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or type(value[0]) is not kind:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} must be a list of {kind.__name__}, not empty")
    return value
