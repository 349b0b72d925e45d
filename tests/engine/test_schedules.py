"""Schedules of answers at once notice what would make an answer depend on the others."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from specengine.errors import NumericalError
from specengine.models.lanes import Gathering
from specengine.models.native import NativeLM
from tests.engine import schedules
from tests.models.native_engines import needs_extension

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]


def rows_of_another_text(patch: pytest.MonkeyPatch) -> None:
    """Two texts get each other's logits."""
    hand_out = Gathering._hand_out

    def wrong(batch: Any, states: Any, logits: Any, best: Any) -> None:
        hand_out(batch, states, logits, best)
        first, *others = [one.logits for one in batch if one.logits is not None] or [None]
        for other in others:
            if other.shape == first.shape:
                kept = first.clone()
                first.copy_(other)
                other.copy_(kept)

    patch.setattr(Gathering, "_hand_out", staticmethod(wrong))


def a_slot_too_few(patch: pytest.MonkeyPatch) -> None:
    """One text's rows do not see the last slot of its cache."""
    run_lanes = NativeLM.run_lanes

    def wrong(lm: NativeLM, tokens: Tensor, lanes: Any, **options: Any) -> Any:
        positions, cache, (start, end, ancestors) = lanes[0]
        if ancestors is not None and start and cache.memory is None:  # else the memory refuses it
            start, end = start - 1, end - 1
        return run_lanes(lm, tokens, [(positions, cache, (start, end, ancestors)), *lanes[1:]], **options)

    patch.setattr(NativeLM, "run_lanes", wrong)


def sums_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Logits of forwards with many rows are off by a bit, as if products were split by the number of rows."""
    run_lanes = NativeLM.run_lanes

    def wrong(lm: NativeLM, tokens: Tensor, lanes: Any, *, logits: Tensor | None = None, **options: Any) -> Any:
        found = run_lanes(lm, tokens, lanes, logits=logits, **options)
        if logits is not None and len(tokens) > 4:
            logits.mul_(1 + 2.0**-23)
        return found

    patch.setattr(NativeLM, "run_lanes", wrong)


@pytest.mark.parametrize("mistake", [rows_of_another_text, a_slot_too_few, sums_in_another_order])
def test_a_mistake_is_noticed(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, NumericalError), match=r"seed \d+, Setting|NaN or infinite"):
        schedules.run_all(range(40))
