"""MTP heads of a checkpoint, which transformers leaves unread, and Gemma 4's assistants, which are models apart."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from specengine.checkpoints import gguf
from specengine.checkpoints.checks import why_absent
from specengine.checkpoints.gguf_source import GGUFSource
from specengine.checkpoints.safetensors_file import WEIGHT_FILES, StoredTensor, stacked, tensors_of
from specengine.errors import (
    CheckpointError,
    SpecEngineError,
    UnsupportedModelError,
    refuse_misfits,
    require,
    restating,
)
from specengine.files import safetensors_files
from specengine.models.configs import family_of, layer_template, with_buffers
from specengine.models.kv_cache import CachedTarget, LanguageModel
from specengine.models.mtp import (
    ASSISTANT_TYPES,
    Assistant,
    AssistantHead,
    MtpHead,
    MtpLayer,
    blocks_of,
    names_in_head,
    of_head,
    parts_in,
)
from specengine.models.native import NativeLM
from specengine.models.native.lm import NativeAssistant, NativeMtpHead

_OUTSIDE = {  # of a head's block, by their names in GGUF files
    "fc.weight": "nextn.eh_proj.weight",
    "embedding_norm.weight": "nextn.enorm.weight",
    "hidden_norm.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}


def is_stored(name: str, target: LanguageModel) -> bool:
    """Return whether the files of a model bring an MTP head. Fetches nothing.

    name: a folder, or an id whose files the Hub's cache holds. Of a GGUF file the native forward alone knows the head.
    """
    try:
        if (file := _file_of(target)) is not None:
            names = {stored for names in _names_in_file(target.config).values() for stored in names}
            return names <= set(file.file.tensors)
        folder = _folder(name)
        return folder is not None and bool(parts_in(_tensors(folder), _layers(target.config)))
    except (SpecEngineError, OSError, ValueError):
        return False


def load(name: str, target: LanguageModel) -> MtpHead:
    """Return the first MTP head stored with a model, in the target's dtype and on its device.

    InputError where the model's files bring none; CheckpointError, which lists them, for tensors that are missing, not
    known or of another shape.
    """
    file, folder = _file_of(target), _folder(name)
    if file is None:
        tensors = {} if folder is None else _tensors(folder)
        names = names_in_head(tensors, _layers(target.config), len(blocks_of(target.config)))
        stored = stacked({inside: tensors[key] for key, inside in names.items()}, {})
        state = {inside: tensor.read(0, tensor.shape[0]) for inside, tensor in stored.items()}
    else:  # in the block after the file's own
        by_name = _names_in_file(file.config)
        state = {
            key: file.made_of(stored, key)
            for key, stored in by_name.items()
            if file.file.tensors.keys() >= {*stored, *by_name["fc.weight"]}
        }
    require(
        "draft",
        "mtp",
        "where the model's files hold a head for multi-token prediction (mtp.*, or layers beyond the last one); "
        f"{name or 'this model'} has none",
        bool(state),
    )
    net = MtpLayer(target.config, target.dtype)
    _fill(
        net, state, target.dtype, f"{folder or name}: its MTP head does not fit the model's config"
    )
    if isinstance(target, NativeLM):
        with contextlib.suppress(
            UnsupportedModelError
        ):  # transformers' modules run heads of all kinds
            return NativeMtpHead(net, target)
    return MtpHead(net.to(target.device), target)


def _fill(net: torch.nn.Module, state: dict[str, Tensor], dtype: torch.dtype, fault: str) -> None:
    """Give a network its weights in a dtype, its buffers as they are. CheckpointError, which lists them, for others."""
    expected, stored = (
        {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        for tensors in (net.state_dict(), state)
    )
    refuse_misfits(fault, expected, stored, "unknown")
    buffers = {key for key, _ in net.named_buffers()}
    filled = {key: tensor if key in buffers else tensor.to(dtype) for key, tensor in state.items()}
    net.load_state_dict(filled, assign=True)


def is_assistant(draft: Any, *, offline: bool = False) -> bool:
    """Return whether a draft is Gemma 4's assistant: its folder, GGUF file or Hub id, or the loaded model."""
    if isinstance(draft, PreTrainedModel):
        return draft.config.model_type in ASSISTANT_TYPES
    if not isinstance(draft, str) or why_absent(draft, offline=offline) is not None:
        return False
    if Path(draft).is_file():
        return gguf.head_architecture(draft) == gguf.ASSISTANT
    try:
        config, _ = PretrainedConfig.get_config_dict(draft, local_files_only=offline)
    except (OSError, ValueError):
        return False  # loading it as a model says why it cannot be had
    return config.get("model_type") in ASSISTANT_TYPES


