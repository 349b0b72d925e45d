"""Tests of summaries: medians over rounds, quartiles over prompts, verdicts."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from specengine.benchmark.report import source, speeds_by_way, tables
from specengine.benchmark.summaries import (
    Answer,
    differences,
    first_difference,
    quartiles,
    ratio,
    row,
    summaries,
)


def a_row(way: str, set_: str, id_: str, *seconds: float, verdict: str = "exact") -> dict[str, Any]:
    place = None if verdict == "exact" else 3
    head = {"record": "row", "way": way, "set": set_, "id": id_, "new_tokens": 10}
    return {**head, "seconds": list(seconds), "diverges_at": place, "verdict": verdict}


ROWS = [
    a_row("plain", "a", "1", 1.0, 1.0, 9.0),
    a_row("fast", "a", "1", 0.5, 0.4, 7.0, verdict="near-tie"),
    a_row("plain", "a", "2", 2.0, 2.0, 2.0),
    a_row("fast", "a", "2", 0.5, 0.5, 0.5),
    a_row("plain", "b", "1", 1.0, 1.0, 1.0),
    a_row("fast", "b", "1", 2.0, 2.0, 2.0, verdict="mismatch"),
]


def test_a_prompt_counts_with_its_median_round() -> None:
    found = {(record["way"], record["set"]): record for record in summaries(ROWS)}
    assert found["fast", "a"]["speed_quartiles"] == [2.5, 3.0, 3.5]
    whole = found["fast", "all"]
    assert whole["speed_quartiles"] == [1.25, 2.0, 3.0]
    assert whole["speed_mean"] == pytest.approx((2 + 4 + 0.5) / 3, abs=1e-4)
    assert whole["speed_total"] == pytest.approx(4.0 / 3.0, abs=1e-4)
    assert whole["verdicts"] == {"exact": 1, "near-tie": 1, "mismatch": 1}
    assert whole["rounds_apart"] == 0.0
    assert found["plain", "a"]["rounds_apart"] == 4.0
    assert "tau" not in whole


def test_a_way_that_was_lost_is_not_summed_up() -> None:
    lost = {"record": "not run", "way": "fast", "reason": "x|y", "fault": True}
    records = [*ROWS, lost]
    assert {record["way"] for record in summaries(records)} == {"plain"}
    assert speeds_by_way(records) == {}
    assert "x/y" in tables(records)[-1].markdown()


def test_speeds_are_drawn_by_set() -> None:
    assert speeds_by_way(ROWS) == {"fast": {"a": [2.0, 4.0], "b": [0.5]}}


def even(way: str, seconds: list[float]) -> list[dict[str, Any]]:
    return [a_row(way, "a", str(number), time) for number, time in enumerate(seconds)]


def test_an_interval_is_of_prompts_and_pairs_them() -> None:
    times = [1.0 + number % 7 for number in range(40)]
    twice = ratio(even("a", times), even("b", [2 * time for time in times]))
    assert twice == [2.0, 2.0, 2.0]  # prompts differ sevenfold, the ways' ratio not at all
    noisy = [time * (1.4 if number % 2 else 0.7) for number, time in enumerate(times)]
    middle, low, high = ratio(even("a", times), even("b", noisy))
    assert low < 1.0 < high
    assert low < middle < high
    few = ratio(even("a", times[:8]), even("b", noisy[:8]))
    assert few[2] - few[1] > high - low


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    generator, held = random.Random(1), 0
    for _ in range(60):
        logs = [generator.gauss(0.0, 0.2) for _ in range(30)]
        _, low, high = ratio(even("a", [1.0] * 30), even("b", [math.exp(log) for log in logs]))
        held += low <= math.exp(0.02) <= high  # the mean of exp of a normal number
    assert 50 <= held <= 60


def test_ways_are_apart_over_the_prompts_that_all_have() -> None:
    rows = [
        *even("slow", [3.0, 3.0, 3.0]),
        *even("fast", [1.0, 1.0]),
        *even("mid", [2.0, 2.0, 9.0]),
    ]
    first, second, third = differences(rows)
    assert [first["way"], second["way"], third["way"]] == ["fast", "mid", "slow"]
    assert (first["prompts"], "over_next" in first) == (2, False)
    assert second["over_fastest"] == second["over_next"] == [0.5, 0.5, 0.5]
    assert third["over_next"][0] == pytest.approx(2 / 3, abs=1e-4)
    assert differences(even("fast", [1.0, 1.0])) == []
    assert differences([*even("fast", [1.0]), *even("slow", [2.0])]) == []
    lost = {"record": "not run", "way": "slow", "reason": "x", "fault": True}
    assert [record["way"] for record in differences([*rows, lost])] == ["fast", "mid"]
    untimed = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    assert differences(untimed) == []


def test_quartiles() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_tables_tell_what_came_of_the_run() -> None:
    first, apart, by_set = tables(ROWS)
    assert (apart.header[1], apart.rows[0]) == ("over fast", ["fast", "–", "–"])
    assert apart.rows[1][1] == apart.rows[1][2]
    assert first.rows[1][2] == "2.00 (1.25 to 3.00)"
    assert first.rows[1][-3:] == ["1", "1", "1"]
    assert by_set.header == ("way", "a [2]", "b [1]")
    assert by_set.rows[1] == ["fast", "3.00 (2.50 to 3.50)", "0.50"]
    origin = {
        "record": "provenance",
        "command": "c",
        "commit": "",
        "specengine": "1",
        "date": "d",
        "device": "e",
    }
    assert (
        source("x", [origin, {"record": "resumed"}])
        == "`x`: `c` at 1, d, on e; stopped and resumed 1 times"
    )


def test_a_row_of_rounds() -> None:
    cycles = {
        "cycles": 2,
        "emitted": 3,
        "passes": 4,
        "verified": 5,
        "drafted": 6,
        "policy_s": 1.0,
        "total_s": 4.0,
    }
    times = [{"draft": ms, "policy": ms, "verify": ms, "total": ms} for ms in (1.0, 3.0)]
    answers = [Answer([1, 2, 3], 7, 0.5, {**cycles, "median_ms": ms}) for ms in times]
    found = row(answers)
    assert (found["prompt_tokens"], found["new_tokens"], found["cycles"], found["emitted"]) == (
        7,
        3,
        2,
        3,
    )
    assert (found["seconds"], found["median_ms"]["draft"], found["policy_share"]) == (
        [0.5, 0.5],
        2.0,
        0.25,
    )
    assert "cycles" not in row([Answer([1], 1, 0.1)])


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_latencies_are_as_a_client_sees_them() -> None:
    def row(first: list[float], seconds: list[float], tokens: int) -> dict[str, object]:
        place = {"record": "row", "way": "a", "set": "s", "id": str(tokens)}
        return {
            **place,
            "prompt_tokens": 3,
            "new_tokens": tokens,
            "first": first,
            "seconds": seconds,
        }

    rows = [row([0.1, 0.3], [1.1, 1.3], 11), row([0.2, 0.2], [0.2, 0.2], 1)]
    found = next(record for record in summaries(rows) if record["set"] == "all")
    assert found["latency"]["first_token"][0] == pytest.approx(200)
    assert found["latency"]["between_tokens"] == [100, 100, 100]  # an answer of one token has none
    assert found["latency"]["answer"][2] == pytest.approx(1294)
    assert found["per_user"] == pytest.approx(10)
    (table,) = [table for table in tables(rows) if table.kind == "latency"]
    assert table.rows == [
        ["a", "200.0, 270.0, 297.0", "100.0, 100.0, 100.0", "650.0, 1240.0, 1294.0", "10.0"]
    ]
    del rows[1]["first"]
    assert "latency" not in next(record for record in summaries(rows) if record["set"] == "all")
