"""The bench of constrained answers: its ways answer the same; what is forced is left to the draft where it says so."""

import pytest

from specengine.costs import PassCosts
from specengine.policies import make

pytest.importorskip("llguidance")

from bench import constrained
from specengine.request.grammars import Constraint
from tests.engine.engines import engine_of
from tests.request.schemas import closed
from tests.toy import byte_tokenizer


def test_ways_differ_in_what_is_forced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = closed(first={"enum": ["a rather long text", "b"]}, second={"enum": ["c", "d"]})
    monkeypatch.setattr(constrained, "REQUESTS", {"small": ("Hello", schema)})
    before = Constraint.forced
    engine = engine_of(tokenizer=byte_tokenizer())
    # the same trees on every machine: a draft pass takes 0.6 of a verification
    engine.policy = make("auto", costs=PassCosts("given", {1: 1.0, 64: 1.5}, {1: 0.6}))
    rows = list(constrained.records(engine, 1, 99))
    assert Constraint.forced is before
    assert [row["way"] for row in rows] == ["plain", "without forced", "forced"]
    assert len({row["answer"] for row in rows}) == 1
    plain, without, forced = (row["verifications"] for row in rows)
    assert plain == rows[0]["new_tokens"]
    assert forced < without
    assert [row["draft_passes"] > 0 for row in rows] == [False, True, False]
    assert forced < plain / 3
