"""Loaded models that are refused, with the reason: by class and config, by their modules, and by what a try shows."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from specengine.errors import (
    SpecEngineError,
    UnsupportedModelError,
    require_or,
    require_supported,
    restating,
)
from specengine.models.attention import NeedsDenseMask
from specengine.models.configs import NO_MEMORY
from specengine.models.recurrent import sizes_of
from specengine.models.twins import is_changed


class NoTreesError(UnsupportedModelError):
    """This model cannot run trees in one forward; on its own cache it may answer all the same (own_cache.py)."""


def errors_named(what: str) -> AbstractContextManager[None]:
    """Raise UnsupportedModelError, `what` and the reason, for whatever modules raise: some may raise anything."""
    return restating(
        Exception,
        lambda error: UnsupportedModelError(
            f"{what} ({type(error).__name__}: {' '.join(str(error).split()):.300})"
        ),
        (SpecEngineError, NeedsDenseMask, *NO_MEMORY),
    )


# Types of layers whose state cannot be taken back, in words.
_ATTENTION = {"full_attention", "sliding_attention", "attention", "mlp", "moe"}
_STATES = {
    "linear_attention": "recurrent state",
    "mamba": "recurrent state",
    "hybrid": "recurrent state",
    "conv": "convolution state",
    "chunked_attention": "attention in chunks",
    "recurrent": "recurrent state",
}


def refuse_others(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for what is no language model that goes on with a text."""
    require_supported(
        f"{model_name(model)}: encoder-decoder models are not supported, only causal LMs",
        not getattr(model.config, "is_encoder_decoder", False),
    )
    require_supported(
        f"{model_name(model)}: has no language-model head, pass a ...ForCausalLM model",
        model.can_generate(),
    )
    require_supported(
        f"{model_name(model)}: has no single table of token embeddings",
        hasattr(model.get_input_embeddings(), "weight"),
    )


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError where the model's class or config says that it cannot be a target or draft.

    NoTreesError where it can answer, but not run a tree in one forward.
    """
    refuse_others(model)
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kinds = set(types or ()) - _ATTENTION
    what = ", ".join(sorted({_STATES.get(kind, kind) for kind in kinds})) or "recurrent state"
    require_or(
        NoTreesError,
        f"{model_name(model)}: cannot roll back rejected draft tokens ({what}); only a key-value cache can be cropped",
        not (kinds or (types is None and getattr(model, "_is_stateful", False)))
        or (kinds <= set(_STATES) and sizes_of(model) is not None),
    )
    require_or(
        NoTreesError,
        f"{model_name(model)}: its positions follow from the order of the cache, so nodes of a tree cannot be placed "
        "by depth (its forward reads no position_ids)",
        not getattr(config, "alibi", False)
        and "position_ids" in inspect.signature(model.forward).parameters
        and config.model_type != "kosmos_2_5_text_model",  # its `generate` hands over none
    )
    reasons = {
        "attention_layers": "its attention masks by cache slot, and nodes of a tree stand in other slots",  # GPT-Neo
        "index_topk": "sparse attention: an indexer chooses the keys that a token sees",
        "keep_window_size": "dynamic mask: its attention chooses the keys that a token sees",  # Doge
        "attn_temperature_tuning": "its queries are scaled by their place in the cache",  # Llama 4
    }
    for field, reason in reasons.items():
        require_or(NoTreesError, f"{model_name(model)}: {reason}", not getattr(config, field, None))


def refuse_absent(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError where weights are elsewhere: offloaded, or not loaded at all."""
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    require_supported(
        f"{model_name(model)}: {len(absent)} of its tensors are on the meta device, {', '.join(absent[:1])} for one "
        "(offloaded, or never loaded); load it whole into one device's memory",
        not absent,
    )


@torch.no_grad()  # no inference mode: layers that convert their weights in the first forward do so here, for good
def refuse_looking_ahead(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError where a token changes the logits of those before it, in the model's own forward.

    A tree's mask would make a causal model of an encoder, whose answers are not its own. A model whose layers mix rows
    (see `mixing`) is none of these.
    """
    device, size = (
        model.get_input_embeddings().weight.device,
        model.get_input_embeddings().weight.shape[0],
    )
    rated = []
    with _evaluating(model):
        for last in (4, 5):
            logits = model(
                input_ids=torch.tensor(
                    [[token % size for token in (1, 2, 3, last)]], dtype=torch.int64, device=device
                ),
                use_cache=False,
            )[0][0]
            rated.append(logits.float().nan_to_num(0.0, 0.0, 0.0))
        changed = (rated[0] - rated[1]).abs().amax(dim=-1)
        rounding = 1e-4 if model.dtype == torch.float32 else 0.05
        ahead = bool(changed[:-1].max() > rounding * changed[-1]) and not mixing(model)
    encoder = getattr(model.config.get_text_config(decoder=True), "is_decoder", None) is False
    require_supported(
        f"{model_name(model)}: a token changes the logits of those before it, so it is not a causal LM"
        + (
            "; its config says is_decoder=False: set it where the model was trained to go on"
            if encoder
            else ""
        ),
        not ahead,
    )


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put the model itself in evaluation mode within the context, with results by name, which `return_dict` decides."""
    configs = {
        id(holder): holder
        for module in model.modules()
        for holder in vars(module).values()
        if hasattr(holder, "return_dict")
    }
    settings = [(module, "training", False) for module in model.modules()]
    settings += [(config, "return_dict", True) for config in configs.values()]
    before = [getattr(*setting[:2]) for setting in settings]
    try:
        for setting in settings:
            setattr(*setting)
        yield
    finally:
        for (owner, name, _), value in zip(settings, before, strict=True):
            setattr(owner, name, value)


@torch.no_grad()
def mixing(model: nn.Module) -> str:
    """Return how a linear layer computes a row from those run with it, as some quantised ones do; empty if none does.

    Products of one shape give a row the same bits, whatever the other rows hold. torch's own layers are not tried.
    """
    for layer in model.modules():
        size, parameter = getattr(layer, "in_features", None), next(layer.parameters(), None)
        if (
            (type(layer) is nn.Linear and not is_changed(layer))
            or size is None
            or parameter is None
            or not hasattr(layer, "out_features")
        ):
            continue
        dtype = model.dtype if isinstance(model, PreTrainedModel) else torch.float32
        rows = (
            torch.arange(4 * int(size), dtype=torch.int64, device=parameter.device)
            .sin()
            .to(dtype)
            .view(1, 4, -1)
        )
        scale = torch.tensor([1.0, 100.0, 100.0, 100.0], dtype=dtype, device=rows.device)[
            None, :, None
        ]
        try:
            first, second = (layer(states)[0, 0].nan_to_num(0.0) for states in (rows, rows * scale))
        except NO_MEMORY:
            raise
        except Exception:  # a layer of another kind, which the tries of trees are left for
            continue
        if not torch.equal(first, second):
            if type(layer).__name__ == "Linear8bitLt":
                return "8-bit layers of bitsandbytes choose outliers over all rows"
            return f"its layers of type {type(layer).__name__} compute a row from those that are run with it"
    return ""


def model_name(model: PreTrainedModel) -> str:
    return model.config._name_or_path or type(model).__name__
