"""Result files of bench/results as the pages read them, and tables that name their files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from specengine.benchmark.records import Record, Table
from specengine.benchmark.summaries import ALL

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
    """Return a table in markdown, with the files of its figures below it."""
    body = Table("", "", tuple(header), rows).markdown().partition("\n\n")[2]
    return f"{body}\n\n{source(*files)}"


def source(*files: str) -> str:
    """Return the files of the figures by machine and date."""
    by_origin: dict[str, list[str]] = {}
    for file in dict.fromkeys(files):
        origin = next(record for record in records(file) if record["record"] == "provenance")
        names = by_origin.setdefault(f"{machine(origin['device'])}, {origin['date']}", [])
        names.append(f"`bench/results/{file}`")
    return "<br>\n".join(
        f"<small>{', '.join(names)}: {origin}</small>" for origin, names in by_origin.items()
    )


def machine(device: str) -> str:
    """Return a device as the pages call it: without its trademarks, and with the cores that ran."""
    name = re.sub(r"\(R\)| Processor", "", device)
    return re.sub(r"\b(\d+) threads of \1 cores", r"\1 cores", name).replace(" threads of ", " of ")


def code(way: str) -> str:
    return f"`{way}`"


def summaries(file: str) -> dict[tuple[str, str], Record]:
    """Return the summaries of bench.policies by method and set."""
    return {
        (r["way"], r["set"]): r for r in records(file) if r["record"] == "summary" and "way" in r
    }


def means(file: str) -> dict[str, Record]:
    """Return the mean of the sets of bench.cpu's answers, by part."""
    return {
        r["part"]: r
        for r in records(file)
        if r["record"] == "summary" and r["set"] == "mean of the sets"
    }
