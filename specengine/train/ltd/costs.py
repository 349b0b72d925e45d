"""What verifying n nodes and drafting from n nodes take: measured on a machine, or published."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specengine import policies
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.records import Cycle

VERIFIED, DRAFTED = (1, 4, 8, 16, 24, 32, 48, 60), (1, 4, 10)  # node counts that costs are measured at


@dataclass(frozen=True)
class Costs:
    """What a verification of n nodes and a draft pass of n nodes take, in any one unit; linear between given points.

    verify, draft  cost by nodes, at least one point each; beyond the last one the slope of the last two goes on
    measured       in seconds, so that the policy's own time, as it is in a replay, can be added
    """

    name: str
    verify: dict[int, float]
    draft: dict[int, float]
    source: str = ""
    measured: bool = False

    def cycle(self, verified: int, widths: Sequence[int]) -> float:
        """Of verifying so many nodes after draft passes of these widths."""
        return interpolated(self.verify, verified) + sum(interpolated(self.draft, width) for width in widths)

    @property
    def plain(self) -> float:
        """Of a token without a draft."""
        return interpolated(self.verify, 1)

    def record(self) -> dict[str, Any]:
        """As result files hold it; see `find_costs`."""
        unit = 1e3 if self.measured else 1
        points = [{str(n): round(unit * cost, 5) for n, cost in found.items()} for found in (self.verify, self.draft)]
        names = ("verify_ms_by_nodes", "draft_pass_ms_by_width") if self.measured else ("verify", "draft")
        return {"record": "costs", "name": self.name, "source": self.source, **dict(zip(names, points, strict=True))}


def _ratio(name: str, draft: float, verify: float, source: str) -> Costs:
    return Costs(name, {1: verify}, {1: draft}, source)


# A pass of the draft against a verification, whatever their sizes: batch 1 on GPUs, where both wait for memory.
PUBLISHED = {
    costs.name: costs
    for costs in (
        _ratio("vicuna-13b-h200", 0.082, 1, "TALON, from its EAGLE-3 rows with 9 draft passes"),
        _ratio("vicuna-13b-h200-long", 0.113, 1, "TALON, the same on CNN/DM"),
        _ratio("qwen3-8b-h200", 0.074, 1, "TALON, from its EAGLE-3 rows with 9 draft passes"),
        _ratio("8b-l40", 5, 100, "C2T, equation 12"),
        _ratio("70b-2xa100", 10, 400, "C2T, equation 12"),
        Costs(
            "2-cores-amx",
            {1: 33.2, 4: 35.7, 12: 39.0, 28: 47.3, 60: 58.7},
            {1: 2.6, 4: 2.2, 10: 2.2},
            "milliseconds of SmolLM2-135M-Instruct in bfloat16 and its head on two cores with AMX, all of a cycle "
            "included; medians of bench/results/policies-bfloat16.jsonl",
        ),
        Costs(
            "8b-a100-roofline",
            {1: 1.0, 140: 1.0, 280: 2.0},
            {1: 0.074},
            "as qwen3-8b-h200; verification waits for 2 bytes per weight at 1.55 TB/s up to 140 nodes, where 2 "
            "operations per weight and node at 70 % of 312 TFLOPS take as long, and grows in proportion from there",
        ),
    )
}


def find_costs(name: str) -> Costs:
    """Published ratios by name, or the `costs` record of a file that `bench.end_to_end --tree` printed or wrote."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    try:
        text = Path(name).read_text(encoding="utf-8")
        verify, draft = next(
            (record["verify_ms_by_nodes"], record["draft_pass_ms_by_width"])
            for record in _records(text)
            if "verify_ms_by_nodes" in record
        )
        seconds = [{int(nodes): float(ms) / 1e3 for nodes, ms in found.items()} for found in (verify, draft)]
    except (OSError, ValueError, KeyError, AttributeError, StopIteration) as error:
        raise InputError(
            f"costs: {name} is neither one of {', '.join(PUBLISHED)} nor a file with a costs record ({error!r})"
        ) from error
    return Costs(Path(name).stem, seconds[0], seconds[1], source="measured", measured=True)


def _records(text: str) -> Iterator[dict[str, Any]]:
    """JSON values, one behind the other: lines of a result file, or what was printed."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        yield value
        place += len(text[place:]) - len(text[place:].lstrip())


def interpolated(points: dict[int, float], nodes: int) -> float:
    known = sorted(points.items())
    if len(known) == 1 or nodes <= known[0][0]:
        return known[0][1]
    right = next((i for i, (at, _) in enumerate(known) if at >= nodes), len(known) - 1)
    (x0, y0), (x1, y1) = known[right - 1], known[right]
    return y0 + (y1 - y0) * (nodes - x0) / (x1 - x0)


def measure(engine: Engine, prompt: str | list[int], name: str = "measured") -> Costs:
    """Median seconds per cycle of verifying n nodes, and per pass of drafting from n nodes, along one answer."""
    if engine.drafter is None:
        raise InputError("draft: there is none to measure")

    def medians(sizes: Sequence[int], field: str) -> dict[int, float]:
        found = {}
        for size in sizes:
            tree = {"width": 10, "expansions": 2, "budget": size} if field == "verify" else {}
            tree = tree or {"width": size, "expansions": 6, "budget": 8}
            made = Engine(engine.target, engine.drafter, policies.make("eagle", **tree), engine.tokenizer)
            cycles = [piece.cycle for piece in made.stream(prompt, max_new_tokens=48, temperature=0.0)][1:]
            found[size] = statistics.median(_seconds(cycle, field) for cycle in cycles)
        return found

    return Costs(name, medians(VERIFIED, "verify"), medians(DRAFTED, "draft"), source="measured", measured=True)


def _seconds(cycle: Cycle, field: str) -> float:
    return cycle.seconds.verify if field == "verify" else cycle.seconds.draft / int(cycle.tree.passes)
