"""The tokenizer of the model in a GGUF file, as transformers has it."""

from typing import Any

import transformers

from specengine.checkpoints.gguf.configuration import _token_id
from specengine.checkpoints.gguf.file import GGUFFile
from specengine.errors import CheckpointError, UnsupportedModelError

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
