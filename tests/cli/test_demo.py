"""`specengine demo`: three ways compared, in bounded time."""

from __future__ import annotations

import re
import sys
from typing import Any

from specengine import engine
from specengine.cli import main
from tests.cli.streams import PROMPT
from tests.test_checking import accept_blindly


def test_demo_compares_three_ways(folder: str, capsys: Any) -> None:
    assert main(["demo", "--model", folder, "--max-new-tokens", "24", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["transformers generate"].endswith("yes")
    assert lines["speculative decoding"].endswith("yes")
    assert lines["plain decoding"].endswith("-")
    assert "round 1 of 1" in err


def test_demo_explains_a_difference(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine, "walk", accept_blindly)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    given = ["--prompt", PROMPT, "--max-new-tokens", "24", "--rounds", "1"]
    assert main(["demo", "--model", folder, *given]) == 0
    out = capsys.readouterr().out
    assert re.search(r"speculative decoding .* no\n", out)
    assert "speculative against plain decoding: mismatch at token" in out


def test_demo_ends_in_time(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("specengine.cli.demo.ENOUGH_SECONDS", 0.0)
    assert main(["demo", "--model", folder, "--max-new-tokens", "8", "--prompt", PROMPT]) == 0
    out, err = capsys.readouterr()
    assert "median of 1 interleaved" in out
    assert "1 of 3 rounds have to do" in err


def test_demo_needs_a_round(capsys: Any) -> None:
    assert main(["demo", "--rounds", "0"]) == 2
