"""Loaded models on the native forward: which are refused, and how their weights are read."""

import copy
import itertools
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specengine.errors import require_supported
from specengine.models import families
from specengine.models.configs import empty_model, family_of, stored_tensors
from specengine.models.extension import instruction_set, is_plain, numerics_of
from specengine.models.loaded import Watch
from specengine.models.native.lm import NativeLM
from specengine.models.native.weights import Source, states_of
from specengine.models.refusals import refuse_others, refuse_unsupported
from specengine.models.twins import evaluating, is_changed


def from_model(
    model: PreTrainedModel, *, quantize: str | None = None, numerics: str = "auto"
) -> NativeLM:
    """Wrap a loaded model. Raises UnsupportedModelError if csrc/cpu cannot run it.

    Engines that share a loaded model share its packed weights as well, for as long as one of them lives.
    """
    refuse_loaded(model)
    packed = _from_models.setdefault(model, WeakValueDictionary())
    numerics = numerics_of(numerics, model.dtype, whole=quantize is not None)
    lm = packed.get((quantize, numerics, instruction_set(numerics)))
    if lm is None or lm.source.changed():
        lm = NativeLM(ModelSource(model), quantize=quantize, numerics=numerics)
        packed[quantize, numerics, lm.instruction_set] = lm
    return lm


_from_models: WeakKeyDictionary[PreTrainedModel, WeakValueDictionary[Any, NativeLM]] = (
    WeakKeyDictionary()
)


class ModelSource(Source):
    """A loaded model, whose own weights stay with it."""

    own_modules = True

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.config, self.dtype = model, copy.deepcopy(model.config), model.dtype
        self.name = model.config._name_or_path or type(model).__name__
        self._watch = Watch(model)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in stored_tensors(self._model)}

    def tensor(self, name: str) -> Tensor:
        module, _, attribute = name.rpartition(".")
        return cast(Tensor, getattr(self._model.get_submodule(module), attribute)).detach()

    def model(self, *, packed: bool = False) -> PreTrainedModel:
        return self._model

    @property
    def generation_config(self) -> GenerationConfig:
        return self._model.generation_config

    @property
    def state(self) -> Any:
        return self._watch.contents()

    def changed(self) -> str:
        return self._watch.changed()

    def rope(self, key: str = "") -> tuple[Tensor, float]:
        decoder: Any = self._model.get_decoder()
        # whose buffer a cast of the model rounds
        rotary = decoder.rotary_emb if hasattr(decoder, "rotary_emb") else decoder.pos_emb
        prefix = f"{key}_" if key else ""
        kind = rotary.rope_type[key] if key else rotary.rope_type
        # the others of longrope are those of the last length
        begin = "original_" if kind == "longrope" else ""
        return getattr(rotary, f"{prefix}{begin}inv_freq").detach().to(torch.float32), float(
            getattr(rotary, f"{prefix}attention_scaling")
        )

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        ids: tuple[int, ...],
        embeddings: Tensor,
        layer_inputs: Tensor | None,
    ) -> list[Tensor]:
        return states_of(evaluating(self._model), positions, ids, input_ids=tokens[None])


# Settings of modules that change no answer; sizes are those of the tensors, whatever a resized model still says.
_WITHOUT_EFFECT = {
    "training",
    "gradient_checkpointing",
    "attention_dropout",
    "p",  # of a dropout
    "padding_idx",
    "vocab_size",
    "num_embeddings",
    "in_features",
    "out_features",
}


def refuse_loaded(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a loaded model computes more than its weights and config say."""
    family = families.known().get(model.config.model_type)
    # its states take trees here
    (refuse_others if family is not None and family.kinds else refuse_unsupported)(model)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        require_supported(
            f"native: {name} is a {type(tensor).__name__} on {tensor.device.type}, "
            f"{str(tensor.layout).removeprefix('torch.')}, known are dense tensors of the CPU",
            is_plain(tensor),
        )
    exact = family_of(model.config).exact
    require_supported(
        "native: the weights have more than one dtype",
        {weight.dtype for name, weight in model.named_parameters() if not name.endswith(exact)}
        == {model.dtype},
    )
    plain = dict(empty_model(copy.deepcopy(model.config), torch.float32).named_modules())
    for name, module in model.named_modules():
        expected = plain.get(name)
        require_supported(
            f"native: module {name or 'model'} has hooks, parametrizations or a forward of its own; load with "
            "backend='huggingface'",
            not is_changed(module),
        )
        require_supported(
            f"native: module {name or 'model'} is a {type(module).__name__}",
            type(module) is type(expected),
        )
        for setting, value in vars(expected).items():
            current = vars(module).get(setting)
            require_supported(
                f"native: {name}.{setting} is {current!r}, the config makes it {value!r}",
                not isinstance(value, int | float | str)
                or setting in _WITHOUT_EFFECT
                or current == value,
            )
