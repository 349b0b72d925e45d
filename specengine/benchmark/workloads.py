"""Prompts of a benchmark: sets from JSONL files like Spec-Bench's and SPEED-Bench's, or the small sets that ship."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specengine.errors import InputError, require, require_input
from specengine.files import lines_of

BUILT_IN = Path(__file__).parent / "built_in"  # written for this project
FILE = "file"
# in the place of prompts that SPEED-Bench may not hand on: its own script fetches them
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True)
class Workload:
    """One conversation of a set: the user's turns."""

    set: str
    id: str
    turns: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.turns[0]


def read(
    places: Iterable[Path] | None, per_set: int | None = None, *, set_by: str = FILE
) -> list[Workload]:
    """Return the first `per_set` conversations of every set, None for all; of the shipped sets without `places`.

    places: .jsonl files, and folders of such. A line is a string, {"prompt": ...}, {"turns": [...]} or
    {"messages": [...]}, whose user's turns are asked, with `question_id`, `category`, `sub_category` and `difficulty`
    where there are any. set_by: FILE, or the field of a line that names its set; lines without it are a set of their
    file's.
    InputError for what cannot be read as such.
    """
    files = (
        [file for place in places for file in _files(place)]
        if places is not None
        else _files(BUILT_IN)
    )
    by_set: dict[str, list[Workload]] = {}
    for file in files:
        for item in _items(file, set_by):
            by_set.setdefault(item.set, []).append(item)
    for name, items in by_set.items():
        ids = [item.id for item in items]
        if doubled := next((id_ for id_ in ids if ids.count(id_) > 1), None):
            raise InputError(f"prompts: set {name} holds question_id {doubled} twice")
    return [item for items in by_set.values() for item in items[:per_set]]


def digest(items: Sequence[Workload]) -> str:
    return hashlib.sha256(
        json.dumps([[item.set, item.id, *item.turns] for item in items]).encode()
    ).hexdigest()[:16]


def entry_of(line: str, where: str) -> dict[str, Any]:
    """Return a line of JSON with its `turns`, a list of strings; InputError names the place."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"prompts: {where} is not JSON ({error})") from error
    fields = entry if isinstance(entry, dict) else {"turns": entry}
    stated = fields.get("turns", fields.get("prompt", _of_user(fields.get("messages"))))
    turns = [stated] if isinstance(stated, str) else stated
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn for turn in turns)
    ):
        raise InputError(
            f'prompts: {where} is neither a string nor an object with "prompt", "turns" or "messages"'
        )
    require_input(
        f"prompts: {where} has a note in the place of a prompt; fetch the prompts with the script that comes with "
        "the data set, or leave such lines out",
        not any(turn.startswith(MASKED) for turn in turns),
    )
    return {**fields, "turns": turns}


def _of_user(messages: Any) -> Any:
    """Return the texts of the user's messages; what is no list of messages as it is."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages
    return [message.get("content") for message in messages if message.get("role") == "user"]


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        require(
            "prompts",
            str(place),
            "a .jsonl file or a folder of such files",
            place.suffix == ".jsonl",
        )
        return [place]
    files = sorted(place.glob("*.jsonl"))
    require_input(f"prompts: {place} has no .jsonl file", bool(files))
    return files


def _items(file: Path, set_by: str) -> list[Workload]:
    numbered = [(number, line) for number, line in enumerate(lines_of(file)) if line.strip()]
    entries = [(number, entry_of(line, f"{file}, line {number + 1}")) for number, line in numbered]
    require_input(f"prompts: {file} has no prompts", bool(entries))
    return [
        Workload(
            str(entry.get(set_by, file.stem)),
            str(entry.get("question_id", number)),
            tuple(entry["turns"]),
        )
        for number, entry in entries
    ]
