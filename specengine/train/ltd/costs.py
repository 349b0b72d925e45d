"""Costs by name: published ratios, and what was measured and stands in a result file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specengine.costs import Costs, interpolated
from specengine.errors import InputError

__all__ = ["PUBLISHED", "Costs", "find_costs", "interpolated"]


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
        record = next(record for record in _records(text) if "verify_ms_by_nodes" in record)
        verify, draft = (
            {int(nodes): float(ms) / 1e3 for nodes, ms in record[name].items()}
            for name in ("verify_ms_by_nodes", "draft_pass_ms_by_width")
        )
        overhead = float(record.get("cycle_overhead_ms", 0)) / 1e3
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise InputError(
            f"costs: {name} is neither one of {', '.join(PUBLISHED)} nor a file with a costs record ({error!r})"
        ) from error
    return Costs(Path(name).stem, verify, draft, source="measured", measured=True, overhead=overhead)


def _records(text: str) -> Iterator[dict[str, Any]]:
    """JSON values, one behind the other: lines of a result file, or what was printed."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        yield value
        place += len(text[place:]) - len(text[place:].lstrip())
