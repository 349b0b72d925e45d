"""Costs of verifying and drafting, by number of nodes: measured on this machine, or published."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine.errors import InputError, require, require_input, restating
from specengine.files import read_text

Points = dict[int, float]  # costs by number of nodes

MEASURED = "measured"  # where policies name the costs of their own engine
MAX_LOAD = 0.1  # share of the processors that others may take while costs are measured
MAX_SPREAD = 0.5  # of measured times, relative


class CostTable(NamedTuple):
    """Costs by number of nodes at one context length, on the CPU, in the unit of their PassCosts. Entry 0 is 0.

    verify  float32 [nodes + 1], a verification of n nodes, the root included
    draft   float32 [width + 1], a draft pass of n nodes
    """

    verify: Tensor
    draft: Tensor


@dataclass(frozen=True)
class PassCosts:
    """Costs of a verification of n nodes and of a draft pass of n nodes, in any one unit.

    Costs are linear between the given points. Beyond the last point, the slope of the last two continues if it rises.

    verify, draft  cost by number of nodes, at least one point each
    measured       whether the unit is seconds, so that a replay can add the policy's own time
    overhead       cost of a drafted cycle besides its passes: both commits, and the extra cost of the first draft pass
    context        tokens in the cache for which `verify` and `draft` hold
    verify_growth, draft_growth  extra cost per further token in the cache, by number of nodes; empty: none
    padded         a verification runs as many rows as the next point of `verify` has, a draft pass as many as the
                   largest
    chains         costs are of chains that are accepted whole, as every path of a tree is verified by a row of its
                   own, and an accepted part of one is run again
    experts        experts of the target, over all layers, that a verification of n nodes read when it was measured;
                   empty: none were counted
    all_experts    experts that there are, over all layers
    expert         cost of reading one expert more, included in `verify` as often as `experts` says
    spread         by number of nodes, the interquartile range of the measured verifications over their lower quartile
    load           share of the processors that other programs took while costs were measured, 0 to 1
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
    chains: bool = False
    experts: Points = field(default_factory=dict)
    all_experts: int = 0
    expert: float = 0.0
    spread: Points = field(default_factory=dict)
    load: float = 0.0

    @property
    def doubt(self) -> str | None:
        """Why these costs are provisional, in words: a busy machine, or scattered times; None if they are not."""
        scattered = [
            f"times of {n} rows were scattered"
            for n, spread in self.spread.items()
            if spread > MAX_SPREAD
        ]
        return busy(self.load) or next(iter(scattered), None)

    def table(self, nodes: int, width: int, context: int) -> CostTable:
        """Return costs of 0 to `nodes` verified nodes and draft passes of 0 to `width` nodes.

        context: tokens in the cache; contexts shorter than the measured one count as that one.

        A padded table has steps, the last one up to `nodes`: it holds for trees with at most `nodes` nodes and passes
        of at most `width` nodes.
        """
        require("nodes, width", (nodes, width), "1 or more each", min(nodes, width) >= 1)
        longer = max(0, context - self.context)
        return CostTable(
            self._column(self.verify, self.verify_growth, nodes, longer, self.verify),
            self._column(self.draft, self.draft_growth, width, longer, ()),
        )

    def beside(self, others: int, **shared: Any) -> "SharedCosts":
        """Return the costs of one of several texts whose rows are run together; shared: fields of SharedCosts."""
        # the others' rows read experts too: they are priced as they were when rows were measured
        changed = {
            "overhead": (others + 1) * self.overhead,
            "experts": {},
            "all_experts": 0,
            "expert": 0.0,
        }
        return SharedCosts(**vars(self) | changed | shared, alone=self, others=others)

    def cycle(self, verified: int, widths: Sequence[int]) -> float:
        """Return the cost of a cycle that verifies `verified` nodes after draft passes of these widths."""
        passes = sum(interpolated(self.draft, width) for width in widths)
        return self.overhead + interpolated(self.verify, verified) + passes

    def over_plain(self, texts: int) -> float:
        """Return the cost of a step of so many texts in which each drafts a token, over that of a plain step."""
        drafting = self.cycle(2 * texts, (texts,)) + (texts - 1) * self.overhead
        return drafting / interpolated(self.verify, texts)

    @property
    def plain(self) -> float:
        """Cost of one token of plain decoding."""
        return interpolated(self.verify, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict, which `from_dict` reads."""
        return {
            name: {str(n): cost for n, cost in value.items()} if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_dict(cls, content: Any) -> "PassCosts":
        """Read the dict of `to_dict`. Raise InputError naming a field that is missing, unknown or of another type."""
        require("costs", type(content).__name__, "an object", isinstance(content, Mapping))
        names = [item.name for item in fields(cls)]
        unknown = sorted(content.keys() - {*names})
        require_input(
            f"costs.{', '.join(unknown[:1])}: unknown, known are {', '.join(names)}", not unknown
        )
        for name in ("name", "verify", "draft"):
            require(f"costs.{name}", "nothing", _READERS[name][0], name in content)
        costs = cls(**{name: _read(name, value) for name, value in content.items()})
        each = f"those of 1 node, and all_experts {costs.all_experts} no fewer"
        fits = not costs.experts or 1 <= costs.experts.get(1, 0) <= costs.all_experts
        require("costs.experts", repr(dict(costs.experts))[:80], each, fits)
        return costs

    def _column(
        self, base: Points, growth: Points, count: int, longer: int, widths: Iterable[int]
    ) -> Tensor:
        """Return costs of 0 to `count` rows; widths: those that rows are rounded up to if `padded`, or to `count`."""
        column = _column(_sorted(base), count) + longer * _column(_sorted(growth), count)
        if self.padded:
            ends = torch.tensor(
                sorted({0, count, *(rows for rows in widths if rows < count)}),
                dtype=torch.int64,
                device="cpu",
            )
            column = column[
                ends[
                    torch.bucketize(torch.arange(count + 1, dtype=torch.int64, device="cpu"), ends)
                ]
            ]
        return column.clamp(min=0)


@dataclass(frozen=True)
class SharedCosts(PassCosts):
    """Costs of one of several texts whose rows are run together, where each of the others brings as many.

    Were they thought to bring one row each, all texts would fill the same few cheap rows at once.

    alone    costs of this text without the others
    others   number of other texts
    joined   draft passes of all texts are one, of as many nodes each, that all wait for
    resting  returns whether all these texts decode plainly at present
    forward  returns rows and seconds of the last forward, of all texts together; None if they were returned before
    """

    alone: PassCosts = field(kw_only=True)
    others: int = field(kw_only=True)
    joined: bool = False
    resting: Callable[[], bool] = lambda: False
    forward: Callable[[], tuple[int, float] | None] = lambda: None

    def table(self, nodes: int, width: int, context: int) -> CostTable:
        texts = self.others + 1
        passes = texts if self.joined else 1
        rows = self.alone.table(nodes + self.others, passes * width, context)
        draft = rows.draft[::passes].clone() if self.joined else texts * rows.draft
        return CostTable(self.added(rows.verify), draft)

    def added(self, rows: Tensor) -> Tensor:
        """Return the seconds of n nodes of each text, float32 [nodes + 1]; rows: of n rows in all [nodes + texts]."""
        texts = self.others + 1
        wanted = texts * torch.arange(
            len(rows) - self.others, device=rows.device, dtype=torch.int64
        )
        known = wanted.clamp(max=len(rows) - 1)
        return rows[known] + (rows[-1] - rows[-1 - texts]) / texts * (wanted - known)


def busy(others: float | None) -> str | None:
    """Return in words that other programs took too large a share of the processors; None if not, or if not known."""
    return (
        f"other programs took {others:.0%} of the processors"
        if (others or 0.0) > MAX_LOAD
        else None
    )


# A draft pass relative to a verification of any size: batch 1 on GPUs, where both are memory-bound.
PUBLISHED = {
    costs.name: costs
    for costs in (
        PassCosts(
            "vicuna-13b-h200",
            {1: 1},
            {1: 0.082},
            "TALON, from its EAGLE-3 rows with 9 draft passes",
        ),
        PassCosts("vicuna-13b-h200-long", {1: 1}, {1: 0.113}, "TALON, the same on CNN/DM"),
        PassCosts(
            "qwen3-8b-h200", {1: 1}, {1: 0.074}, "TALON, from its EAGLE-3 rows with 9 draft passes"
        ),
        PassCosts(
            "qwen3-32b-h200",
            {1: 1},
            {1: 0.058},
            "TALON, from its EAGLE-3 rows with 9 draft passes, CNN/DM left out",
        ),
        PassCosts("8b-l40", {1: 100}, {1: 5}, "C2T, equation 12"),
        PassCosts("70b-2xa100", {1: 400}, {1: 10}, "C2T, equation 12"),
        PassCosts(
            "2-cores-amx",
            {1: 33.2, 4: 35.7, 12: 39.0, 28: 47.3, 60: 58.7},
            {1: 2.6, 4: 2.2, 10: 2.2},
            "milliseconds of SmolLM2-135M-Instruct in bfloat16 and its head on two cores with AMX, the rest of the "
            "cycle included; medians of bench/results/policies-bfloat16.jsonl",
        ),
        PassCosts(
            "8b-a100-roofline",
            {1: 1.0, 140: 1.0, 280: 2.0},
            {1: 0.074},
            "draft as qwen3-8b-h200; verification reads 2 bytes per weight at 1.55 TB/s up to 140 nodes, where 2 "
            "operations per weight and node at 70 % of 312 TFLOPS take as long, and is proportional from there",
        ),
    )
}

# If nothing was measured. The verification of one token is 1.
ASSUMED = PassCosts("assumed", {1: 1.0, 16: 1.05, 32: 1.3, 64: 2.0}, {1: 0.1, 8: 0.12}, "a guess")


def find_costs(name: str) -> PassCosts:
    """Return published costs by name, or the `costs` record of a file that `bench.policies --costs` wrote.

    Raise InputError if `name` is neither.
    """
    if name in PUBLISHED:
        return PUBLISHED[name]
    with restating(
        (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration),
        lambda error: InputError(
            f"costs: {name} is neither one of {', '.join(PUBLISHED)} nor a file with a costs record ({error!r})"
        ),
    ):
        text = read_text(Path(name))
        record = next(record for record in _records(text) if "verify_ms_by_nodes" in record)
        verify, draft = (
            {int(nodes): float(ms) / 1e3 for nodes, ms in record[name].items()}
            for name in ("verify_ms_by_nodes", "draft_pass_ms_by_width")
        )
        overhead = float(record.get("cycle_overhead_ms", 0)) / 1e3
    return PassCosts(
        Path(name).stem, verify, draft, source="measured", measured=True, overhead=overhead
    )


def _records(text: str) -> Iterator[dict[str, Any]]:
    """Yield JSON values that follow each other: lines of a result file, or printed output."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        yield value
        place += len(text[place:]) - len(text[place:].lstrip())


def interpolated(points: Points, nodes: int) -> float:
    """Return the cost of `nodes` nodes: linear between the points, constant below the first."""
    return _at(_sorted(points), nodes)


def _at(points: tuple[tuple[int, float], ...], nodes: int) -> float:
    if len(points) == 1 or nodes <= points[0][0]:
        return points[0][1]
    right = next((i for i, (at, _) in enumerate(points) if at >= nodes), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    # beyond the last point, noise must not make more nodes cheaper
    return (
        y1 + max(0.0, y1 - y0) * (nodes - x1) / (x1 - x0)
        if nodes > x1
        else y0 + (y1 - y0) * (nodes - x0) / (x1 - x0)
    )


def _sorted(points: Points) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(points.items()))


@lru_cache(maxsize=64)
def _column(points: tuple[tuple[int, float], ...], count: int) -> Tensor:
    """Return costs of 0 to `count` nodes, float32 [count + 1]. Cached: a policy asks for the same points repeatedly."""
    seconds = [0.0, *(_at(points, nodes) if points else 0.0 for nodes in range(1, count + 1))]
    return torch.tensor(seconds, dtype=torch.float32, device="cpu")


# ---- reading


def _read(name: str, value: Any) -> Any:
    accepted, read = _READERS[name]
    result = read(value)
    require(f"costs.{name}", repr(value)[:80], accepted, result is not None)
    return result


def _points(value: Any, minimum: int) -> Points | None:
    if not isinstance(value, Mapping) or len(value) < minimum:
        return None
    try:
        points = {int(nodes): _number(cost) for nodes, cost in value.items()}
    except (TypeError, ValueError):
        return None
    wrong = len(points) < len(value) or any(
        nodes < 1 or cost is None for nodes, cost in points.items()
    )
    return None if wrong else {nodes: cost for nodes, cost in points.items() if cost is not None}


def _number(value: Any) -> float | None:
    fits = type(value) in (int, float) and math.isfinite(value) and value >= 0
    return float(value) if fits else None


def _of(kind: type) -> Any:
    return lambda value: value if type(value) is kind else None


_COST_BY_NODES = "costs of 0 or more by nodes of 1 or more"
_WHOLE: tuple[str, Any] = (
    "a whole number of 0 or more",
    lambda value: value if type(value) is int and value >= 0 else None,
)
# Name of the field: accepted values, and a function that reads a JSON value and returns None if it does not fit.
_READERS: dict[str, tuple[str, Any]] = {
    "name": ("a text", _of(str)),
    "verify": (_COST_BY_NODES, lambda value: _points(value, 1)),
    "draft": (_COST_BY_NODES, lambda value: _points(value, 1)),
    "source": ("a text", _of(str)),
    "measured": ("true or false", _of(bool)),
    "overhead": ("0 or more", _number),
    "context": _WHOLE,
    "verify_growth": (_COST_BY_NODES, lambda value: _points(value, 0)),
    "draft_growth": (_COST_BY_NODES, lambda value: _points(value, 0)),
    "padded": ("true or false", _of(bool)),
    "chains": ("true or false", _of(bool)),
    "experts": ("numbers of experts by nodes of 1 or more", lambda value: _points(value, 0)),
    "all_experts": _WHOLE,
    "expert": ("0 or more", _number),
    "spread": ("0 or more by nodes of 1 or more", lambda value: _points(value, 0)),
    "load": ("0 or more", _number),
}
