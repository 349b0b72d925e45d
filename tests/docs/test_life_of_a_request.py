"""The life of a request as docs/develop tells it: each function is entered, in that order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import specengine
from specengine import Engine
from specengine.drafters.recycling import Recycling
from specengine.engine import Pool
from specengine.models.native import NativeTarget
from tests.models.native_engines import native_lm, needs_extension
from tests.toy import byte_tokenizer, policy_for, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
PAGE = Path(__file__).parents[2] / "docs" / "develop" / "life-of-a-request.md"
PACKAGE = Path(specengine.__file__).parent
ROW = re.compile(r"\| (\d) \| .* \| `(\S+)` \| `(\S+)` \|")


def told(page: str) -> list[tuple[str, str]]:
    """Return file and function of each step, in order."""
    rows = [match.groups() for line in page.splitlines() if (match := ROW.fullmatch(line))]
    assert [number for number, *_ in rows] == [str(step) for step in range(1, 9)]
    return [(file, name) for _, file, name in rows]


def entered(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return file and function in the order in which they are entered first."""
    seen: dict[tuple[str, str], None] = {}

    def look(frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            seen.setdefault((str(file.relative_to(PACKAGE)), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(seen)


def engine() -> Engine:
    return Engine(
        NativeTarget(native_lm(tiny())), Recycling(), policy_for("eagle"), byte_tokenizer()
    )


def alone() -> None:
    for _ in engine().stream("once upon a time", max_new_tokens=12):
        pass


def among_others() -> None:
    list(Pool(engine(), 2).engines[0].stream("once upon a time", max_new_tokens=12))


@pytest.mark.parametrize("run", [alone, among_others])
def test_a_request_takes_the_steps_that_are_told(run: Callable[[], None]) -> None:
    functions, steps = entered(run), told(PAGE.read_text(encoding="utf-8"))
    missing = [step for step in steps if step not in functions]
    assert not missing
    assert sorted(steps, key=functions.index) == steps


def test_a_step_that_is_missing_or_out_of_order_is_noticed() -> None:
    functions, steps = entered(alone), told(PAGE.read_text(encoding="utf-8"))
    assert ("cycle.py", "go") not in functions
    turned = [steps[0], steps[5], steps[4]]
    assert sorted(turned, key=functions.index) != turned


def test_functions_of_the_loop_are_those_that_are_told() -> None:
    functions = [name for _, name in entered(among_others)]
    for name in ("Scheduler.step", "run_eager"):
        assert f"`{name}`" in PAGE.read_text(encoding="utf-8")
        assert name in functions
