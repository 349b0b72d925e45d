"""Answers as they were measured, rows of one way's answers to one prompt, and summaries of rows per way and set."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from specengine.benchmark.records import Record
from specengine.models import common_prefix

if TYPE_CHECKING:
    from specengine.records import Cycle, Seconds

COUNTS = ("cycles", "emitted", "passes", "verified", "drafted")
PARTS = ("draft", "policy", "verify", "walk", "commit", "total")


class Answer(NamedTuple):
    """New tokens, the prompt's length, wall-clock seconds with the prompt's; `cycles` is what `counted` gives.

    first: seconds until the first tokens were there, where the way tells.
    """

    tokens: list[int]
    prompt_tokens: int
    seconds: float
    cycles: dict[str, Any] | None = None
    first: float | None = None


class Figures(NamedTuple):
    """Counts of a cycle, and its seconds."""

    emitted: int
    passes: int
    verified: int
    drafted: int
    seconds: Seconds

    @classmethod
    def of(cls, cycle: Cycle) -> Figures:
        return cls(
            len(cycle.tokens), int(cycle.tree.passes), len(cycle.tree), cycle.drafted, cycle.seconds
        )


def counted(cycles: Sequence[Figures]) -> dict[str, Any]:
    """Return sums over an answer's cycles, medians of their parts in milliseconds, and seconds of policies and of all.

    emitted: tokens; passes: of the draft; verified: nodes, with the root; drafted: nodes, without it. Where some cycles
    stayed on a device, whose parts are not known, `total` stands alone.
    """
    split = all(cycle.seconds.split for cycle in cycles)
    medians = {
        part: round(1e3 * statistics.median(getattr(cycle.seconds, part) for cycle in cycles), 4)
        for part in (PARTS if split else ("total",))
    }
    return {
        "cycles": len(cycles),
        **{name: sum(getattr(cycle, name) for cycle in cycles) for name in COUNTS[1:]},
        "median_ms": medians,
        **({"policy_s": round(sum(cycle.seconds.policy for cycle in cycles), 6)} if split else {}),
        "total_s": round(sum(cycle.seconds.total for cycle in cycles), 6),
    }


def row(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return counters of the first round, seconds of every round, and medians over rounds of the parts' medians."""
    first = answers[0]
    measured: dict[str, Any] = {
        "prompt_tokens": first.prompt_tokens,
        "new_tokens": len(first.tokens),
    }
    cycles = [answer.cycles for answer in answers if answer.cycles is not None]
    if cycles:
        measured |= {name: cycles[0][name] for name in COUNTS}
    measured["seconds"] = [round(answer.seconds, 4) for answer in answers]
    if all(answer.first is not None for answer in answers):
        measured["first"] = [
            round(answer.first, 6) for answer in answers if answer.first is not None
        ]
    if cycles:
        parts = [part for part in PARTS if all(part in each["median_ms"] for each in cycles)]
        measured["median_ms"] = {
            part: round(statistics.median(each["median_ms"][part] for each in cycles), 4)
            for part in parts
        }
    if cycles and all("policy_s" in each for each in cycles):
        share = sum(each["policy_s"] for each in cycles) / sum(each["total_s"] for each in cycles)
        measured["policy_share"] = round(share, 5)
    return measured


def first_difference(expected: list[int], got: list[int]) -> int | None:
    """Return the first position at which these tokens differ; None where they are the same."""
    return None if expected == got else common_prefix(expected, got)


ALL = "all"
VERDICTS = ("exact", "near-tie", "mismatch")
SAMPLES = 1000  # of prompts, for an interval


