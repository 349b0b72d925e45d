"""On a device an implementation is taken where it gives what the op means, and left out, with a warning, where not."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import ops
from specengine.errors import BackendError
from specengine.ops import _registry, _trial
from specengine.ops._registry import _Provider, by_meaning
from tests.ops import small_inputs
from tests.ops.backends import choose

LOGITS = torch.tensor([[1.0, 3.0, 2.0]])


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU as a kind of device on which implementations are tried."""
    choose(monkeypatch, "auto")
    monkeypatch.setattr(_registry, "TRIED", ("cpu",))
    monkeypatch.setattr(_registry, "_is_there", lambda kind: True)
    monkeypatch.setitem(_trial.INPUTS, "top_children", small_inputs.INPUTS["top_children"])
    _registry._fault.cache_clear()
    yield
    _registry._fault.cache_clear()


def provided(monkeypatch: pytest.MonkeyPatch, **kernels: Callable[..., Any]) -> None:
    """A backend `fast` for CPUs that has these."""
    load = _registry._load.__wrapped__
    known = {
        "fast": _Provider(("cpu",), "make fast"),
        "reference": _registry._PROVIDERS["reference"],
    }
    monkeypatch.setattr(_registry, "_PROVIDERS", known)
    monkeypatch.setattr(
        _registry, "_load", lambda name: (kernels, "") if name == "fast" else load(name)
    )
    ops.bind()


def right(*given: Any) -> Any:
    return by_meaning(ops.top_children, *given)


def raising(*given: Any) -> Any:
    raise RuntimeError("no kernel image is available\nfor execution")


def test_one_that_is_right_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    provided(monkeypatch, top_children=lambda *given: calls.append(given) or right(*given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken = ops.backends("cpu")["top_children"]
    assert (taken.name, taken.reason) == ("fast", "first choice on cpu")
    tried = len(calls)
    ops.top_children(LOGITS, 2)
    assert len(calls) == tried + 1 > 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (raising, r"RuntimeError: no kernel image is available \(input 0\)"),
        (
            lambda *given: (right(*given)[0] * 1.001, right(*given)[1]),
            r"instead of -?\d.* numbers differ",
        ),
        (
            lambda *given: (right(*given)[0], right(*given)[1].flip(1)),
            r"\d+ instead of \d+, \d+ of \d+ numbers differ",
        ),
        (
            lambda *given: (right(*given)[0], right(*given)[1].int()),
            r"torch.int32 \[5, 7\] instead of torch.int64",
        ),
    ],
)
def test_one_that_raises_or_differs_is_left_out_once_and_for_all(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any], said: str
) -> None:
    provided(monkeypatch, top_children=wrong)
    expected = by_meaning(ops.top_children, LOGITS, 2)
    message = f"top_children on cpu runs in torch from now on, as fast.*{said}"
    with pytest.warns(RuntimeWarning, match=message) as seen:
        found = [ops.top_children(LOGITS, 2) for _ in range(3)]
    assert len(seen) == 1
    assert all(map(torch.equal, (part for pair in found for part in pair), 3 * expected))
    taken = ops.backends("cpu")["top_children"]
    assert taken.name == "reference"
    assert taken.reason.startswith("fast is wrong on cpu: ")


def test_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    provided(
        monkeypatch, top_children=lambda *given: (right(*given)[0] * (1 + 1e-6), right(*given)[1])
    )
    assert ops.backends("cpu")["top_children"].name == "fast"


def test_what_it_changes_in_place_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(slab: Tensor, *_: Tensor) -> None: ...

    provided(monkeypatch, compact_kv=forgetful)
    with pytest.warns(RuntimeWarning, match="compact_kv"):
        assert ops.backends("cpu")["compact_kv"].name == "reference"


def test_a_mask_is_tried_with_the_attention_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(mask: Tensor, *_: Any) -> tuple[Tensor]:
        return (mask,)

    def attended(
        query: Tensor, key: Tensor, value: Tensor, mask: tuple[Tensor], scale: float
    ) -> Tensor:
        return by_meaning(ops.tree_attention, query, key, value, mask[0], scale)

    provided(monkeypatch, pack_mask=packed, tree_attention=attended)
    taken = ops.backends("cpu")
    assert taken["pack_mask"].name == taken["tree_attention"].name == "fast"


def test_reference_turns_all_off_and_a_name_is_taken_at_its_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provided(monkeypatch, top_children=raising)
    choose(monkeypatch, "reference")
    assert ops.top_children(LOGITS, 1)[1].tolist() == [[1]]
    choose(monkeypatch, "fast")
    with pytest.raises(RuntimeError, match="no kernel image"):
        ops.top_children(LOGITS, 1)


def test_nothing_is_tried_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    provided(monkeypatch, top_children=right)
    with monkeypatch.context() as patch:
        for name in ("is_available", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, lambda: True)
        with pytest.raises(BackendError, match="top_children: fast was not tried"):
            ops.top_children(LOGITS, 1)
    assert ops.top_children(LOGITS, 1)[1].tolist() == [[1]]


def test_cards_of_one_machine_are_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    provided(monkeypatch, top_children=right)
    monkeypatch.setattr(
        _registry,
        "_PROVIDERS",
        {"fast": _Provider(("cuda",), "make fast"), "reference": _registry._PROVIDERS["reference"]},
    )
    monkeypatch.setattr(_registry, "TRIED", ("cuda",))
    monkeypatch.setattr(
        _trial, "differs", lambda _, __, device: "too small" if device.index == 1 else ""
    )
    with pytest.warns(RuntimeWarning, match="too small"):
        taken = [ops.backends(f"cuda:{number}")["top_children"].name for number in (0, 1, 0)]
    assert taken == ["fast", "reference", "fast"]


@pytest.mark.filterwarnings("ignore:walk on cpu runs in torch")
def test_trials_compile_in_threads_before_they_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return right(*given)

    def broken(*_: Any) -> Any:
        raise RuntimeError("left to the comparison")

    provided(monkeypatch, top_children=noted, walk=broken)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    _registry._compiled.cache_clear()
    assert ops.backends("cpu")["top_children"].name == "fast"
    assert any(name.startswith("ThreadPool") for name in threads)
    assert threads[-1] == "MainThread"
    _registry._compiled.cache_clear()


def test_ops_that_cannot_change_an_answer_are_taken_with_the_first_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walks: list[tuple[Any, ...]] = []

    def walk(*given: Any) -> Any:
        walks.append(given)
        return by_meaning(ops.walk, *given)

    provided(monkeypatch, walk=walk, gather_rows=raising, couple=raising)
    taken = ops.backends("cpu")
    assert {taken[name].name for name in ("walk", "gather_rows", "couple")} == {"fast"}
    assert len(walks) == len(_trial.INPUTS["walk"](torch.device("cpu")))


def test_a_backend_of_which_nothing_runs_is_left_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    provided(
        monkeypatch, walk=raising, gather_rows=lambda *given: by_meaning(ops.gather_rows, *given)
    )
    with pytest.warns(RuntimeWarning, match="walk on cpu runs in torch from now on") as warned:
        taken = ops.backends("cpu")
    assert len(warned) == 1
    assert taken["walk"].name == taken["gather_rows"].name == "reference"
    assert taken["gather_rows"].reason.startswith("fast is wrong on cpu: RuntimeError")


def test_every_implementation_for_a_device_can_be_compared() -> None:
    served = {name for key in ("triton", "cuda") for name in _registry._loaded(key)}
    assert served - {"pack_mask"} <= set(_trial.INPUTS) | set(small_inputs.INPUTS)
