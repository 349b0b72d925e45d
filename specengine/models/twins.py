"""Twins: second trees of modules over the same parameters, which run another way and leave the model as it is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

M = TypeVar("M", bound=nn.Module)

# What a twin has for itself; its parameters stay those of the model, also where one is replaced.
_OWN_TABLES = (
    "_buffers",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def twin(module: M, replace: Callable[[nn.Module], nn.Module | None] = lambda part: None) -> M:
    """Return a copy of the module tree that shares all parameters, with some modules replaced.

    Buffers are shared until one of them is replaced, hooks until one is added or removed.
    """
    copies: dict[int, nn.Module] = {}
    own: dict[int, nn.Module] = {}  # without the replacements

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in copies:
            replacement = replace(part)
            copies[id(part)] = made = _like(part) if replacement is None else replacement
            if replacement is None:
                own[id(part)] = made
                children = part._modules.items()  # an empty list of modules is false
                made._modules = {name: None if child is None else copied(child) for name, child in children}
        return copies[id(part)]

    found: Any = copied(module)
    for made in own.values():
        _rebind(made, own)
    return found


def evaluating(model: PreTrainedModel) -> PreTrainedModel:
    """Return a twin in evaluation mode with configs of its own: an attention that is set for it is not the model's."""
    made, configs = twin(model), dict[int, Any]()
    for part in made.modules():
        part.training = False
        for name, value in list(vars(part).items()):
            if isinstance(value, PretrainedConfig):
                part.__dict__[name] = copy.deepcopy(value, configs)  # the same copy wherever it is the same config
    return made


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Choose a twin's attention, also in layers whose config is not the model's own: those of another model's."""
    model.set_attn_implementation(name)
    chosen = model.config.get_text_config(decoder=True)
    for part in model.modules():
        config = vars(part).get("config")
        if type(config) is type(chosen):
            config._attn_implementation_internal = name


def _like(part: nn.Module) -> nn.Module:
    made: nn.Module = object.__new__(type(part))  # copy.copy refuses modules with parametrizations
    made.__dict__.update(part.__dict__)
    for table in _OWN_TABLES:
        if table in made.__dict__:
            made.__dict__[table] = copy.copy(made.__dict__[table])
    made.__dict__["_compiled_call_impl"] = None  # it would call the model itself
    return made


def _rebind(made: nn.Module, copies: dict[int, nn.Module]) -> None:
    """Have methods that stand on the module itself (a replaced forward, accelerate's) be those of the twin."""
    for name, value in list(vars(made).items()):
        original = getattr(value, "_torchdynamo_orig_callable", value)  # compiled, it would run the model itself
        if isinstance(original, MethodType) and id(original.__self__) in copies:
            made.__dict__[name] = MethodType(original.__func__, copies[id(original.__self__)])
        elif isinstance(original, functools.partial) and any(id(given) in copies for given in original.args):
            given = [copies.get(id(part), part) for part in original.args]
            made.__dict__[name] = functools.partial(original.func, *given, **original.keywords)
