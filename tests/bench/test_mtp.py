"""Replays at published rates: chains bring what the rates say, trees more, and all at the same positions."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from bench import mtp
from bench.mtp import PUBLISHED, Head, Rates, replay
from specengine.costs import PassCosts

FREE = PassCosts("free", {1: 1.0}, {1: 0.001})


@pytest.mark.parametrize("law", PUBLISHED)
def test_published_rates_have_sources_and_are_chances(law: str) -> None:
    rates = PUBLISHED[law]
    assert len(rates.source) > 20
    assert all(0.5 < chance < 1 for chance in rates.by_depth)


def test_rates_that_are_derived_add_up() -> None:
    accepted = [76.17, 61.58, 51.25, 42.43, 36.40, 30.94, 27.22, 23.65]
    assert [
        100 * x for x in itertools.accumulate(PUBLISHED["gsm8k"].by_depth, lambda a, b: a * b)
    ] == pytest.approx(accepted, rel=0.01)
    story = PUBLISHED["story"].by_depth[0]
    assert (story + story**2 + story**3) / 3 == pytest.approx(0.4658, abs=0.001)


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_a_chain_brings_what_its_rates_say(spread: float) -> None:
    rates = Rates("made up", (0.8, 0.5))
    found = replay("chain,length=3", Head(rates, spread), FREE, 1200)
    expected = 1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.5
    assert found["tau"] == pytest.approx(expected, abs=5 * 1.1 / math.sqrt(900))
    assert (found["gamma"], found["delta"]) == (4, 3)
    assert found["speedup"] == pytest.approx(found["tau"] / 1.003, rel=1e-3)


def test_a_wider_tree_brings_more_at_the_same_positions() -> None:
    chain, tree = (
        replay(way, Head(Rates("made up", (0.6,)), 0.5), FREE, 300)
        for way in ("chain,length=4", "eagle,width=4,expansions=4,budget=30")
    )
    assert tree["tau"] > chain["tau"] + 0.3


def test_the_command_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mtp.jsonl"
    asked = [
        "--costs",
        "qwen3-8b-h200",
        "--cycles",
        "8",
        "--spread",
        "1",
        "--policy",
        "chain,length=2",
    ]
    mtp.main([*asked, "--policy", "auto", "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["record"] for record in records] == ["provenance", "costs", *["mtp replay"] * 6]
    assert "| qwen3-8b-h200 | gsm8k | 1.0 | " in capsys.readouterr().out
