"""Rows of the table: a way checked, captured and timed, beside what its case costs at least."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from bench.kernels.cases import Case, Compaction, floor_of, kind_of
from bench.kernels.inputs import INPUTS
from bench.kernels.truth import MAX_ERROR, error_of, truth
from bench.kernels.way import Way, installed

CALLS, REPLAYS, WARM_UPS = 20, 60, 5
COPIES_OF_L2 = 5
# bytes/s copied and bfloat16 operations/s, both measured
RATES = {"H200": (4.3e12, 790e12), "H100": (3.0e12, 790e12)}


class Times(NamedTuple):
    """Microseconds per call over the replays."""

    median: float
    p20: float
    p80: float


def replays(run: Callable[[], None], calls: int) -> Times:
    for _ in range(WARM_UPS):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    microseconds = sorted(1e3 * begin.elapsed_time(end) / calls for begin, end in events)
    return Times(
        statistics.median(microseconds), microseconds[REPLAYS // 5], microseconds[4 * REPLAYS // 5]
    )


def measure(calls: list[Callable[[], Any]], captured: bool) -> Times:
    """Time the calls in turn, a multiple of CALLS in all, so that each runs equally often."""
    rounds = -(-CALLS // len(calls))

    def all_calls() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    if not captured:
        return replays(all_calls, rounds * len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        all_calls()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_calls()
    return replays(graph.replay, rounds * len(calls))


def copies_for(case: Case, warm: bool) -> int:
    """Return how many distinct inputs keep each out of the L2 cache until its next turn, as far as memory allows."""
    if warm:
        return 1
    cache, most = (
        torch.cuda.get_device_properties(0).L2_cache_size,
        16 if isinstance(case, Compaction) else 128,
    )
    return max(1, min(-(-COPIES_OF_L2 * cache // max(1, floor_of(case).bytes)), most))


def rows_of(case: Case, ways: list[Way], warm: bool) -> Iterator[dict[str, Any]]:
    device, kind = torch.device("cuda"), kind_of(case)
    inputs: list[Any] = []
    for way in ways:
        row = {
            "record": kind,
            "way": way.name,
            "cache": "warm" if warm else "cold",
            **asdict(case),
            **floors(case),
        }
        if not installed(way):
            yield row | {"skipped": f"needs {way.needs}"}
            continue
        try:
            inputs = inputs or [INPUTS[kind](case, device) for _ in range(copies_for(case, warm))]
            checked = INPUTS[kind](case, device)
            wanted = truth(case, checked)
            error = error_of(case, way.result(case, way.prepare(case, checked)()), wanted)
            if not error <= MAX_ERROR[kind]:
                yield row | {"wrong": error}
                continue
            calls = [way.prepare(case, copy) for copy in inputs]
            yield row | {"error": error, **rounded(measure(calls, way.captured)._asdict())}
        except (
            Exception
        ) as problem:  # a baseline that does not support a case is a row of the table
            yield row | {"skipped": f"{type(problem).__name__}: {str(problem)[:200]}"}


def floors(case: Case) -> dict[str, float]:
    """Return microseconds for the least bytes and operations at this device's rates, if those are known."""
    floor, device = floor_of(case), torch.cuda.get_device_name()
    rates = next((rate for name, rate in RATES.items() if name in device), None)
    if rates is None:
        return {}
    return rounded(
        {
            "bytes_us": 1e6 * floor.bytes / rates[0],
            "operations_us": 1e6 * floor.operations / rates[1],
        }
    )


def launch_floor() -> dict[str, Any]:
    """Measure the launch floor by a chain of kernels that add to one number."""
    number = torch.zeros(1, device="cuda")
    return {
        "record": "launch floor",
        **rounded(measure([lambda: number.add_(1.0)], captured=True)._asdict()),
    }


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}
