"""Tables in markdown from result files, so that a figure in the docs is one that a committed file holds.

python -m bench.report bench/results/policies.jsonl [--only policies] [--set gsm8k]
python -m bench.report bench/results/kernels-gpu.jsonl --plot      the tables beside it as .md, a plot as .svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import device_tables, plots
from bench.plain_tables import plain_tables
from specengine.benchmark.report import not_run_table, source
from specengine.benchmark.report import tables as ways_of_bench
from specengine.benchmark.summaries import ALL, summaries
from specengine.benchmark.tables import NOTHING, Record, Table, number

KINDS = ("ways", "policies", "sweeps", "sets", "not-run", "losses", "construction", "graphs", "kernels", "plain")
POLICIES = "policies"  # the ways that stand in no sweep
TIMES = ("seconds", "median_ms", "policy_share")  # of a row of bench.policies


# ---------------------------------------------------------------------------------------------------- tables


def tables(records: Iterable[Record], set_: str = ALL) -> list[Table]:
    """All tables that the records of one file have rows for; summaries are made where a run was cut short."""
    records = list(records)
    if any(r["record"] == "way" and "places" not in r for r in records):  # of specengine bench
        return ways_of_bench(records, set_)
    if any(r["record"] == "row" and {"way", "set"} <= r.keys() for r in records) and not any(
        r["record"] == "summary" for r in records
    ):
        records += summaries(records)
    made = [
        *policy_tables(records, set_),
        *sweep_tables(records, set_),
        *set_tables(records),
        not_run_table(records),
        *loss_tables(records),
        *construction_tables(records),
        *device_tables.graph_tables(records),
        *device_tables.kernel_tables(records),
    ]
    return [table for table in made if table.rows]


Column = tuple[str, Callable[[Record], str]]
COUNTERS: list[Column] = [
    ("tau", lambda r: number(r, "tau", 2)),
    ("delta", lambda r: number(r, "delta", 2)),
    ("verified", lambda r: number(r, "verified", 1)),
    ("drafted", lambda r: number(r, "drafted", 1)),
    ("gamma", lambda r: f"{r['gamma']:,}" if "gamma" in r else NOTHING),
]
SPEEDS: list[Column] = [
    ("speed, mean", lambda r: number(r, "speed_mean", 2)),
    ("speed, total", lambda r: number(r, "speed_total", 2)),
]
COLUMNS: list[Column] = [
    *COUNTERS,
    ("draft ms", lambda r: number(r.get("median_ms", {}), "draft", 2)),
    ("policy ms", lambda r: number(r.get("median_ms", {}), "policy", 2)),
    ("verify ms", lambda r: number(r.get("median_ms", {}), "verify", 1)),
    ("policy share", lambda r: f"{100 * r['policy_share']:.1f} %" if "policy_share" in r else NOTHING),
    *SPEEDS,
    ("diverging", lambda r: f"{r['diverging']} of {r['prompts']}" if "diverging" in r else NOTHING),
]


def policy_tables(records: list[Record], set_: str = ALL) -> list[Table]:
    """A row per way: counters, times, speed over plain decoding, answers that differ from plain decoding's."""
    ways = _places(records).get(POLICIES, [])
    picked = _picked(records, set_)
    rows = [[way, *(show(picked[way]) for _, show in COLUMNS)] for way, _ in ways if way in picked]
    if all(way == "plain" for way, *_ in rows):
        return []
    return [Table("policies", _title("Policies", records, set_), ("policy", *(name for name, _ in COLUMNS)), rows)]


def sweep_tables(records: list[Record], set_: str = ALL) -> list[Table]:
    """A table per sweep, a row per value."""
    picked = _picked(records, set_)
    columns = [*COLUMNS[:-3], *SPEEDS, COLUMNS[-1]]
    made = []
    for group, members in _places(records).items():
        if group != POLICIES:
            rows = [[value, *(show(picked[way]) for _, show in columns)] for way, value in members if way in picked]
            made.append(
                Table(
                    "sweeps", _title(f"Sweep {group}", records, set_), ("value", *(name for name, _ in columns)), rows
                )
            )
    return made


