"""Costs of verifying and drafting, by number of nodes: measured on this machine, or published."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specengine.errors import InputError, require
from specengine.files import read_text

if TYPE_CHECKING:
    from torch import Tensor

Points = dict[int, float]  # by count


class CostTables(NamedTuple):
    """Costs by count behind one context, on the CPU, in the unit of their Costs; entry 0 is 0.

    verify  float32 [nodes + 1], a verification of so many nodes, the root included
    draft   float32 [width + 1], a draft pass of so many nodes
    """

    verify: Tensor
    draft: Tensor


@dataclass(frozen=True)
class Costs:
    """What a verification of n nodes and a draft pass of n nodes take, in any one unit; linear between given points.

    verify, draft  cost by nodes, at least one point each; beyond the last one the slope of the last two goes on,
                   where it rises
    measured       in seconds, so that the policy's own time, as it is in a replay, can be added
    overhead       of a drafted cycle beside them: both commits, and what its first draft pass takes beyond another one
    context        tokens in the cache that `verify` and `draft` hold behind
    verify_growth, draft_growth  what each further token in the cache adds, by nodes; no points: nothing
    padded         every verification runs as many rows as the largest one may have, every draft pass likewise
    """

    name: str
    verify: Points
    draft: Points
    source: str = ""
    measured: bool = False
    overhead: float = 0.0
    context: int = 0
    verify_growth: Points = field(default_factory=dict)
    draft_growth: Points = field(default_factory=dict)
    padded: bool = False

    def tables(self, nodes: int, width: int, context: int) -> CostTables:
        """Of 0 to `nodes` verified nodes and 0 to `width` drafted from, behind `context` tokens in the cache.

        Contexts below the one that was measured count as that one. A padded table is flat: it holds for trees of
        which `nodes` and `width` are the most.
        """
        require("nodes, width", (nodes, width), "1 or more each", min(nodes, width) >= 1)
        more = max(0, context - self.context)
        return CostTables(
            self._table(self.verify, self.verify_growth, nodes, more),
            self._table(self.draft, self.draft_growth, width, more),
        )

    def cycle(self, verified: int, widths: Sequence[int]) -> float:
        """Of verifying so many nodes after draft passes of these widths."""
        passes = sum(interpolated(self.draft, width) for width in widths)
        return self.overhead + interpolated(self.verify, verified) + passes

    @property
    def plain(self) -> float:
        """Of a token without a draft."""
        return interpolated(self.verify, 1)

    def record(self) -> dict[str, Any]:
        """As result files hold it; see `find_costs`."""
        unit = 1e3 if self.measured else 1
        points = [{str(n): round(unit * cost, 5) for n, cost in found.items()} for found in (self.verify, self.draft)]
        names = ("verify_ms_by_nodes", "draft_pass_ms_by_width") if self.measured else ("verify", "draft")
        found = {"record": "costs", "name": self.name, "source": self.source, **dict(zip(names, points, strict=True))}
        return found | ({"cycle_overhead_ms": round(unit * self.overhead, 5)} if self.measured else {})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` takes it back."""
        return {
            name: {str(n): cost for n, cost in value.items()} if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_dict(cls, content: Any) -> Costs:
        """What `to_dict` gave; InputError naming the field that is missing, unknown or of another kind."""
        if not isinstance(content, Mapping):
            raise InputError(f"costs: got {type(content).__name__}, accepted an object")
        fields = {found.name: found for found in dataclasses.fields(cls)}
        for name in content.keys() - fields.keys():
            raise InputError(f"costs.{name}: unknown, known are {', '.join(fields)}")
        for name in ("name", "verify", "draft"):
            require(f"costs.{name}", "nothing", _READERS[name][0], name in content)
        return cls(**{name: _read(name, value) for name, value in content.items()})

    def _table(self, base: Points, growth: Points, most: int, more: int) -> Tensor:
        table = _table(_sorted(base), most) + more * _table(_sorted(growth), most)
        if self.padded:
            table[1:] = table[-1].clone()
        return table.clamp(min=0)


def _ratio(name: str, draft: float, verify: float, source: str) -> Costs:
    return Costs(name, {1: verify}, {1: draft}, source)


# A pass of the draft against a verification, whatever their sizes: batch 1 on GPUs, where both wait for memory.
PUBLISHED = {
    costs.name: costs
    for costs in (
        _ratio("vicuna-13b-h200", 0.082, 1, "TALON, from its EAGLE-3 rows with 9 draft passes"),
        _ratio("vicuna-13b-h200-long", 0.113, 1, "TALON, the same on CNN/DM"),
        _ratio("qwen3-8b-h200", 0.074, 1, "TALON, from its EAGLE-3 rows with 9 draft passes"),
        _ratio("qwen3-32b-h200", 0.058, 1, "TALON, from its EAGLE-3 rows with 9 draft passes, CNN/DM left out"),
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

# Where nothing was measured: one token's verification is 1.
ASSUMED = Costs("assumed", {1: 1.0, 16: 1.05, 32: 1.3, 64: 2.0}, {1: 0.1, 8: 0.12}, "a guess")


def find_costs(name: str) -> Costs:
    """Published ratios by name, or the `costs` record of a file that `bench.policies --costs` wrote."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    try:
        text = read_text(Path(name))
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


def interpolated(points: Points, nodes: int) -> float:
    """The cost of so many nodes: linear between the points, the first one's below it."""
    return _at(_sorted(points), nodes)


def _at(known: tuple[tuple[int, float], ...], nodes: int) -> float:
    if len(known) == 1 or nodes <= known[0][0]:
        return known[0][1]
    right = next((i for i, (at, _) in enumerate(known) if at >= nodes), len(known) - 1)
    (x0, y0), (x1, y1) = known[right - 1], known[right]
    if nodes > x1:  # beyond all points, where noise must not make more nodes cheaper and cheaper
        return y1 + max(0.0, y1 - y0) * (nodes - x1) / (x1 - x0)
    return y0 + (y1 - y0) * (nodes - x0) / (x1 - x0)


def _sorted(points: Points) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(points.items()))


@lru_cache(maxsize=64)
def _table(known: tuple[tuple[int, float], ...], most: int) -> Tensor:
    """float32 [most + 1]; kept, as a policy asks for the same points behind context after context."""
    import torch

    seconds = [0.0, *(_at(known, nodes) if known else 0.0 for nodes in range(1, most + 1))]
    return torch.tensor(seconds, dtype=torch.float32, device="cpu")


# ---- reading


def _read(name: str, value: Any) -> Any:
    accepted, read = _READERS[name]
    found = read(value)
    require(f"costs.{name}", repr(value)[:80], accepted, found is not None)
    return found


def _points(value: Any, least: int) -> Points | None:
    if not isinstance(value, Mapping) or len(value) < least:
        return None
    try:
        found = {int(nodes): _number(cost) for nodes, cost in value.items()}
    except (TypeError, ValueError):
        return None
    wrong = len(found) < len(value) or any(nodes < 1 or cost is None for nodes, cost in found.items())
    return None if wrong else {nodes: cost for nodes, cost in found.items() if cost is not None}


def _number(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if fits else None


def _of(kind: type) -> Any:
    return lambda value: value if type(value) is kind else None


_COST_BY_NODES = "costs of 0 or more by nodes of 1 or more"
# name of the field, what it accepts, what makes it of a JSON value, None where that does not fit
_READERS: dict[str, tuple[str, Any]] = {
    "name": ("a text", _of(str)),
    "verify": (_COST_BY_NODES, lambda value: _points(value, 1)),
    "draft": (_COST_BY_NODES, lambda value: _points(value, 1)),
    "source": ("a text", _of(str)),
    "measured": ("true or false", _of(bool)),
    "overhead": ("0 or more", _number),
    "context": ("a whole number of 0 or more", lambda value: value if type(value) is int and value >= 0 else None),
    "verify_growth": (_COST_BY_NODES, lambda value: _points(value, 0)),
    "draft_growth": (_COST_BY_NODES, lambda value: _points(value, 0)),
    "padded": ("true or false", _of(bool)),
}