def load_assistant(
    draft: str | PreTrainedModel, target: CachedTarget, *, offline: bool = False
) -> AssistantHead:
    """Return an assistant in the target's dtype and on its device. CheckpointError, as `load`, for damaged files.

    A loaded one's weights are used where they are, or copied where dtype or device differ; its modules are not run.
    """
    name = type(draft).__name__ if isinstance(draft, PreTrainedModel) else draft
    # of transformers' own checks too
    with restating(
        (OSError, ValueError, AttributeError, TypeError),
        lambda error: CheckpointError(f"{name}: no assistant can be made of its config: {error}"),
    ):
        folder = None if isinstance(draft, PreTrainedModel) else Path(draft)
        file = gguf.read(folder) if folder is not None and folder.is_file() else None
        if folder is not None and not folder.exists():
            folder = Path(
                snapshot_download(name, allow_patterns=list(WEIGHT_FILES), local_files_only=offline)
            )
        config = (
            draft.config
            if isinstance(draft, PreTrainedModel)
            else gguf.assistant_config(file)
            if file is not None
            else AutoConfig.from_pretrained(folder, trust_remote_code=False)
        )
        net = Assistant(config, target.dtype)
    state: dict[str, Tensor] = draft.state_dict() if isinstance(draft, PreTrainedModel) else {}
    if file is not None:
        layers = [key for key in net.state_dict() if key.startswith("model.")]
        names = {one: key for key, (one,) in gguf.tensor_names(net.text_config, layers).items()}
        state = {
            names.get(key, key.removeprefix("nextn.")): torch.from_numpy(file.numbers(key)).to(
                target.dtype
            )
            for key in file.tensors
            # which the config tells, and clusters of tokens, which llama.cpp does not read either
            if not key.startswith((gguf.ROPE_FACTORS, "masked_embd_"))
        }
    elif folder is not None:
        state = {key: tensor.read(0, tensor.shape[0]) for key, tensor in _tensors(folder).items()}
    state.pop("lm_head.weight", None)  # the embeddings, again
    _fill(net, state, target.dtype, f"{folder or name}: its tensors do not fit its config")
    with_buffers(net.model)
    net = net.to(target.lm.device)
    if isinstance(target.lm, NativeLM):
        with contextlib.suppress(UnsupportedModelError):
            return NativeAssistant(net, target)
    return AssistantHead(net, target)


def _names_in_file(config: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of a head's tensors in GGUF files by those in MtpLayer."""
    head, above, count, block = (
        of_head(config),
        f"blk.{_layers(config)}.",
        len(blocks_of(config)),
        {},
    )
    for number in range(count):
        prefix = f"{family_of(head).layers.transformers}.{number}."
        names = gguf.tensor_names(
            head, [name for name in layer_template(head) if name.startswith(prefix)]
        )
        for name, stored in names.items():
            inside = [one.replace(f"blk.{number}.", above, 1) for one in stored]
            if number:  # of what is one block there
                inside = [one.replace(".attn_norm.", ".post_attention_norm.") for one in inside]
            module = name.removeprefix(prefix)
            block[f"block.{module}" if count == 1 else f"block.{number}.{module}"] = tuple(inside)
    return block | {key: (above + name,) for key, name in _OUTSIDE.items()}


def _file_of(target: LanguageModel) -> GGUFSource | None:
    """Return the GGUF file that a model was loaded from."""
    source = getattr(target, "source", None)
    return source if isinstance(source, GGUFSource) else None


def _layers(config: Any) -> int:
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def _folder(name: str) -> Path | None:
    """Return the folder of a model's files, or None where they are not on this machine."""
    if not name or Path(name).is_file():
        return None
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(
            snapshot_download(name, allow_patterns=list(WEIGHT_FILES), local_files_only=True)
        )
    except Exception:  # the Hub's own errors, of many kinds: it is not there
        return None


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    return {key: stored for file in safetensors_files(folder) for key, stored in tensors_of(file)}
