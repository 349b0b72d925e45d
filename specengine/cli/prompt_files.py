"""Files of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from specengine.errors import InputError

Turns = Sequence[str]
FORMATS = '.txt: a prompt per line; .jsonl: per line a string, {"prompt": ...} or {"turns": [...]}'


def read_prompts(file: Path) -> Iterator[Turns]:
    """The user's turns of each conversation in `file`; InputError for what cannot be read as such."""
    if file.suffix not in (".txt", ".jsonl"):
        raise InputError(f"prompts: got {file}, accepted a .txt or a .jsonl file")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts: {file} cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield [line] if file.suffix == ".txt" else _turns(line, f"{file}, line {number}")


def _turns(line: str, where: str) -> Turns:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"prompts: {where} is no JSON ({error})") from error
    if isinstance(entry, dict):
        entry = entry.get("turns", entry.get("prompt"))
    turns = [entry] if isinstance(entry, str) else entry
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise InputError(f'prompts: {where} is neither a string nor an object with "prompt" or "turns"')
    return turns
