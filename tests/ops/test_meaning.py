"""What runs an op gives what the op means."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.cases import CASES, check

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("op", CASES)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_by_its_meaning(op: str, seed: int) -> None:
    check(op, seed)