def set_tables(records: list[Record]) -> list[Table]:
    """Speed over plain decoding (mean over prompts) and acceptance length of every way by set."""
    found = {(r["way"], r["set"]): r for r in records if r["record"] == "summary" and {"way", "set"} <= r.keys()}
    names = list(dict.fromkeys(name for _, name in found))
    if len(names) <= 2:  # one set and all of them
        return []
    rows = [
        [way, *(_cell(found[way, name], "speed_mean", "tau") if (way, name) in found else NOTHING for name in names)]
        for way in dict.fromkeys(way for way, _ in found)
    ]
    return [Table("sets", "By set: speed over plain decoding, mean of prompts (tau)", ("policy", *names), rows)]


def loss_tables(records: list[Record]) -> list[Table]:
    """From research.losses: a row per loss, a column per tree, each speed over plain decoding and acceptance length."""
    cells = {(r["loss"], r["tree"]): r for r in records if r["record"] == "cell"}
    trees = list(dict.fromkeys(tree for _, tree in cells))
    rows = [
        [
            loss,
            *(
                _cell(cells[loss, tree], "speedup_over_plain", "mean_acceptance_length")
                if (loss, tree) in cells
                else NOTHING
                for tree in trees
            ),
        ]
        for loss in dict.fromkeys(loss for loss, _ in cells)
    ]
    return [Table("losses", "Loss x tree: speed over plain decoding (tau)", ("loss", *trees), rows)]


def construction_tables(records: list[Record]) -> list[Table]:
    """From bench.tree_construction: median milliseconds and, in brackets, relative to the baseline, by input form."""
    cases = [r for r in records if r["record"] == "case"]
    made = []
    for given in dict.fromkeys(case["given"] for case in cases):
        own = [case for case in cases if case["given"] == given]
        header = ("V", "alpha", "parents", "repeats", *own[0]["median_ms"])
        rows = [
            [f"{case['vocabulary']:,}", str(case["alpha"]), str(case["parents"]), str(case["repeats"])]
            + [f"{ms:.3f} ({case['median_relative'][way]:.2f})" for way, ms in case["median_ms"].items()]
            for case in own
        ]
        title = f"One layer from {given}: median ms (relative to the first rule)"
        made.append(Table("construction", title, header, rows))
    return made


def _places(records: list[Record]) -> dict[str, list[tuple[str, str]]]:
    """Per group the (way, value) pairs in it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for record in records:
        if record["record"] == "way":
            for group, value in record["places"]:
                found.setdefault(group, []).append((record["way"], value))
    return found


def _picked(records: list[Record], set_: str) -> dict[str, Record]:
    return {r["way"]: r for r in records if r["record"] == "summary" and "way" in r and r.get("set") == set_}


def _title(what: str, records: list[Record], set_: str) -> str:
    settings = next((record for record in records if record["record"] == "settings"), None)
    title = f"{what}, {'all sets' if set_ == ALL else set_}"
    if settings is None:
        return title
    precision = settings["dtype"] + (", strict" if settings.get("strict") else "")
    run = f"temperature {settings['temperature']:g}, {settings['max_new_tokens']} tokens"
    return f"{title}; {settings['draft']}, {precision}, {run}"


def _cell(record: Record, speed: str, length: str) -> str:
    return f"{number(record, speed, 2)} ({number(record, length, 2)})"


# ---------------------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", type=Path, nargs="+", help="what a measurement wrote; where no table is known, its records are one"
    )
    parser.add_argument("--only", choices=KINDS, action="append", help="repeatable")
    parser.add_argument("--set", default=ALL, help="the prompt set of the policies' and the sweeps' tables")
    parser.add_argument("--plot", action="store_true", help="FILE.md and, of graphs and kernels, FILE.svg as well")
    args = parser.parse_args(argv)
    return max(_report(path, args) for path in args.files)


def _report(path: Path, args: argparse.Namespace) -> int:
    if not path.is_file():
        print(f"{path}: there is no such file", file=sys.stderr)
        return 1
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        print(f"{path}: it holds no records ({error})", file=sys.stderr)
        return 1
    made = tables(records, args.set)
    found = [table for table in made or plain_tables(records) if not args.only or table.kind in args.only]
    if not found:
        print(f"{path}: no table of it is among {', '.join(args.only or KINDS)}", file=sys.stderr)
        return 1
    text = "\n\n".join([source(path.name, records), *(table.markdown() for table in found)])
    print(text, end="\n\n")
    if args.plot:
        path.with_suffix(".md").write_text(text + "\n")
        print(plots.plot(records, path.with_suffix(".svg")), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
