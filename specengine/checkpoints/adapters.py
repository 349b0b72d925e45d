"""Adapters of PEFT: found where transformers finds them, applied by it, or refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import CONFIG_NAME, is_peft_available
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME, find_adapter_config_file

from specengine.checkpoints.hub import why_absent
from specengine.errors import CheckpointError, UnsupportedModelError, shown
from specengine.files import read_object

_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json")
_BASE = "base_model_name_or_path"
_REMEDY = "merge it into its model (merge_and_unload() of peft's AutoPeftModelForCausalLM), save that and load it"
_PROMPTS = "which adds more than layers to its model and cannot be applied; accepted are LORA and other kinds of layers"
# Kinds whose forward is more than their layers: PeftModel computes it, transformers does not.
_ROUTED = ("POLY", "XLORA")


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
        """Why the native forward does not run it."""
        return f"it holds an adapter of kind {self.kind}, which transformers applies; for the native forward {_REMEDY}"

    @property
    def described(self) -> str:
        """The adapter as an error names it."""
        return f"model {self.name!r}: it holds an adapter of kind {self.kind} ({ADAPTER_CONFIG_NAME})"

    def unfit(self, why: str) -> UnsupportedModelError:
        """The error for an adapter that transformers cannot apply."""
        return UnsupportedModelError(f"{self.described} that transformers cannot apply ({why}); {_REMEDY}")

    @property
    def tokenizer(self) -> str:
        """Where its tokenizer is: beside the adapter, as trainers save it, else with the model."""
        beside = any((Path(self.name) / file).exists() for file in _TOKENIZERS)
        return self.name if beside else self.base


def adapter_of(name: str, *, offline: bool = False) -> Adapter | None:
    """Return the adapter that transformers would apply for this folder or Hub id; None where there is none.

    Raises CheckpointError for a damaged adapter_config.json, UnsupportedModelError for an adapter that cannot be
    applied: without peft, of a kind that PeftModel alone computes, or upon a model that is not there.
    """
    if Path(name).exists() and not Path(name).is_dir():
        return None
    try:
        file = find_adapter_config_file(name, local_files_only=offline)
    except Exception:  # the Hub's own errors, of many kinds; whoever loads the model says why it cannot be had
        return None
    if file is None:
        return None
    try:
        found = read_object(Path(file))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model {name!r}: {ADAPTER_CONFIG_NAME} is damaged ({error})") from error
    adapter = Adapter(name, _kind(name, found), _base(name, found))
    _require_applicable(adapter, Path(file).parent)
    if adapter.base != name:
        _require_base(adapter, offline)
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
        if _adds_more_than_layers(config) or getattr(config, "alora_invocation_tokens", None):
            kind = _name_of(config.peft_type)
            raise UnsupportedModelError(
                f"{field}: its {type(model).__name__} has an adapter of kind {kind}, {_PROMPTS}"
            )
    return model.base_model.model


def _kind(name: str, found: dict[str, Any]) -> str:
    kind = found.get("peft_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"model {name!r}: {ADAPTER_CONFIG_NAME}: peft_type: got {shown(kind)}, accepted a name")
    return kind[:40]


def _base(name: str, found: dict[str, Any]) -> str:
    if (Path(name) / CONFIG_NAME).exists():
        return name
    base = found.get(_BASE)
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"model {name!r}: it is an adapter of kind {_kind(name, found)} without a model; {_BASE} of its "
            f"{ADAPTER_CONFIG_NAME}: got {shown(base)}, accepted the path or Hub id of the model that it changes"
        )
    return base


def _require_applicable(adapter: Adapter, folder: Path) -> None:
    if not is_peft_available():
        raise UnsupportedModelError(f"{adapter.described}, for which peft is needed: pip install peft, or {_REMEDY}")
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft may raise anything over fields that it does not know
        raise adapter.unfit(f"peft {peft.__version__} says {type(error).__name__}: {error}") from error
    if _adds_more_than_layers(config):
        raise UnsupportedModelError(f"{adapter.described}, {_PROMPTS}")


def _adds_more_than_layers(config: Any) -> bool:
    return bool(config.is_prompt_learning or config.is_adaption_prompt or _name_of(config.peft_type) in _ROUTED)


def _name_of(kind: Any) -> str:
    return str(getattr(kind, "value", kind))


def _require_base(adapter: Adapter, offline: bool) -> None:
    absent = why_absent(adapter.base, offline=offline)
    if absent is None and (Path(adapter.base) / ADAPTER_CONFIG_NAME).exists():
        absent = None if (Path(adapter.base) / CONFIG_NAME).exists() else "it is an adapter itself"
    if absent is not None:
        raise UnsupportedModelError(
            f"{adapter.described} for {adapter.base!r:.300} ({_BASE}), and {absent}; correct that field, or {_REMEDY}"
        )
