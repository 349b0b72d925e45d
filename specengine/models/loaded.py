"""Notice changes of a loaded model since an engine took it: of its modules, settings and numbers."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specengine.models.extension import extension, is_built, is_plain, thread_count
from specengine.models.twins import RECORDING

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Attributes that change no answer of a twin, which is in evaluation mode and has an attention of its own.
_WITHOUT_EFFECT = {
    "training",
    "generation_config",  # which is read anew for each answer
    "warnings_issued",
    "_output_capturing_hooks_installed",
    "_is_full_backward_hook",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_compiled_call_impl",
    "_modules",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_attn_implementation_internal",
    "gradient_checkpointing",
}
_TABLES = ("_parameters", "_buffers", *_HOOKS)
_SCALARS = {int, float, str, bool, bytes, type(None), torch.dtype, torch.device}


@dataclass
class _Part:
    """A module as it was.

    kind    its class, and the class's forward
    values  of its attributes, in their order
    facts   of its attributes by name, in values that compare equal as long as nothing has changed
    loose   those of attributes that may change while their values stay the same objects
    """

    name: str
    module: nn.Module
    kind: tuple[type, Any]
    values: tuple[Any, ...]
    facts: dict[str, Any]
    loose: dict[str, Any]


class Watch:
    """A loaded model as it is when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._reading = reading = _Reading(
            {}
        )  # kept, as no other object may get the ids in the facts
        self._seen = [reading.part(name, module) for name, module in model.named_modules()]
        self._settings = reading.settings()

    def changed(self) -> str:
        """Return the first thing that is not as it was, numbers apart; empty where there is none."""
        recorded, reading = iter(self._seen), _Reading(dict(self._reading.configs))
        for name, module in self._model.named_modules():
            was = next(recorded, None)
            if (
                was is None
                or was.name != name
                or was.module is not module
                or was.kind != _kind(module)
            ):
                return f"module {name or type(module).__name__}"
            values = tuple(vars(module).values())
            same = len(values) == len(was.values) and all(map(operator.is_, values, was.values))
            expected = was.loose if same else was.facts
            now = reading.facts(name, module, expected if same else vars(module))
            if now != expected:
                differing = min(
                    attribute
                    for attribute in now.keys() | expected.keys()
                    if now.get(attribute) != expected.get(attribute)
                )
                return f"{name}.{differing}" if name else differing
            was.values = values
        if (gone := next(recorded, None)) is not None:
            return f"module {gone.name}"
        return "" if reading.settings() == self._settings else "config"

    def contents(self) -> list[Any]:
        """Return checksums of all parameters and buffers; of a tensor that cannot be read, a value like no other."""
        buffers = (
            buffer
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not _changes_itself(module, name)
        )
        return checksums(
            list({id(tensor): tensor for tensor in (*self._model.parameters(), *buffers)}.values())
        )


@torch.no_grad()
def checksums(tensors: list[Tensor]) -> list[Any]:
    """Return a value for each tensor that changes whenever one of its numbers does, with all but certainty."""
    sums: list[Any] = []
    for tensor in tensors:
        if is_plain(tensor) and is_built():
            contiguous = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
            sums.append(extension().checksum(contiguous, thread_count()))
        else:
            parts = _numbers_of(tensor)
            sums.append(object() if parts is None else tuple(_checksum(dense) for dense in parts))
    # together, so that a device is waited for once
    scalars = [scalar for each in sums if isinstance(each, tuple) for scalar in each]
    together = [scalar.to(scalars[0].device, non_blocking=True) for scalar in scalars]
    numbers = iter(torch.stack(together).tolist() if together else ())
    return [
        tuple(next(numbers) for _ in each) if isinstance(each, tuple) else each for each in sums
    ]


def _numbers_of(tensor: Tensor) -> list[Tensor] | None:
    """Return the dense tensors that make up this one; None if they cannot be read."""
    if type(tensor) in (Tensor, nn.Parameter):
        readable = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
        return [tensor.detach().resolve_neg().resolve_conj()] if readable else None
    try:
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [_numbers_of(getattr(tensor, name)) for name in names]
    except Exception:  # another's class, which may raise anything
        return None
    return None if None in parts else [dense for group in parts for dense in group or ()]


