"""A forward of one row on machines with more cores than this one, simulated stage by stage: no figure here is measured.

A thread takes pieces of its own share and then of others', as csrc/cpu/threads.hpp deals them out, or the shares stay
equal, as most pools have them. Memory feeds all threads together at `--bandwidth`, one of them at `--of-core` at most,
a slow core at `--slow` of a fast one's rate. A stage ends with a barrier of `--barrier` and `--each` a thread, in
microseconds. `--remote` is the share of its rate at which a thread reads another node's memory.

    python -m bench.cpu.cores --out FILE
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bench import provenance

OUTPUTS = 16  # of a panel
PIECES, LONGEST = 8, 8  # of a thread; steps of a piece
STEP = 2  # panels
# outputs and inputs of the products of a layer, and of the head: Qwen2.5-Coder-1.5B
LAYERS, LAYER, HEAD = 28, ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)), (151936, 1536)
BYTES = 0.5625  # of a weight: Q4_K
MACHINES = {
    **{f"{count} cores": (1.0,) * count for count in (1, 2, 4, 8, 16)},
    "4 fast, 4 slow": (1.0,) * 4 + (0.0,) * 4,
    "2 fast, 8 slow": (1.0,) * 2 + (0.0,) * 8,
}

Record = dict[str, Any]


@dataclass(frozen=True)
class Memory:
    """Rates in GB/s; the barrier in microseconds."""

    bandwidth: float
    of_core: float
    slow: float
    barrier: float
    each: float

    def rates(self, cores: Sequence[float]) -> list[float]:
        """Return what each thread reads in a second, in GB; cores: 1 of a fast one, 0 of a slow one."""
        alone = [self.of_core * (core or self.slow) for core in cores]
        return [rate * min(1.0, self.bandwidth / sum(alone)) for rate in alone]


def pieces_of(panels: int, threads: int) -> list[int]:
    """Return the panels of each piece of a stage."""
    steps = -(-panels // STEP)
    count = min(steps, max(threads * PIECES, steps // LONGEST))
    bounds = [min(panels, steps * piece // count * STEP) for piece in range(count + 1)]
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def stage(panels: int, bytes_of_panel: float, rates: Sequence[float], *, steals: bool) -> float:
    """Return the seconds of a stage without its barrier."""
    threads, pieces = len(rates), pieces_of(panels, len(rates))
    bounds = [len(pieces) * share // threads for share in range(threads + 1)]
    shares = [pieces[begin:end] for begin, end in itertools.pairwise(bounds)]
    costs = [bytes_of_panel / (rate * 1e9) for rate in rates]
    if not steals:
        return max(sum(share) * cost for share, cost in zip(shares, costs, strict=True))
    free = [(0.0, thread) for thread in range(threads)]
    last = 0.0
    while any(shares):
        begun, thread = heapq.heappop(free)
        order = (shares[(thread + turn) % threads] for turn in range(threads))
        share = next(share for share in order if share)
        ended = begun + share.pop(0) * costs[thread]
        last = max(last, ended)
        heapq.heappush(free, (ended, thread))
    return last


def forward(memory: Memory, rates: Sequence[float], *, steals: bool) -> float:
    """Return a forward's milliseconds."""
    products = (*LAYER * LAYERS, HEAD)
    barrier = (memory.barrier + memory.each * len(rates)) * 1e-6 if len(rates) > 1 else 0.0
    seconds = sum(
        stage(-(-outputs // OUTPUTS), OUTPUTS * inputs * BYTES, rates, steals=steals) + barrier
        for outputs, inputs in products
    )
    return seconds * 1000


def records(args: argparse.Namespace) -> Iterator[Record]:
    memory = Memory(args.bandwidth, args.of_core, args.slow, args.barrier, args.each)
    assumptions = {name: value for name, value in vars(args).items() if name != "out"}
    yield {"record": "assumed", "bytes_of_weight": BYTES, "layers": LAYERS} | assumptions
    for name, cores in MACHINES.items():
        rates = memory.rates(cores)
        stealing = forward(memory, rates, steals=True)
        yield {
            "record": "cores",
            "machine": name,
            "stealing_ms": round(stealing, 2),
            "equal_shares_ms": round(forward(memory, rates, steals=False), 2),
            "read_ms": round(_bytes() / sum(rates) / 1e6, 2),
        }
    # two nodes of eight: each reads what its threads have packed, or all read one node's memory
    near = memory.rates((1.0,) * 8)
    far = [rate * share for share in (1.0, args.remote) for rate in near]
    one_node = [rate * min(1.0, args.bandwidth / sum(far)) for rate in far]
    for name, rates in (("where it is read", near * 2), ("on one node", one_node)):
        milliseconds = round(forward(memory, rates, steals=True), 2)
        yield {"record": "nodes", "packed": name, "stealing_ms": milliseconds}


def _bytes() -> float:
    return BYTES * (LAYERS * sum(map(prod, LAYER)) + prod(HEAD))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", type=float, default=60.0, help="GB/s of a node's threads")
    parser.add_argument("--of-core", type=float, default=20.0, help="GB/s of a fast core")
    parser.add_argument(
        "--slow", type=float, default=0.4, help="a slow core's rate, of a fast one's"
    )
    parser.add_argument("--barrier", type=float, default=1.0, help="microseconds")
    parser.add_argument("--each", type=float, default=0.2, help="microseconds for each thread")
    parser.add_argument("--remote", type=float, default=0.5, help="of a rate, on another node")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    provenance.show(records(args), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
