"""Print markdown tables of result files, so that every figure in the docs comes from a committed file.

Any result file can be printed: kinds of records without a table of their own become one with a column per field.

python -m bench.report bench/results/policies-bfloat16.jsonl [--only policies] [--set gsm8k]
python -m bench.report bench/results/replay-sweeps.jsonl --rows 0  every record and field, not the first 40 and 14
python -m bench.report bench/results/kernels-gpu.jsonl --plot      the tables beside it as .md, a plot as .svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import plots
from bench.kernels.tables import LABELS, kernel_tables
from bench.plain_tables import MAX_ROWS, plain_tables
from bench.tree_construction import USED
from specengine.benchmark import report as of_bench
from specengine.benchmark.records import NOTHING, Record, Table, number
from specengine.benchmark.report import (
    Columns,
    about,
    difference_table,
    not_run_table,
    rows_of,
    set_table,
    share,
    source,
)
from specengine.benchmark.summaries import ALL, summaries
from specengine.errors import InputError

KINDS = (
    "ways",
    "policies",
    "sweeps",
    "differences",
    "sets",
    "not-run",
    "losses",
    "construction",
    "kernels",
    "claims",
    "sets-of-rows",
    "plain",
)
POLICIES = "policies"  # the ways that stand in no sweep
# of the tables below, and of what these are summed up from; other kinds become plain tables
OF_TABLES = (
    "claim",
    "set",
    "row",
    "answer",
    "summary",
    "not run",
    "cell",
    "case",
    "host waits",
    "launch floor",
    *LABELS,
)
# cases of the table by vocabulary
SHOWN = {"alpha": 1.35, "parents": 10, "given": "float32 logits"}
TIMES = ("seconds", "median_ms", "policy_share")  # of a row of bench.policies

COLUMNS: dict[str, Callable[[Record], str]] = {
    "tau": lambda r: number(r, "tau", 2),
    "delta": lambda r: number(r, "delta", 2),
    "verified": lambda r: number(r, "verified", 1),
    "drafted": lambda r: number(r, "drafted", 1),
    "gamma": lambda r: f"{r['gamma']:,}" if "gamma" in r else NOTHING,
    "draft ms": lambda r: number(r.get("median_ms", {}), "draft", 2),
    "policy ms": lambda r: number(r.get("median_ms", {}), "policy", 2),
    "verify ms": lambda r: number(r.get("median_ms", {}), "verify", 1),
    "policy share": lambda r: share(r, "policy_share"),
    "speed, mean": lambda r: number(r, "speed_mean", 2),
    "speed, total": lambda r: number(r, "speed_total", 2),
    "diverging": lambda r: f"{r['diverging']} of {r['prompts']}" if "diverging" in r else NOTHING,
}
ON_A_DEVICE: Columns = {  # of bench.graphs
    "over transformers": lambda r: (
        f"{r['over_transformers']:.2f}" if "over_transformers" in r else ""
    ),
    "over captured plain": lambda r: (
        f"{r['over_captured_plain']:.2f}" if "over_captured_plain" in r else ""
    ),
    "host waits": lambda r: str(r.get("host_waits", "")),
}


# ---------------------------------------------------------------------------------------------------- tables


def tables(records: Iterable[Record], set_: str = ALL) -> list[Table]:
    """Return all tables of the records of one file. Summaries of an interrupted run are computed."""
    records = list(records)
    if any(r["record"] == "way" and "places" not in r for r in records):  # of specengine bench
        beside = [
            table
            for table in (claim_table(records), *set_tables(records), *construction_tables(records))
            if table.rows
        ]
        return [*beside, *of_bench.tables(records, set_)]
    if any(r["record"] == "row" and {"way", "set"} <= r.keys() for r in records) and not any(
        r["record"] == "summary" for r in records
    ):
        records += summaries(records)
    by_way = [r for r in records if r["record"] == "summary" and {"way", "set"} <= r.keys()]
    made = [
        claim_table(records),
        *set_tables(records),
        *policy_tables(records, by_way, set_),
        difference_table(
            [
                r
                for r in records
                if r["record"] != "row" or {"way", "set", "id", "new_tokens"} <= r.keys()
            ]
        ),
        set_table(
            by_way,
            "By set [prompts]: speed over plain decoding, mean of prompts (tau)",
            _speed_and_tau,
        ),
        not_run_table(records),
        *loss_tables(records),
        *construction_tables(records),
        *kernel_tables(records),
    ]
    return [table for table in made if table.rows]


def claim_table(records: Iterable[Record]) -> Table:
    """Return the table of bench.papers: a row per claim of a paper, and what each took."""
    claims = [record for record in records if record["record"] == "claim"]
    rows = [
        [
            *(r[name] for name in ("paper", "claim", "published", "ours", "verdict")),
            f"{r['seconds']:.0f}",
            r["by"],
        ]
        for r in claims
    ]
    title = f"Claims of the papers, {sum(r['seconds'] for r in claims):.0f} s"
    return Table(
        "claims", title, ("paper", "claim", "published", "here", "verdict", "s", "by itself"), rows
    )


def set_tables(records: Iterable[Record]) -> list[Table]:
    """Return a table per set of rows of bench.papers."""
    return [
        Table(
            "sets-of-rows",
            f"Rows {r['set']}, {r['seconds']:.0f} s",
            tuple(r["rows"][0]) if r["rows"] else ("nothing",),
            [[_figure(value) for value in row.values()] for row in r["rows"]],
        )
        for r in records
        if r["record"] == "set"
    ]


def _figure(value: Any) -> str:
    """Return a figure, one with its interval, or one of each under its name."""
    if isinstance(value, dict):
        return "; ".join(f"{name} {_figure(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "{:.2f} ({:.2f} to {:.2f})".format(*value)
    return NOTHING if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def policy_tables(records: list[Record], found: list[Record], set_: str = ALL) -> list[Table]:
    """Return a table of the policies, a row per way, and a table per sweep, a row per value."""
    picked = {record["way"]: record for record in found if record["set"] == set_}
    places: dict[str, list[tuple[str, str]]] = {}
    for record in records:
        for group, value in record.get("places", ()) if record["record"] == "way" else ():
            places.setdefault(group, []).append((record["way"], value or record["way"]))
    for record in records:
        if record["record"] == "host waits" and record["way"] in picked and "calls" in record:
            picked[record["way"]] = picked[record["way"]] | {
                "host_waits": sum(record["calls"].values())
            }
    columns = COLUMNS | {
        name: cell for name, cell in ON_A_DEVICE.items() if any(map(cell, picked.values()))
    }
    asked = f"{'all sets' if set_ == ALL else set_}; {about(records)}" if places else ""
    made = []
    for group, labels in places.items():
        rows = rows_of(picked, labels, columns)
        if group != POLICIES:
            made.append(Table("sweeps", f"Sweep {group}, {asked}", ("value", *columns), rows))
        elif [label for label, *_ in rows] != ["plain"]:
            made.append(Table("policies", f"Policies, {asked}", ("policy", *columns), rows))
    return made


def _speed_and_tau(record: Record) -> str:
    return _cell(record, "speed_mean", "tau")


def loss_tables(records: list[Record]) -> list[Table]:
    """Make the tables of research.losses: a row per loss, a column per tree; speed over plain and acceptance length."""
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
    """Make the tables of bench.tree_construction: by vocabulary, then median ms (over the first rule's)."""
    cases = [r for r in records if r["record"] == "case"]
    made = [by_vocabulary(records)]
    for given in dict.fromkeys(case["given"] for case in cases):
        own = [case for case in cases if case["given"] == given]
        header = ("V", "alpha", "parents", "repeats", *own[0]["median_ms"])
        rows = [
            [
                f"{case['vocabulary']:,}",
                str(case["alpha"]),
                str(case["parents"]),
                str(case["repeats"]),
            ]
            + [
                f"{ms:.3f} ({case['median_relative'][way]:.2f})"
                for way, ms in case["median_ms"].items()
            ]
            for case in own
        ]
        title = f"One layer from {given}: median ms (relative to the first rule)"
        made.append(Table("construction", title, header, rows))
    return made


def by_vocabulary(records: list[Record]) -> Table:
    """Make the table of each rule by vocabulary: a layer of 10 parents, float32 logits with Zipf's exponent 1.35."""
    settings = next((r for r in records if r["record"] == "settings" and "backends" in r), {})
    cycles = settings.get("cycles", {})
    rows = [
        [
            f"{case['vocabulary']:,}",
            way,
            f"{ms:.3f}",
            f"{1000 * ms / case['vocabulary']:.4f}",
            *(f"{100 * ms / cycle['ms']:.1f} %" for cycle in cycles.values()),
        ]
        for case in records
        if case["record"] == "case"
        and tuple(case.get(name) for name in SHOWN) == tuple(SHOWN.values())
        for way, ms in case["median_ms"].items()
    ]
    shares = (f"of a cycle, {model} ({c['ms']:.1f} ms)" for model, c in cycles.items())
    title = f"One layer by vocabulary; ops ran in {ran_by(settings)}"
    return Table("construction", title, ("V", "rule", "ms", "ms per 1,000 tokens", *shares), rows)


def ran_by(settings: Record) -> str:
    """Return what ran the ops of tree construction: the backends, and the ops that had none."""
    backends = {op: name for op, name in settings.get("backends", {}).items() if op in USED}
    compiled = sorted({name for name in backends.values() if name != "reference"})
    slow = [op for op, name in backends.items() if name == "reference"]
    return ", ".join(compiled) + (f"; in torch: {', '.join(slow)}" if slow else "")


def _cell(record: Record, speed: str, length: str) -> str:
    return f"{number(record, speed, 2)} ({number(record, length, 2)})"


# ---------------------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        help="result files; records without a table of their own become one",
    )
    parser.add_argument("--only", choices=KINDS, action="append", help="repeatable")
    parser.add_argument(
        "--set", default=ALL, help="the prompt set of the policies' and the sweeps' tables"
    )
    parser.add_argument(
        "--rows", type=int, default=MAX_ROWS, help="of tables without a form of their own; 0: all"
    )
    parser.add_argument(
        "--plot",
        action="store_true",
        help="FILE.md and, of ways, kernels and trees, FILE.svg as well",
    )
    args = parser.parse_args(argv)
    if args.rows < 0:
        parser.error(f"--rows: got {args.rows}, accepted 0 or more")
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
    made += plain_tables(records, args.rows, OF_TABLES if made else ())
    found = [table for table in made if not args.only or table.kind in args.only]
    if not found:
        print(f"{path}: no table of it is among {', '.join(args.only or KINDS)}", file=sys.stderr)
        return 1
    text = "\n\n".join([source(path.name, records), *(table.markdown() for table in found)])
    print(text, end="\n\n")
    if args.plot:
        path.with_suffix(".md").write_text(text + "\n")
        try:
            plots.draw(records, path.with_suffix(".svg"))
        except InputError as error:
            print(f"{path}: not drawn ({error})", file=sys.stderr)
        else:
            print(f"{path.with_suffix('.svg')}: drawn", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