def _checksum(tensor: Tensor) -> Tensor:
    """Return a checksum, int64 [], of all numbers by place and bits; for devices, and without the extension.

    Sums of the rows and of the columns of a table, weighted by odd numbers: a device reads the numbers twice, as fast
    as its memory gives them.
    """
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    numbers = (
        tensor.contiguous().view(-1).view(size)
        if tensor.numel()
        else tensor.new_zeros(0, dtype=size)
    )
    whole = (
        len(numbers)
        * numbers.element_size()
        // (8 * _COLUMNS)
        * _COLUMNS
        * 8
        // numbers.element_size()
    )
    table = numbers[:whole].view(torch.int64).view(-1, _COLUMNS)
    parts = table.sum(0), table.sum(1), numbers[whole:].to(torch.int64)
    weights = _odd_numbers(1 << max(map(len, parts)).bit_length(), tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for salt, bits in enumerate(parts, start=1):
        mixed = (bits + salt) * weights[: len(bits)]
        total = total + (mixed ^ (mixed >> 29)).sum()
    return total


_COLUMNS = 4096  # of 8 bytes each


@cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Return `count` odd numbers, int64; a larger count begins with the same ones."""
    places = torch.arange(count, dtype=torch.int64, device=device).mul_(2)
    return places.mul_(0x5851F42D4C957F2D).add_(0x14057B7EF767814F)


def _kind(module: nn.Module) -> tuple[type, Any]:
    return type(module), type(module).forward


class _Reading:
    """One reading of a model's modules.

    kept     the objects that count by identity
    configs  by id, those known beforehand included: they count by identity too, and what they say is read once for all
    """

    def __init__(self, configs: dict[int, PretrainedConfig]) -> None:
        self.kept: list[Any] = []
        self.configs = configs
        self._owners: dict[int, str] = {}

    def part(self, name: str, module: nn.Module) -> _Part:
        facts = self.facts(name, module, vars(module))
        tables = {
            attribute: fact
            for attribute, fact in facts.items()
            if attribute in _TABLES or type(fact) is list
        }
        return _Part(name, module, _kind(module), tuple(vars(module).values()), facts, tables)

    def facts(self, name: str, module: nn.Module, names: Iterable[str]) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for attribute in names:
            value = vars(module)[attribute]
            if attribute == "_parameters":
                facts[attribute] = [
                    self._weight(name, *item) for item in value.items() if item[1] is not None
                ]
            elif attribute == "_buffers":
                facts[attribute] = [
                    self._buffer(module, *item) for item in value.items() if item[1] is not None
                ]
            elif attribute in _HOOKS:
                facts[attribute] = [
                    id(hook)
                    for hook in value.values()
                    if getattr(hook, "__module__", None) != RECORDING
                ]
                self.kept += value.values()
            elif attribute not in _WITHOUT_EFFECT and not _changes_itself(module, attribute):
                facts[attribute] = self._frozen(value)
        return facts

    def _weight(self, module: str, name: str, weight: Tensor) -> Any:
        # tells tied weights from equal ones
        return (
            name,
            self._owners.setdefault(id(weight), f"{module}.{name}"),
            type(weight),
            weight.shape,
            weight.dtype,
            weight.device,
            weight.layout,
            is_plain(weight),
        )

    def _buffer(self, module: nn.Module, name: str, buffer: Tensor) -> Any:
        if _changes_itself(module, name):
            return name
        self.kept.append(buffer)
        return name, id(buffer), buffer.shape, buffer.dtype, buffer.device

    def _frozen(self, value: Any, depth: int = 4) -> Any:
        """Return what compares equal to a later one as long as nothing in it changed; objects count by identity.

        Lists for what may change in place, of sets and dicts too.
        """
        kind = type(value)
        if kind in _SCALARS:
            return value if value == value else "nan"
        if depth and issubclass(kind, dict):
            return [
                kind,
                *(
                    (self._frozen(key, 0), self._frozen(part, depth - 1))
                    for key, part in value.items()
                ),
            ]
        if depth and issubclass(kind, list | tuple):
            return [kind, *(self._frozen(part, depth - 1) for part in value)]
        if depth and issubclass(kind, set | frozenset):
            return [kind, {self._frozen(part, 0) for part in value}]
        if issubclass(kind, PretrainedConfig):
            self.configs.setdefault(id(value), value)
        self.kept.append(value)
        return kind, id(value)

    def settings(self) -> dict[int, Any]:
        """Return what all configs say that are known, and those in them."""
        facts: dict[int, Any] = {}
        while waiting := [key for key in self.configs if key not in facts]:
            facts |= {
                key: [
                    (name, self._frozen(value))
                    for name, value in vars(self.configs[key]).items()
                    if name not in _WITHOUT_EFFECT
                ]
                for key in waiting
            }
        return facts


def _changes_itself(module: nn.Module, name: str) -> bool:
    """Return whether forwards change this buffer, such as frequencies that depend on the length of the text."""
    kinds = module.__dict__.get("rope_type")
    return name in ("inv_freq", "max_seq_len_cached", "attention_scaling") and any(
        kind in ("dynamic", "longrope")
        for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
    )
