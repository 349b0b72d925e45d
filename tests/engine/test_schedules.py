"""Schedules of answers at once notice what would make an answer depend on the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specengine.errors import NumericalError
from specengine.models.native import NativeLM, RowBatch
from tests.engine import schedules
from tests.models.native_engines import needs_extension

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]


def rows_of_another_text(patch: pytest.MonkeyPatch) -> None:
    """Two texts get each other's logits."""
    run_lanes = NativeLM.run_lanes

    def wrong(lm: NativeLM, batch: Sequence[RowBatch]) -> None:
        run_lanes(lm, batch)
        logits = [rows.logits for rows in batch if rows.logits is not None]
        for other in logits[1:]:
            if other.shape == logits[0].shape:
                kept = logits[0].clone()
                logits[0].copy_(other)
                other.copy_(kept)

    patch.setattr(NativeLM, "run_lanes", wrong)


def a_slot_too_few(patch: pytest.MonkeyPatch) -> None:
    """One text's rows do not see the last slot of its cache."""
    run_lanes = NativeLM.run_lanes

    def wrong(lm: NativeLM, batch: Sequence[RowBatch]) -> None:
        start, end, ancestors = batch[0].seen
        if (
            ancestors is not None and start and not batch[0].cache.states
        ):  # else the memory refuses it
            batch[0].seen = start - 1, end - 1, ancestors
        run_lanes(lm, batch)

    patch.setattr(NativeLM, "run_lanes", wrong)


def sums_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Logits of forwards with many rows are off by a bit, as if products were split by the number of rows."""
    run_lanes = NativeLM.run_lanes

    def wrong(lm: NativeLM, batch: Sequence[RowBatch]) -> None:
        run_lanes(lm, batch)
        for rows in batch:
            if rows.logits is not None and sum(len(one.tokens) for one in batch) > 4:
                rows.logits.mul_(1 + 2.0**-23)

    patch.setattr(NativeLM, "run_lanes", wrong)


@pytest.mark.parametrize("mistake", [rows_of_another_text, a_slot_too_few, sums_in_another_order])
def test_a_mistake_is_noticed(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(
        (AssertionError, NumericalError), match=r"seed \d+, Setting|NaN or infinite"
    ):
        schedules.run_all(range(40))
