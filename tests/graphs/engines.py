"""Engines over padded forwards, the same eagerly, and what a capture would freeze."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specengine import Engine
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.engine.captured import CapturedDriver
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import cuda_graphs as graphs
from specengine.ops.cuda_graphs import Graphs
from specengine.policies import TreePolicy
from tests import toy
from tests.ops.backends import choose

PROMPT = [*range(40, 56), *range(40, 50)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAFTS = ("small_model", "eagle3", "eagle1", "ngram", "recycling")
# the host would wait for the device
WAITS = "_local_scalar_dense", "nonzero", "unique", "masked_select", "item"
# a number of the host would be copied, which no capture allows
SENT = "scalar_tensor", "lift_fresh", "lift_fresh_copy"


@cache
def model() -> Any:
    return toy.tiny("llama", num_hidden_layers=4).to(DEVICE)


@cache
def near_copy() -> Any:
    copy = toy.tiny("llama", num_hidden_layers=4)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.ndim > 1:
                parameter += 0.04 * parameter.std() * torch.randn_like(parameter)
    return copy.to(DEVICE)


@cache
def head(version: Any) -> Any:
    return toy.tiny_head(toy.head_config(version, model())).to(DEVICE)


def engine_of(draft: str, policy: str | TreePolicy, *, captured: bool) -> Engine:
    """A new engine over the shared models; draft `none` decodes plainly, a policy's name is that of a small one."""
    target = HuggingFaceTarget(model(), captured=captured)
    if draft == "none":
        return Engine(target, None, None)
    if draft == "ngram":
        drafter: Any = NGram(longest=3, shortest=1)
    elif draft == "recycling":
        drafter = Recycling()
    elif draft == "small_model":
        drafter = SmallModel(near_copy(), target.vocab_size)
    else:
        drafter = EagleDraft(head(int(draft[-1])), target.lm)
    return Engine(target, drafter, toy.policy_for(policy, 3) if isinstance(policy, str) else policy)


def driver_of(engine: Engine) -> CapturedDriver:
    """Return the driver of the engine's own policy."""
    assert engine.drivers.own.captured is not None
    return engine.drivers.own.captured


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Run as on a device: reading a number waits, so everything is padded, and every op is visible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specengine.ops.tree.FREE", "none")
        choose(patch, "reference")
        yield


class Operations(TorchDispatchMode):
    """The operations that run within, with everything that a capture would freeze: shapes and numbers of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __enter__(self) -> Any:
        self._patch = as_on_a_device()
        self._patch.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.__exit__(None, None, None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled within, and to keep Dynamo out costs as much as many an operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((_permitted(func), _frozen(args), _frozen(kwargs)))
        return func(*args, **(kwargs or {}))


@cache
def _permitted(func: Any) -> str:
    """Return the operation's name; AssertionError where a capture would not allow it."""
    name = str(func.overloadpacket)
    assert not name.endswith(WAITS), f"the host would wait: {name}"
    assert not name.endswith(SENT), f"the host would send: {name}"
    return str(func)


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return [_frozen(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _frozen(entry) for key, entry in value.items()}
    return value


@contextmanager
def frozen() -> Iterator[dict[tuple[int, Hashable], int]]:
    """Make calls of a captured function run the operations of its capture; yields how often each was called."""
    run, first, calls = Graphs.run, dict[Any, Any](), dict[Any, int]()

    def watched(
        self: Graphs, name: Hashable, reads: Sequence[Tensor], function: Callable[[], Any]
    ) -> Any:
        def watching() -> Any:
            if name not in self._captured:
                with as_on_a_device():
                    return function()  # before the capture
            with Operations() as operations:
                found = function()
            assert operations.seen == first.setdefault((id(self), name), operations.seen)
            return found

        if not self.has(name, reads):
            first.pop((id(self), name), None)
        calls[id(self), name] = calls.get((id(self), name), 0) + 1
        return run(self, name, reads, watching)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "run", watched)
        patch.setattr(graphs, "MIN_SLOTS", 256)
        choose(patch, "reference")  # what runs once before a capture must be what is captured
        yield calls
