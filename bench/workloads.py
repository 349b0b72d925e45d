"""Prompts for the benchmarks: the first turns of the conversations in JSONL files, one per set."""

from __future__ import annotations

from pathlib import Path

from specengine.benchmark import workloads
from specengine.benchmark.workloads import Workload as Workload

# For runs without a folder of prompts; written for this project.
BUILT_IN = {
    "edit": "Correct the spelling and repeat the whole text: The libary was quiet on monday. The librarian put the "
    "returned books on the cart, then the librarian put the cart in front of the shelves, and then the libary closed.",
    "code": "Rename the variable x to total and repeat the whole function:\n\ndef add_all(values):\n    x = 0\n"
    "    for value in values:\n        x = x + value\n    return x\n",
    "list": "List the days of the week with a sentence about each.",
    "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "sums": "A baker sells 12 loaves in the morning and 3 times as many in the afternoon. How many in the whole day?",
}


def read(folder: Path | None, per_set: int) -> list[Workload]:
    """Return the first `per_set` prompts of every .jsonl file in `folder`, or the built-in ones without a folder."""
    if folder is None:
        return [
            Workload("built-in", name, (text,)) for name, text in list(BUILT_IN.items())[:per_set]
        ]
    return workloads.read([folder], per_set)
