"""Tests that every implementation of an op equals its torch reference."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from specengine import ops
from tests.examples import examples
from tests.house.journeys import watched
from tests.ops.backends import BACKENDS, running
from tests.ops.cases import CASES, Draw, check

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sliced(10)
@pytest.mark.parametrize("op", CASES)
@examples(150)
@given(seed=st.integers(0, 10**6))
def test_by_its_meaning(op: str, seed: int) -> None:
    check(op, seed)


@pytest.mark.skipif("cpp" not in BACKENDS, reason="the extension is not built")
@pytest.mark.parametrize("op", CASES)
def test_in_cpp_an_op_is_one_call_of_python_and_one_of_cpp(op: str) -> None:
    run = getattr(ops, op)
    with running("cpp"):
        if ops.backends()[op].name != "cpp":
            pytest.skip(f"there is no {op} in C++")
        for seed in (1, 2):  # the first call binds it
            arguments, options = CASES[op](Draw(seed))
            journey, _ = watched(lambda given=arguments, named=options: run(*given, **named))
        assert (journey.calls, journey.native) == (1, 1)
