"""The result files in bench/results as the pages read them, and a table with the files that it is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from specengine.benchmark.summaries import ALL
from specengine.benchmark.tables import Record, Table

RESULTS = Path(__file__).parents[2] / "bench" / "results"
SETS = {
    "alpaca": "Alpaca",
    "cnn_dm": "CNN/DM",
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
    "mt_bench": "MT-bench",
    "qa": "QA",
    ALL: "all",
}


def records(file: str) -> list[Record]:
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


def table(header: Sequence[str], rows: list[list[str]], *files: str) -> str:
    """A table in markdown, and below it the files that it is made of."""
    made = Table("", "", tuple(header), rows).markdown().partition("\n\n")[2]
    return f"{made}\n\n{source(*files)}"


def source(*files: str) -> str:
    """Where figures come from: file, machine, date."""
    lines = []
    for file in dict.fromkeys(files):
        origin = next(record for record in records(file) if record["record"] == "provenance")
        lines.append(f"<small>`bench/results/{file}`: {origin['device']}, {origin['date']}</small>")
    return "<br>\n".join(lines)


def code(way: str) -> str:
    return f"`{way}`"


def summaries(file: str) -> dict[tuple[str, str], Record]:
    """The summaries of bench.policies by way and set."""
    return {(r["way"], r["set"]): r for r in records(file) if r["record"] == "summary" and "way" in r}


def means(file: str) -> dict[str, Record]:
    """Of bench.cpu's answers, by part: the mean of the sets."""
    return {r["part"]: r for r in records(file) if r["record"] == "summary" and r["set"] == "mean of the sets"}
