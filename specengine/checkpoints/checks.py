"""Checks of a model's name before any weights are read: that it is there, its config.json, and its adapter."""

import copy
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants, file_exists, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    find_adapter_config_file,
    is_peft_available,
)

from specengine.errors import (
    CheckpointError,
    UnsupportedModelError,
    require_intact,
    require_supported,
    restating,
    shown,
)
from specengine.files import read_object, safetensors_files
from specengine.models.configs import NO_MEMORY, empty_model, stated, unsupported

CONFIGS = ("config.json", "adapter_config.json")  # of a model, and of an adapter alone
WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt")
# So that no config asks for all memory or for hours; a list is one number per layer.
MAX_SIZES = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 30,
}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
MAX_THETA = 1e15
_ORIGINAL = "original_max_position_embeddings"
_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json")
_BASE = "base_model_name_or_path"
_REMEDY = "merge it into its model (merge_and_unload() of peft's AutoPeftModelForCausalLM), save that and load it"
_WRAPPERS = (".base_layer.", "._orig_mod.", ".module.", "._fsdp_wrapped_module.")
_STATES = ("state_dict", "model_state_dict")
_OF_MLX = (
    "MLX has packed its weights, which MLX alone reads: load the model that it was made of, a GGUF file of it, or what "
    "mlx_lm.convert --dequantize writes"
)
_PROMPTS = "which cannot be applied, as it changes more than layers; accepted: LORA and other kinds of layers"
# Kinds whose forward is more than their layers: PeftModel computes it, transformers does not.
_ROUTED = ("POLY", "XLORA")


def why_absent(name: str, *, offline: bool = False) -> str | None:
    """Return why neither the disk nor the Hub has a model `name`; None where one of them has.

    A name that looks like a path is looked up on the disk alone.
    """
    if Path(name).exists():
        return None
    if looks_like_path(name):
        return "there is no such file or folder"
    if ":" in name:
        return "names with a colon belong to other programs; give the model's id on the Hub, or a GGUF file's path"
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in CONFIGS):
            return None
        if offline or constants.HF_HUB_OFFLINE:
            return "there is no such folder, and the Hub's cache does not hold it"
        return (
            None
            if any(file_exists(name, file) for file in CONFIGS)
            else "there is no such folder, and no such model on the Hub"
        )
    except Exception as error:  # the Hub's own, of many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"there is no such folder, and the Hub does not answer ({reason})"


def looks_like_path(name: str) -> bool:
    """Return whether this cannot be meant as a name on the Hub, which is `model` or `owner/model`."""
    return (
        name.startswith((".", "~"))
        or Path(name).is_absolute()
        or "\\" in name
        or name.endswith(("/", os.sep))
        or name.count("/") > 1
        or name.lower().endswith(WEIGHTS)
    )


# ---- config.json


def config_of(name: str | Path, *, offline: bool, trust_remote_code: bool) -> PretrainedConfig:
    """Return the config of a folder or Hub id; UnsupportedModelError where there is none, it is nonsense, or of MLX."""
    # a config class may raise anything over fields of another type
    with restating(
        Exception,
        lambda error: unsupported(name, error, "its config.json cannot be read"),
        NO_MEMORY,
    ):
        config = AutoConfig.from_pretrained(
            name, local_files_only=offline, trust_remote_code=trust_remote_code
        )
    packed = getattr(config, "quantization_config", None)
    require_supported(
        f"model {str(name)!r}: quantization_config: got {shown(packed)}; {_OF_MLX}",
        not _is_of_mlx(packed),
    )
    refuse_nonsense(name, config)
    return config


