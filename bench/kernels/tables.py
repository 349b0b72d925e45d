"""Tables of kernels compared with alternatives and with their goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specengine.benchmark.records import NOTHING, Record, Table, number

OURS = "specengine"  # of the kernels' ways; those whose names only begin with it are ours too, and no baselines
LABELS: dict[str, Callable[[Record], str]] = {
    "attention": lambda r: (
        f"{r['nodes']} x {r['prefix']:,} slots, {r['heads']}/{r['kv_heads']} heads of {r['size']}"
    ),
    "selection": lambda r: (
        f"{r['rows']} x {r['columns']:,}, best {r['most']}{', gated' if r['gated'] else ''}"
    ),
    "compaction": lambda r: f"{r['layers']} layers, {r['kept']} nodes",
    "choice": lambda r: f"{r['nodes']} x {r['columns']:,}{', sampled' if r['sampled'] else ''}",
    "search": lambda r: f"budget {r['budget']}, batch {r['batch']}",
    "rule": lambda r: f"{r['rows']} x {r['columns']:,}, {r['nodes']} nodes",
}


@dataclass(frozen=True)
class Goal:
    """A goal for a kernel in the cases whose fields have these values.

    most: microseconds, from a row with its floors and the launch floor; over: the least ratios of other ways' times to
    ours.
    """

    kind: str
    where: Mapping[str, tuple[object, ...]]
    most: Callable[[Record, float], float]
    over: dict[str, float] = field(default_factory=dict)


def floors(times: float) -> Callable[[Record, float], float]:
    return lambda row, _: times * max(row["bytes_us"], row["operations_us"])


def microseconds(most: float) -> Callable[[Record, float], float]:
    return lambda *_: most


EFFICIENT, FLEX, FA2, XQA = "torch sdpa efficient", "torch flex", "flashinfer fa2", "flashinfer xqa"
NARROW = {EFFICIENT: 3.0, FLEX: 1.5, FA2: 1.5, XQA: 1.2}
MIDDLE = {EFFICIENT: 3.0, FLEX: 2.0, XQA: 1.7}
SDPA = {f"torch sdpa {name}": 4.0 for name in ("math", "efficient", "cudnn")}
EAGLES = "eagle's torch operations"
# heads of an 8B model; logits are warm, as they stand where a selection or a choice follows the layer that wrote them
LLAMA, WARM = {"heads": (32,)}, {"cache": ("warm",)}
GOALS = [
    Goal("attention", LLAMA | {"nodes": (1, 16, 32), "prefix": (4096,)}, floors(2.0), NARROW),
    Goal("attention", LLAMA | {"nodes": (1, 16, 32), "prefix": (16384,)}, floors(1.35), NARROW),
    Goal("attention", LLAMA | {"nodes": (1, 16, 32), "prefix": (32768,)}, floors(1.25), NARROW),
    Goal("attention", LLAMA | {"nodes": (64,), "prefix": (4096,)}, floors(2.8), MIDDLE),
    Goal("attention", LLAMA | {"nodes": (64,), "prefix": (16384,)}, floors(2.2), MIDDLE),
    Goal("attention", LLAMA | {"nodes": (64,), "prefix": (512,)}, microseconds(7.0), SDPA),
    Goal("attention", LLAMA | {"nodes": (256,)}, floors(2.2), {FA2: 1.5, FLEX: 3.0}),
    Goal("selection", WARM | {"rows": (10,), "columns": (128256,)}, lambda _, launch: min(8.0, 3 * launch + 3.0),
         {EAGLES: 10.0, "flashinfer softmax, top_k": 3.0}),
    Goal("selection", WARM | {"rows": (64,), "columns": (128256,)}, microseconds(15.0), {EAGLES: 6.0}),
    Goal("search", {}, microseconds(4.0), {"C++ on the host, and the copies": 5.0}),
    Goal("rule", WARM | {"rows": (7,), "columns": (32000,)}, microseconds(15.0)),
    Goal("choice", WARM | {"nodes": (64,), "columns": (128256,), "sampled": (False,)},
         lambda row, _: min(9.0, 2 * row["bytes_us"] + 4.0), {"torch argmax, no walk, eager": 3.0}),
    Goal("choice", WARM | {"nodes": (64,), "columns": (128256,), "sampled": (True,)}, microseconds(16.0)),
    Goal("compaction", {"layers": (32,)}, microseconds(4.0), {"torch, each layer": 40.0}),
]  # fmt: skip


def kernel_tables(records: list[Record]) -> list[Table]:
    """Make the tables of bench.kernels: one per kernel, a row per case, a column per way; last, failures."""
    launch = next(
        (record["median"] for record in records if record["record"] == "launch floor"), None
    )
    own = [record for record in records if record["record"] in LABELS and "way" in record]
    made = []
    for kind, label in LABELS.items():
        cases: dict[tuple[str, str], dict[str, Record]] = {}
        for record in own:
            if record["record"] == kind:
                cases.setdefault((label(record), record["cache"]), {})[record["way"]] = record
        ways = list(dict.fromkeys(way for found in cases.values() for way in found))
        rows = [
            [
                case,
                cache,
                _floor(found),
                *(_time(found.get(way, {})) for way in ways),
                *_judged(found, launch),
            ]
            for (case, cache), found in cases.items()
        ]
        header = (
            "case",
            "cache",
            "floor",
            *ways,
            "ours over floor",
            "best other over ours",
            "goal",
        )
        title = f"{kind.capitalize()}: microseconds per call" + (
            f"; a launch is {launch:.2f}" if launch else ""
        )
        made.append(Table("kernels", title, header, rows))
    return [*made, _not_measured(own)]


def _time(record: Record) -> str:
    return "wrong" if "wrong" in record else number(record, "median", 1)


def _floor_of(found: dict[str, Record]) -> float | None:
    record = next(iter(found.values()))
    return max(record["bytes_us"], record["operations_us"]) if "bytes_us" in record else None


def _floor(found: dict[str, Record]) -> str:
    floor = _floor_of(found)
    return NOTHING if floor is None else f"{floor:.1f}"


def _judged(found: dict[str, Record], launch: float | None) -> list[str]:
    """Return our time over the floor, the best baseline over ours, and whether the goal is met."""
    if "median" not in found.get(OURS, {}):
        return [NOTHING, NOTHING, "missed: wrong" if "wrong" in found.get(OURS, {}) else NOTHING]
    ours, floor = found[OURS]["median"], _floor_of(found)
    others = {
        way: r["median"] for way, r in found.items() if "median" in r and not way.startswith(OURS)
    }
    best = min(others, key=others.__getitem__, default=None)
    return [
        f"{ours / floor:.2f}" if floor else NOTHING,
        f"{others[best] / ours:.2f} ({best})" if best else NOTHING,
        _goal(found[OURS], others, launch),
    ]


def _goal(row: Record, others: dict[str, float], launch: float | None) -> str:
    goals = (goal for goal in GOALS if goal.kind == row["record"])
    goal = next(
        (g for g in goals if all(row[name] in values for name, values in g.where.items())), None
    )
    if goal is None:
        return NOTHING
    missed, unknown = [], [way for way in goal.over if way not in others]
    if "bytes_us" in row and launch is not None:
        most = goal.most(row, launch)
        missed += [f"{row['median']:.1f} > {most:.1f}"] if row["median"] > most else []
    else:
        unknown.append("floors")
    for way, least in goal.over.items():
        ratio = others.get(way, float("inf")) / row["median"]
        missed += [f"{ratio:.2f} < {least:g} x {way}"] if ratio < least else []
    if missed:
        return "missed: " + "; ".join(missed)
    return "met" + (f", without {', '.join(unknown)}" if unknown else "")


def _not_measured(rows: list[Record]) -> Table:
    """List ways that could not be measured, how often and why; of reasons that differ in numbers only, the first."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if "wrong" in row:
            found.setdefault((row["record"], row["way"], "wrong result"), []).append(
                f"error {row['wrong']:.2g}"
            )
        elif "skipped" in row:
            alike = "".join(letter for letter in row["skipped"] if not letter.isdigit())
            found.setdefault((row["record"], row["way"], alike), []).append(row["skipped"])
    lines = [
        [kind, way, str(len(reasons)), " ".join(reasons[0].replace("|", "/").split())]
        for (kind, way, _), reasons in found.items()
    ]
    return Table("kernels", "Not measured", ("kernel", "way", "cases", "reason"), lines)
