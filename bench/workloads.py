"""Prompts for the benchmarks: JSONL files, one per set, lines with `turns` (or `prompt`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Workload:
    """One prompt: the first user turn of a set's line."""

    set: str
    id: str
    text: str


def read(folder: Path | None, per_set: int) -> list[Workload]:
    """The first `per_set` prompts of every .jsonl file in `folder`; the built-in ones without a folder."""
    if folder is None:
        return [Workload("built-in", name, text) for name, text in list(BUILT_IN.items())[:per_set]]
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no .jsonl files in {folder}")
    return [item for path in files for item in _read_file(path)[:per_set]]


def _read_file(path: Path) -> list[Workload]:
    items = []
    for number, line in enumerate(path.read_text().splitlines()):
        entry = json.loads(line)
        text = entry["turns"][0] if "turns" in entry else entry["prompt"]
        items.append(Workload(path.stem, str(entry.get("question_id", number)), text))
    return items
