"""bench.exactness: every way equals plain decoding, a stopped run goes on, and a wrong answer is a mismatch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import exactness
from specengine.benchmark.ways import EngineDecoder
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = [f"{draft}:{policy}" for draft in ("ngram", "small_model") for policy in exactness.POLICIES]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The result file of a run over two prompts, greedily and with one seed."""
    tiny(num_hidden_layers=3).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    given = [
        "--model",
        tmp_path / "model",
        "--per-set",
        2,
        "--max-new-tokens",
        8,
        "--seeds",
        "greedy",
        "3",
    ]
    monkeypatch.setattr(
        sys, "argv", ["exactness", *map(str, given), "--out", str(tmp_path / "out.jsonl")]
    )
    return tmp_path / "out.jsonl"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows_of(file: Path) -> list[tuple[Any, ...]]:
    rows = [record for record in read(file) if record["record"] == "row"]
    return [(row["seed"], row["id"], row["way"], row["verdict"]) for row in rows]


def test_every_way_is_exact_and_a_stopped_run_goes_on(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = EngineDecoder.__call__, 25

    def stopping(self: EngineDecoder, prompt: list[int], length: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(self, prompt, length)

    monkeypatch.setattr(EngineDecoder, "__call__", stopping)
    with pytest.raises(KeyboardInterrupt):
        exactness.main()
    before = rows_of(out.with_suffix(".rows"))
    assert before
    assert not out.exists()
    monkeypatch.setattr(EngineDecoder, "__call__", real)
    assert exactness.main() == 0
    rows = rows_of(out)
    assert rows[: len(before)] == before
    ids = list(dict.fromkeys(row[1] for row in rows))
    ways = {None: ["plain", *NAMES, "generate"], 3: ["plain", *NAMES]}
    assert rows == [(seed, id_, way, "exact") for seed in ways for id_ in ids for way in ways[seed]]
    summary = read(out)[-1]
    assert (summary["runs"], summary["verdicts"]) == (
        2 * (7 + 6),
        {"exact": 26, "near-tie": 0, "mismatch": 0},
    )
    assert not out.with_suffix(".rows").exists()


def test_a_wrong_answer_is_a_mismatch(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = EngineDecoder.__call__

    def wrong(self: EngineDecoder, prompt: list[int], length: int) -> Any:
        answer = real(self, prompt, length)
        changed = [*answer.tokens[:-1], (answer.tokens[-1] + 1) % 200]
        return answer if "Fixed" not in self.facts["policy"] else answer._replace(tokens=changed)

    monkeypatch.setattr(EngineDecoder, "__call__", wrong)
    assert exactness.main() == 1
    assert read(out)[-1]["verdicts"]["mismatch"] == 8
