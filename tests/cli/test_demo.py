"""`specengine bench --demo`: three ways compared, in bounded time."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specengine import Engine, checking, cycle
from specengine.benchmark import ways
from specengine.cli import bench, demo, main
from specengine.cli.terminal import DRAFTED
from specengine.errors import UnsupportedModelError
from tests.cli.streams import PROMPT
from tests.test_checking import accept_blindly


def cells(out: str) -> dict[str, dict[str, str]]:
    """Return the first table, by way and column."""
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    header = next(row for row in rows if row[0] == "way")
    rows = [row for row in rows if len(row) == len(header)]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows[::-1]}


def test_demo_compares_three_ways(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(bench, "MIN_TIMED_TOKENS", 1)
    assert (
        main(["bench", "--demo", "--model", folder, "--max-new-tokens", "24", "--rounds", "1"]) == 0
    )
    out, err = capsys.readouterr()
    compared = cells(out)
    assert {"plain", "generate", "speculative"} <= set(compared)
    assert all(compared[way]["exact"] == "1" for way in ("plain", "generate", "speculative"))
    assert float(compared["speculative"]["tau"]) >= 1
    assert "Timing three ways in turn, rounds: 1, tokens: 24" in err
    last = out.splitlines()[-1]
    assert last.startswith("speculative: Speculation ")
    assert re.search(r"takes \d+\.\d+ times as long as (over )?one", last), (
        "auto is the policy, so costs are known"
    )


def test_a_difference_is_a_fault(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(cycle, "walk", accept_blindly)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    arguments = ["--policy", "eagle", "--prompt", PROMPT, "--max-new-tokens", "24", "--rounds", "1"]
    assert main(["bench", "--demo", "--model", folder, *arguments]) == 1
    assert cells(capsys.readouterr().out)["speculative"]["mismatch"] == "1"


def test_demo_counts_near_ties(folder: str, capsys: Any, monkeypatch: Any) -> None:
    """Tokens that transformers chose otherwise, by hardly more than nothing, are no faults."""
    real = ways.Generate.__call__

    def otherwise(self: Any, prompt: list[int], length: int) -> Any:
        answer = real(self, prompt, length)
        return answer._replace(tokens=[*answer.tokens[:-1], answer.tokens[-1] ^ 1])

    monkeypatch.setattr(ways.Generate, "__call__", otherwise)
    arguments = ["bench", "--demo", "--model", folder, "--max-new-tokens", "24", "--rounds", "1"]
    assert main(arguments) == 0
    assert cells(capsys.readouterr().out)["generate"]["mismatch"] == "1"
    monkeypatch.setattr(checking, "near_tie_logits", lambda _: 60.0)
    assert main(arguments) == 0
    assert cells(capsys.readouterr().out)["generate"]["near-tie"] == "1"


def test_demo_is_strict_where_it_can_be(folder: str, capsys: Any, monkeypatch: Any) -> None:
    asked = []
    real = Engine.from_pretrained

    def noted(*arguments: Any, **options: Any) -> Any:
        asked.append(options["strict"])
        if options["strict"]:
            raise UnsupportedModelError(f"{reason}: not here")
        return real(*arguments, **options)

    monkeypatch.setattr(Engine, "from_pretrained", noted)
    arguments = ["bench", "--demo", "--model", folder, "--max-new-tokens", "8", "--rounds", "1"]
    reason = "strict"
    assert main(arguments) == 0
    assert asked == [True, False]
    assert "specengine: note: strict: not here" in capsys.readouterr().err
    reason = "another"
    assert main(arguments) == 2
    asked.clear()
    assert main([*arguments, "--no-strict"]) == 0
    assert asked == [False]


def test_demo_draws_a_tree_in_colour_on_a_terminal_alone(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    arguments = [
        "bench",
        "--demo",
        "--model",
        folder,
        "--policy",
        "chain",
        "--max-new-tokens",
        "60",
        "--rounds",
        "1",
    ]
    assert main(arguments) == 0
    plainly = capsys.readouterr().out
    assert "One cycle: a tree of drafted tokens" in plainly
    assert re.search(r"^ \d\.\d{3} +\d\.\d{3}  ✓ └ ", plainly, re.MULTILINE)
    assert "\x1b" not in plainly
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(arguments) == 0
    assert re.search(re.escape(DRAFTED) + r" \d\.\d{3} +\d\.\d{3}  ✓ └ ", capsys.readouterr().out)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(arguments) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_demo_ends_in_time(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(demo, "MAX_TIMING_SECONDS", 0.0)
    arguments = ["--max-new-tokens", "24", "--prompt", PROMPT]
    assert main(["bench", "--demo", "--model", folder, *arguments]) == 0
    out, err = capsys.readouterr()
    assert "1 of 3 rounds, 16 tokens instead of 24 are timed" in err
    assert "; 1 round; temperature 0, 16 tokens" in out
    assert out.endswith("16 tokens per way are too few for a verdict, 48 are enough.\n")


def test_demo_needs_a_round(capsys: Any) -> None:
    assert main(["bench", "--demo", "--rounds", "0"]) == 2
    assert "rounds: got 0, accepted 1 or more" in capsys.readouterr().err


def test_without_a_draft_there_is_no_verdict_on_it(folder: str, capsys: Any) -> None:
    arguments = ["--draft", "none", "--max-new-tokens", "8", "--rounds", "1"]
    assert main(["bench", "--demo", "--model", folder, *arguments]) == 0
    assert capsys.readouterr().out.endswith("is not known: no answer was drafted.\n")


def last_words(
    speeds: dict[str, float], capsys: Any, *, tokens: int = 64, others: float | None = None
) -> str:
    """Return the last words on ways of so many tokens per second; others: share of other programs."""
    counts = {"cycles": 10, "emitted": 24, "passes": 15, "verified": 80, "drafted": 70}
    records: list[dict[str, Any]] = []
    for way, speed in speeds.items():
        place = {"way": way, "set": "demo", "id": "1"}
        row = {"new_tokens": tokens, "prompt_tokens": 4, "seconds": [tokens / speed], **counts}
        records += [
            {"record": "answer", **place, "tokens": [0] * tokens},
            {"record": "row", **place, **row},
        ]
    engine = SimpleNamespace(target=SimpleNamespace(device=torch.device("cpu")), drafter=None)
    bench.report(records, {"speculative": True, "chain": False}, cast(Any, engine), others)
    return str(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (
            {"plain": 50, "speculative": 100},
            "speculative: Speculation pays on this CPU (2.00 times",
        ),
        ({"plain": 50, "speculative": 51}, "Speculation changes little on this CPU (1.02 times"),
        ({"plain": 20, "speculative": 10}, "Speculation does not pay on this CPU (0.50 times"),
        (
            {"plain": 20, "speculative": 30, "chain": 40},
            "chain: Speculation pays on this CPU (2.00",
        ),
        ({"generate": 90, "plain": 20}, "is not known: no answer was drafted."),
    ],
)
def test_the_report_ends_with_what_it_found(
    speeds: dict[str, float], words: str, capsys: Any
) -> None:
    said = last_words(speeds, capsys)
    assert words in said
    assert ("brought 2.40 tokens" in said) == (len(speeds) > 1 and "generate" not in speeds)


@pytest.mark.parametrize("tokens", [1, 16, 47])
def test_a_few_tokens_give_no_ratio(tokens: int, capsys: Any) -> None:
    said = last_words({"plain": 1, "speculative": 100}, capsys, tokens=tokens)
    assert said == f"{tokens} tokens per way are too few for a verdict, 48 are enough."
    assert "times" in last_words({"plain": 1, "speculative": 100}, capsys, tokens=48)


def test_a_busy_machine_is_told_with_the_verdict(capsys: Any) -> None:
    speeds = {"plain": 20.0, "speculative": 40.0}
    assert last_words(speeds, capsys, others=0.4).endswith(
        "This may be otherwise on a quiet machine: other programs took 40% of the processors meanwhile."
    )
    assert "quiet" not in last_words(speeds, capsys, others=0.05)
