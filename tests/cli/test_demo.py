"""`specengine demo`: three ways compared, in bounded time."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specengine import cycle
from specengine.cli import demo, main
from specengine.cli.terminal import DRAFTED
from specengine.errors import UnsupportedModelError
from specengine.records import Stats
from tests.cli.streams import PROMPT
from tests.test_checking import accept_blindly


def test_demo_compares_three_ways(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(demo, "MIN_TIMED_TOKENS", 1)
    assert main(["demo", "--model", folder, "--max-new-tokens", "24", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["transformers generate"].endswith("yes")
    assert lines["speculative decoding"].endswith("yes")
    assert lines["plain decoding"].endswith("-")
    assert "round 1 of 1" in err
    last = out.splitlines()[-1]
    assert last.startswith("On this CPU plain decoding here is ")
    assert re.search(r"takes \d+\.\d+ times as long as (over )?one", last), (
        "auto is the policy, so costs are known"
    )


def test_demo_explains_a_difference(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(cycle, "walk", accept_blindly)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    given = ["--policy", "eagle", "--prompt", PROMPT, "--max-new-tokens", "24", "--rounds", "1"]
    assert main(["demo", "--model", folder, *given]) == 0
    out = capsys.readouterr().out
    assert re.search(r"speculative decoding .* no\n", out)
    assert "speculative decoding: mismatch at token" in out


def test_demo_counts_near_ties(folder: str, capsys: Any, monkeypatch: Any) -> None:
    """Tokens that transformers chose otherwise, by hardly more than nothing, are no faults."""
    real = demo.huggingface_tokens

    def otherwise(plain: Any, prompt: str, **options: Any) -> list[int]:
        tokens = real(plain, prompt, **options)
        return [*tokens[:-1], tokens[-1] ^ 1]

    monkeypatch.setattr(demo, "huggingface_tokens", otherwise)
    given = ["demo", "--model", folder, "--max-new-tokens", "24", "--rounds", "1"]
    assert main(given) == 0
    assert re.search(r"transformers generate .* no\n", capsys.readouterr().out)
    monkeypatch.setattr(demo, "near_tie_logits", lambda _: 60.0)
    assert main(given) == 0
    out = capsys.readouterr().out
    assert re.search(r"transformers generate .* up to 1 near-tie\n", out)
    assert "transformers generate: near-tie at token 23, " in out


def test_demo_is_strict_where_it_can_be(folder: str, capsys: Any, monkeypatch: Any) -> None:
    asked = []
    real = demo.given.load_engine

    def noted(arguments: Any, **changes: Any) -> Any:
        asked.append(changes)
        if changes.get("strict"):
            raise UnsupportedModelError(f"{reason}: not here")
        return real(arguments, **changes)

    monkeypatch.setattr(demo.given, "load_engine", noted)
    given = ["demo", "--model", folder, "--max-new-tokens", "8", "--rounds", "1"]
    reason = "strict"
    assert main(given) == 0
    assert asked == [{"strict": True}, {"strict": False}]
    assert "specengine: note: strict: not here" in capsys.readouterr().err
    reason = "another"
    assert main(given) == 2
    asked.clear()
    assert main([*given, "--no-strict"]) == 0
    assert asked == [{}]


def test_demo_draws_a_tree_in_colour_on_a_terminal_alone(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    given = [
        "demo",
        "--model",
        folder,
        "--policy",
        "chain",
        "--max-new-tokens",
        "60",
        "--rounds",
        "1",
    ]
    assert main(given) == 0
    plainly = capsys.readouterr().out
    assert "One cycle: a tree of drafted tokens" in plainly
    assert re.search(r"^ \d\.\d{3} +\d\.\d{3}  ✓ └ ", plainly, re.MULTILINE)
    assert "\x1b" not in plainly
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(given) == 0
    assert re.search(re.escape(DRAFTED) + r" \d\.\d{3} +\d\.\d{3}  ✓ └ ", capsys.readouterr().out)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(given) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_demo_ends_in_time(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("specengine.cli.demo.MAX_TIMING_SECONDS", 0.0)
    assert main(["demo", "--model", folder, "--max-new-tokens", "8", "--prompt", PROMPT]) == 0
    out, err = capsys.readouterr()
    assert "median of 1 interleaved" in out
    assert "1 of 3 rounds have to do" in err


def test_demo_times_fewer_tokens_where_they_take_long(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("specengine.cli.demo.MAX_TIMING_SECONDS", 0.0)
    assert (
        main(
            [
                "demo",
                "--model",
                folder,
                "--max-new-tokens",
                "24",
                "--prompt",
                PROMPT,
                "--rounds",
                "1",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "16 tokens instead of 24 are timed" in err
    assert re.search(r"^plain decoding +16 ", out, re.MULTILINE)


def test_demo_needs_a_round(capsys: Any) -> None:
    assert main(["demo", "--rounds", "0"]) == 2


def told(
    theirs: float,
    plain: float,
    drafted: float,
    *,
    drafts: bool = True,
    tokens: int = 64,
    rounds: int = 3,
    others: float | None = None,
) -> str:
    """Return the demo's last words, of so many tokens per second; others: share of the processors of other programs."""
    stats = Stats(
        num_spec_steps=10, num_emitted_in_steps=24, num_draft_tokens=70, num_draft_passes=15
    )
    timed = {"tokens": [0] * tokens, "seconds": [1.0] * rounds}
    ways = [
        SimpleNamespace(speed=speed, stats=[stats], **timed) for speed in (theirs, plain, drafted)
    ]
    target = SimpleNamespace(device=torch.device("cpu"))
    asked = SimpleNamespace(target=target, drafter=object() if drafts else None, policy=None)
    return demo._verdict(cast(Any, ways), cast(Any, asked), others)


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (
            (10, 50, 100),
            "is 5.00 times as fast as transformers' generate. Speculation pays on this CPU (2.00 times",
        ),
        (
            (10, 10.2, 10.3),
            "is as fast as transformers' generate. Speculation changes little on this CPU (1.01 times",
        ),
        ((10, 20, 10), "Speculation does not pay on this CPU (0.50 times plain decoding): "),
        (
            (10, 5, 5),
            "0.50 times as fast as transformers' generate. Speculation changes little on this CPU (1.00",
        ),
    ],
)
def test_the_demo_ends_with_what_it_found(speeds: tuple[float, float, float], words: str) -> None:
    assert words in told(*speeds)
    assert "brought 2.40 tokens" in told(*speeds)


@pytest.mark.parametrize(("tokens", "rounds"), [(16, 1), (16, 2), (1, 3)])
def test_a_few_tokens_give_no_ratio(tokens: int, rounds: int) -> None:
    words = told(1, 50, 100, tokens=tokens, rounds=rounds)
    assert words == f"{tokens * rounds} tokens per way are too few for a verdict, 48 are enough."
    assert "times" in told(1, 50, 100, tokens=16, rounds=3)


def test_a_busy_machine_is_told_with_the_verdict() -> None:
    assert told(10, 20, 40, others=0.4).endswith(
        "This may be otherwise on a quiet machine: other programs took 40% of the processors meanwhile."
    )
    assert "quiet" not in told(10, 20, 40, others=0.05)


def test_without_a_draft_there_is_no_verdict_on_it() -> None:
    assert told(10, 20, 20, drafts=False).endswith("no draft was asked for.")