def summaries(records: Iterable[Record]) -> list[Record]:
    """Return a record per way and set, and per way over all sets, without the ways that did not run to the end.

    tau: tokens per verification, the bonus token included; delta: draft passes per verification; verified and
    drafted: nodes per cycle, the former with the root; gamma: verified nodes in all; none of these for ways that have
    no cycles. Milliseconds are medians over prompts of the prompts' medians over cycles, policy_share is the mean over
    prompts. A prompt's time is the median over rounds. Of its tokens per second over plain decoding's, speed_mean is
    the mean over prompts, speed_quartiles are the three quartiles; speed_total is the ratio over all prompts together.
    rounds_apart: the median over prompts of how far the slowest round lies above the fastest, as a share.

    latency: where all answers tell when their first token was there, percentiles 50, 90 and 99 over all answers of
    all rounds, in milliseconds: `first_token`; `between_tokens`, of an answer the time after its first token divided
    by its tokens but one; `answer`, the whole time. per_user: the mean over answers of tokens per second after the
    first. As AIPerf defines them, but that the first tokens of a cycle arrive together.
    """
    records = list(records)
    rows = [record for record in records if record["record"] == "row"]
    dropped = {record["way"] for record in records if record["record"] == "not run"}
    plain = {(row["set"], row["id"]): row for row in rows if row["way"] == "plain"}
    records_of_ways = []
    for way in dict.fromkeys(row["way"] for row in rows if row["way"] not in dropped):
        way_rows = [
            row
            for row in rows
            if row["way"] == way and (not plain or (row["set"], row["id"]) in plain)
        ]
        for name in (*dict.fromkeys(row["set"] for row in way_rows), ALL):
            members = way_rows if name == ALL else [row for row in way_rows if row["set"] == name]
            base = [plain[row["set"], row["id"]] for row in members] if plain else []
            records_of_ways.append(
                {
                    "record": "summary",
                    "way": way,
                    "set": name,
                    **_counters(members),
                    **_times(members, base),
                }
            )
    return records_of_ways


def differences(records: Iterable[Record]) -> list[Record]:
    """Return a record per way, the fastest first, with its tokens per second over those of faster ways.

    over_fastest, over_next: [ratio, low, high] to the fastest way and to the one before; the 95 % interval is of
    prompts drawn with replacement, the same ones for both ways. Over all prompts that every way has answered; empty
    with fewer than two of them, two ways, or without times.
    """
    records = list(records)
    dropped = {record["way"] for record in records if record["record"] == "not run"}
    by_way: dict[str, dict[tuple[str, str], Record]] = {}
    for row in records:
        if row["record"] == "row" and row["way"] not in dropped and "seconds" in row:
            by_way.setdefault(row["way"], {})[row["set"], row["id"]] = row
    shared = [
        key
        for key in next(iter(by_way.values()), {})
        if all(key in of_way for of_way in by_way.values())
    ]
    if len(shared) < 2 or len(by_way) < 2:
        return []
    rows = {way: [of_way[key] for key in shared] for way, of_way in by_way.items()}
    order = sorted(rows, key=lambda way: -_rate(rows[way]))
    records_of_pairs: list[Record] = [
        {"record": "difference", "way": order[0], "prompts": len(shared)}
    ]
    for next_, way in pairwise(order):
        over = {
            "over_fastest": ratio(rows[way], rows[order[0]]),
            "over_next": ratio(rows[way], rows[next_]),
        }
        records_of_pairs.append(
            {"record": "difference", "way": way, "prompts": len(shared), **over}
        )
    return records_of_pairs


def ratio(rows: Sequence[Record], base: Sequence[Record]) -> list[float]:
    """Return tokens per second over those of `base`, and the 95 % interval over prompts; rows of the same prompts."""
    generator, pairs = random.Random(0), list(zip(rows, base, strict=True))
    drawn = []
    for _ in range(SAMPLES):
        ours, other = zip(*generator.choices(pairs, k=len(pairs)), strict=True)
        drawn.append(_rate(ours) / _rate(other))
    bounds = statistics.quantiles(drawn, n=40)
    return [round(value, 4) for value in (_rate(rows) / _rate(base), bounds[0], bounds[-1])]


