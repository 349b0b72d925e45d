"""The interleaved run: whose time is whose, and whose answers are compared with whose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from specengine.benchmark import measuring, ways
from specengine.benchmark.measuring import Run, rotated
from specengine.benchmark.summaries import Answer, Figures, counted, row
from specengine.benchmark.ways import Way
from specengine.benchmark.workloads import Workload
from specengine.checkpoints.pretrained import LoadedModel
from specengine.engine import Engine
from specengine.errors import TokenizerMismatchError
from specengine.options import LoadOptions
from specengine.records import Seconds
from tests.engine.engines import engine_of
from tests.toy import byte_tokenizer

ITEM = Workload("set", "id", ("abc",))


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine_of(draft="none", tokenizer=byte_tokenizer())


class Says:
    """Answers every prompt with the same tokens."""

    def __init__(self, name: str, tokens: list[int], said: list[str]) -> None:
        self.facts: dict[str, Any] = {}
        self._name, self._tokens, self._said = name, tokens, said

    def __call__(self, prompt: list[int], length: int) -> Answer:
        self._said.append(self._name)
        return Answer(self._tokens, len(prompt), 1.0)

    def prepare(self, tokens: int) -> None:
        pass


def way(name: str, token: int, said: list[str], **options: Any) -> Way:
    return Way(name, lambda: Says(name, [1, token], said), ours=False, **options)


def test_answers_are_compared_with_those_of_another_way(plain: Engine) -> None:
    strict = {"against": "plain, strict"}
    ways = [way("plain", 2, []), way("x", 3, []), way("plain, strict", 3, [], **strict)]
    ways += [way("y, strict", 3, [], **strict), way("z, strict", 2, [], **strict)]
    records = list(Run(plain, ways, {"temperature": 0.0}, length=2).records([ITEM]))
    rows = [record for record in records if record["record"] == "row"]
    assert [row["way"] for row in rows if row["diverges_at"] is not None] == ["x", "z, strict"]


def test_an_assistant_with_another_tokenizer_is_refused(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, options = byte_tokenizer(extra=("<|tool|>", "<|call|>")), LoadOptions.of({})
    for tokenizer in (byte_tokenizer(template=None), other):
        loaded = LoadedModel(cast(Any, None), tokenizer)
        monkeypatch.setattr(ways, "load_model", lambda *_, loaded=loaded: loaded)
        assisted = ways.baseline(
            ways.ASSISTED, plain, {"temperature": 0.0}, [], "assistant", options
        )
        if tokenizer is not other:
            assisted.start()
            continue
        with pytest.raises(TokenizerMismatchError) as refused:
            assisted.start()
        assert str(refused.value) == (
            "assistant: its tokenizer differs from the target's, whose tokens it has to propose"
        )


def test_a_way_is_not_charged_what_the_one_before_left_under_way(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(measuring, "_finish", lambda device: said.append("finish"))
    run = Run(
        plain, [way("plain", 2, said), way("x", 2, said)], {"temperature": 0.0}, length=2, rounds=2
    )
    list(run.records([ITEM]))
    assert said[4:] == ["finish", "plain", "finish", "x", "finish", "x", "finish", "plain"]


def test_parts_of_cycles_on_a_device_are_not_told() -> None:
    split = Figures(2, 1, 3, 2, Seconds(0.1, 0.1, 0.2, 0.0, 0.0, 0.5))
    whole = split._replace(seconds=replace(split.seconds, split=False))
    assert counted([split, whole])["median_ms"] == {"total": 500.0}
    answers = [Answer([1], 1, 0.5, counted([split, each])) for each in (split, whole)]
    assert row(answers)["median_ms"] == {"total": 500.0}
    assert "policy_share" not in row(answers)
    assert row(answers[:1])["policy_share"] == pytest.approx(0.2)


def test_turns() -> None:
    assert [rotated("abc", turn) for turn in (0, 1, 4)] == [list("abc"), list("bca"), list("bca")]
