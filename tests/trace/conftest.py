"""Fixtures of the tests of traces: a trace to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from specengine import policies
from specengine.trace import Trace
from tests.trace.runs import PROMPT, toy_engine, write


@pytest.fixture
def written(tmp_path: Path) -> Trace:
    """Two queries of a beam that prunes."""
    engine = toy_engine(policies.make("eagle", width=3, expansions=2, budget=5))
    return write(tmp_path / "run.jsonl", engine, PROMPT, [4], temperature=1.0, seed=3)[0]