def speeds(rows: Sequence[Record], plain: Sequence[Record]) -> list[float]:
    """Return each prompt's tokens per second over those of plain decoding's row."""
    return [_rate([row]) / _rate([base]) for row, base in zip(rows, plain, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the three quartiles by linear interpolation; of one value three times that value."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    return low, middle, high


def _counters(rows: list[Record]) -> Record:
    record: Record = {"prompts": len(rows), "new_tokens": sum(row["new_tokens"] for row in rows)}
    if all("cycles" in row for row in rows):
        total = {name: sum(row[name] for row in rows) for name in COUNTS}
        record |= {
            "cycles": total["cycles"],
            "tau": round(total["emitted"] / total["cycles"], 4),
            "delta": round(total["passes"] / total["cycles"], 4),
            "verified": round(total["verified"] / total["cycles"], 3),
            "drafted": round(total["drafted"] / total["cycles"], 3),
            "gamma": total["verified"],
        }
    return record | _differences(rows)


def _differences(rows: list[Record]) -> Record:
    """Return how many answers leave plain decoding's, and by verdict; nothing where they were not compared."""
    if any("diverges_at" not in row for row in rows):
        return {}
    record: Record = {"diverging": sum(row["diverges_at"] is not None for row in rows)}
    if all("verdict" in row for row in rows):
        record["verdicts"] = {
            verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS
        }
    return record


def _times(rows: list[Record], plain: list[Record]) -> Record:
    if any("seconds" not in row for row in (*rows, *plain)):
        return {}
    record: Record = {"tokens_per_second": round(_rate(rows), 3)}
    if plain:
        way_speeds = speeds(rows, plain)
        record["speed_mean"] = round(statistics.mean(way_speeds), 4)
        record["speed_quartiles"] = [round(value, 4) for value in quartiles(way_speeds)]
        record["speed_total"] = round(_rate(rows) / _rate(plain), 4)
    if all(len(row["seconds"]) > 1 for row in rows):
        apart = [max(row["seconds"]) / min(row["seconds"]) - 1 for row in rows]
        record["rounds_apart"] = round(statistics.median(apart), 4)
    if all("median_ms" in row for row in rows):
        parts = [
            part for part in rows[0]["median_ms"] if all(part in row["median_ms"] for row in rows)
        ]
        record["median_ms"] = {
            part: round(statistics.median(row["median_ms"][part] for row in rows), 4)
            for part in parts
        }
    if all("first" in row for row in rows):
        record |= _latencies(rows)
    if all("policy_share" in row for row in rows):
        record["policy_share"] = round(statistics.mean(row["policy_share"] for row in rows), 5)
    return record


def _latencies(rows: Sequence[Record]) -> Record:
    answers = [
        (first, seconds, row["new_tokens"])
        for row in rows
        for first, seconds in zip(row["first"], row["seconds"], strict=True)
    ]
    between = [(seconds - first) / (tokens - 1) for first, seconds, tokens in answers if tokens > 1]
    seconds_by_name = {
        "first_token": [a[0] for a in answers],
        "between_tokens": between,
        "answer": [a[1] for a in answers],
    }
    per_user = [1 / gap for gap in between if gap > 0]
    return {
        "latency": {
            name: _percentiles(values) for name, values in seconds_by_name.items() if values
        },
        **({"per_user": round(statistics.mean(per_user), 2)} if per_user else {}),
    }


def _percentiles(seconds: Sequence[float]) -> list[float]:
    """Return the percentiles 50, 90 and 99 in milliseconds."""
    if len(seconds) == 1:
        return [round(1e3 * seconds[0], 3)] * 3
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return [round(1e3 * cuts[percent - 1], 3) for percent in (50, 90, 99)]


def _rate(rows: Sequence[Record]) -> float:
    return sum(row["new_tokens"] for row in rows) / sum(
        statistics.median(row["seconds"]) for row in rows
    )
