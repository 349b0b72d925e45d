"""Files of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from specengine.benchmark.workloads import entry_of
from specengine.errors import InputError
from specengine.files import lines_of

Turns = Sequence[str]


def read_prompts(file: Path) -> Iterator[Turns]:
    """The user's turns of each conversation in `file`; InputError for what cannot be read as such."""
    if file.suffix not in (".txt", ".jsonl"):
        raise InputError(f"prompts: got {file}, accepted a .txt or a .jsonl file")
    for number, line in enumerate(lines_of(file), start=1):
        if line.strip():
            yield [line] if file.suffix == ".txt" else entry_of(line, f"{file}, line {number}")["turns"]
