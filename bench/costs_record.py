"""The record of costs in a result file, which `specengine.costs.find_costs` reads."""

from __future__ import annotations

from typing import Any

from specengine.costs import PassCosts


def costs_record(costs: PassCosts) -> dict[str, Any]:
    """Return the record; seconds as milliseconds, ratios as they are."""
    unit = 1e3 if costs.measured else 1
    verify, draft = (
        {str(n): round(unit * cost, 5) for n, cost in column.items()}
        for column in (costs.verify, costs.draft)
    )
    names = (
        ("verify_ms_by_nodes", "draft_pass_ms_by_width") if costs.measured else ("verify", "draft")
    )
    record = {
        "record": "costs",
        "name": costs.name,
        "source": costs.source,
        names[0]: verify,
        names[1]: draft,
    }
    return record | (
        {"cycle_overhead_ms": round(unit * costs.overhead, 5)} if costs.measured else {}
    )