def refuse_nonsense(name: str | Path, config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError, which names the field, for sizes and numbers that no model has."""
    decoder = config.get_text_config(decoder=True)
    _require(name, "text_config", decoder, "an object", isinstance(decoder, PretrainedConfig))
    for field, most in MAX_SIZES.items():
        value = stated(decoder, field)
        for size in value if isinstance(value, list | tuple) else [value]:
            holds = size is None or (type(size) is int and 1 <= size <= most)
            _require(name, field, size, f"a whole number, 1 to {most}", holds)
    for field in EPSILONS:
        value = stated(decoder, field)
        holds = value is None or (type(value) in (int, float) and 0 < value <= 1)
        _require(name, field, value, "a number above 0, at most 1", holds)
    dtype, window = config.dtype, stated(decoder, "sliding_window")
    _require(
        name, "dtype", dtype, "the name of a torch.dtype", isinstance(dtype, torch.dtype | None)
    )
    _require(name, "sliding_window", window, "a whole number", isinstance(window, int | None))
    rotary = getattr(decoder, "rope_parameters", None) or {}
    for rope in (
        rotary,
        *(value for value in rotary.values() if isinstance(value, dict)),
    ):  # or one by layer type
        theta = rope.get("rope_theta", 1)
        holds = type(theta) in (int, float) and 1 <= theta <= MAX_THETA
        _require(name, "rope_theta", theta, f"a number, 1 to {MAX_THETA:g}", holds)
        original = rope.get(_ORIGINAL)
        _require(
            name, _ORIGINAL, original, "a whole number", isinstance(original, int | float | None)
        )


def refuse_other_shapes(name: str, config: PretrainedConfig) -> None:
    """Raise CheckpointError where a local folder's safetensors have other shapes than a model of this config.

    Only headers are read, and no memory is taken for weights of sizes that no file has.
    """
    if (
        getattr(config, "quantization_config", None) is not None
        or getattr(config, "auto_map", None) is not None
    ):
        return
    model = empty_model(copy.deepcopy(config), torch.float32)  # which notes its dtype in the config
    expected = {key: list(weight.shape) for key, weight in model.named_parameters()}
    differing = []
    for file in safetensors_files(Path(name)):
        with (
            restating(
                SafetensorError,
                lambda error: CheckpointError(
                    f"model {name!r}: its weights are damaged, fetch them again ({error})"
                ),
            ),
            safe_open(file, framework="pt") as opened,
        ):
            differing += [
                f"{key} {has}, not {expected[key]}"
                for key in opened.keys()  # noqa: SIM118
                if key in expected and (has := opened.get_slice(key).get_shape()) != expected[key]
            ]
    packed = f"; {_OF_MLX}" if _is_of_mlx(getattr(config, "quantization", None)) else ""
    require_intact(
        f"model {name!r}: its weights do not fit its config.json; of another shape: {', '.join(differing[:4])}"
        f"{packed}",
        not differing,
    )


def _is_of_mlx(packing: Any) -> bool:
    return (
        isinstance(packing, dict)
        and {"group_size", "bits"} <= packing.keys()
        and "quant_method" not in packing
    )


def wrapped(expected: Collection[str], stored: Iterable[str]) -> list[str]:
    """Return what to do about stored names that are expected names within others, as wrappers of modules write them."""
    for name in stored:
        if (inner := next((one for one in expected if name.endswith(f".{one}")), None)) is not None:
            return [
                f"names of tensors begin with {name.removesuffix(inner)!r}, which a wrapper adds: remove it"
            ]
        if (
            inside := next((one for one in _WRAPPERS if name.replace(one, ".") in expected), None)
        ) is not None:
            return [f"names of tensors hold {inside!r}, which a wrapper adds: {_REMEDY}"]
        if name.partition(".")[0] in _STATES:
            return [f"its tensors lie in {name.partition('.')[0]!r}: save what that holds alone"]
    return []


def _require(name: str | Path, field: str, value: Any, accepted: str, holds: bool) -> None:
    require_supported(
        f"model {str(name)!r}: config.json: {field}: got {shown(value)}, accepted {accepted}", holds
    )


# ---- adapters of PEFT: transformers applies them, or they are refused by name


class Adapter(NamedTuple):
    """An adapter on disk or on the Hub.

    name  folder or Hub id that holds adapter_config.json
    kind  as PEFT calls it: LORA, IA3, PROMPT_TUNING
    base  folder or Hub id of the model that it changes; the adapter's own folder where that holds a config.json too
    """

    name: str
    kind: str
    base: str

    @property
    def reason(self) -> str:
        """Return why the native forward does not run it."""
        return f"it holds an adapter of kind {self.kind}, which transformers applies; for the native forward {_REMEDY}"

    @property
    def described(self) -> str:
        """Return the adapter as an error names it."""
        return (
            f"model {self.name!r}: it holds an adapter of kind {self.kind} ({ADAPTER_CONFIG_NAME})"
        )

    def unfit(self, why: str) -> UnsupportedModelError:
        """Return the error for an adapter that transformers cannot apply."""
        return UnsupportedModelError(
            f"{self.described} that transformers cannot apply ({why}); {_REMEDY}"
        )

    @property
    def tokenizer(self) -> str:
        """Return where its tokenizer is: next to the adapter, as trainers save it, else with the model."""
        return (
            self.name
            if any((Path(self.name) / file).exists() for file in _TOKENIZERS)
            else self.base
        )


def adapter_of(name: str, *, offline: bool = False) -> Adapter | None:
    """Return the adapter that transformers would apply for this folder or Hub id; None where there is none.

    Raises CheckpointError for a damaged adapter_config.json, UnsupportedModelError for an adapter that cannot be
    applied: without peft, of a kind that PeftModel alone computes, or upon a model that is not there.
    """
    if Path(name).exists() and not Path(name).is_dir():
        return None
    try:
        file = find_adapter_config_file(name, local_files_only=offline)
    except (
        Exception
    ):  # the Hub's own errors, of many kinds; loading the model says why it cannot be had
        return None
    if file is None:
        return None
    with restating(
        (OSError, ValueError),
        lambda error: CheckpointError(
            f"model {name!r}: {ADAPTER_CONFIG_NAME} is damaged ({error})"
        ),
    ):
        raw = read_object(Path(file))
    kind: Any = raw.get("peft_type")
    require_intact(
        f"model {name!r}: {ADAPTER_CONFIG_NAME}: peft_type: got {shown(kind)}, accepted a name",
        isinstance(kind, str),
    )
    base: Any = name if (Path(name) / CONFIG_NAME).exists() else raw.get(_BASE)
    require_intact(
        f"model {name!r}: it is an adapter of kind {kind[:40]} without a model; {_BASE} of its "
        f"{ADAPTER_CONFIG_NAME}: got {shown(base)}, accepted the path or Hub id of the model that it changes",
        isinstance(base, str) and bool(base),
    )
    adapter = Adapter(name, kind[:40], base)
    if raw.get("megatron_config") is not None:
        raise adapter.unfit(
            f"for its megatron_config peft runs the module {shown(raw.get('megatron_core'))}"
        )
    _require_applicable(adapter, Path(file).parent)
    if adapter.base != name:
        absent = why_absent(adapter.base, offline=offline)
        if absent is None and (Path(adapter.base) / ADAPTER_CONFIG_NAME).exists():
            absent = (
                None if (Path(adapter.base) / CONFIG_NAME).exists() else "it is an adapter itself"
            )
        require_supported(
            f"{adapter.described} for {adapter.base!r:.300} ({_BASE}), and {absent}; correct that field, or {_REMEDY}",
            absent is None,
        )
    return adapter


def model_in(field: str, model: Any) -> Any:
    """Return the transformers model with its adapters' layers that a PeftModel wraps; any other object as it is.

    field: what the model was given as. Raises UnsupportedModelError for adapters that are more than layers, as prompts.
    """
    peft = sys.modules.get("peft")  # an object of peft's cannot be there without it
    wrappers: Any = [getattr(peft, name, None) for name in ("PeftModel", "PeftMixedModel")]
    if not any(isinstance(kind, type) and isinstance(model, kind) for kind in wrappers):
        return model
    for config in model.peft_config.values():
        require_supported(
            f"{field}: its {type(model).__name__} has an adapter of kind {_name_of(config.peft_type)}, {_PROMPTS}",
            not (
                _adds_more_than_layers(config) or getattr(config, "alora_invocation_tokens", None)
            ),
        )
    return model.base_model.model


def _require_applicable(adapter: Adapter, folder: Path) -> None:
    require_supported(
        f"{adapter.described}, for which peft is needed: pip install peft, or {_REMEDY}",
        is_peft_available(),
    )
    import peft

    # peft may raise anything over fields that it does not know
    with restating(
        Exception,
        lambda error: adapter.unfit(
            f"peft {peft.__version__} says {type(error).__name__}: {error}"
        ),
    ):
        config = peft.PeftConfig.from_pretrained(str(folder))
    require_supported(f"{adapter.described}, {_PROMPTS}", not _adds_more_than_layers(config))


def _adds_more_than_layers(config: Any) -> bool:
    return bool(
        config.is_prompt_learning
        or config.is_adaption_prompt
        or _name_of(config.peft_type) in _ROUTED
    )


def _name_of(kind: Any) -> str:
    return str(getattr(kind, "value", kind))
