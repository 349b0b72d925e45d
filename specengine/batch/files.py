"""The file of answers and, beside it, what they are of and what was measured; both go on where they broke off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from specengine.batch.answering import Answered
from specengine.batch.lines import Item
from specengine.errors import InputError
from specengine.files import atomic, require_same, unwritable

Record = dict[str, Any]


class Files:
    """Appends answers in the order of the prompts.

    The statistics of an answer are written before it: what is behind the last whole line of either file is cut off
    when they are opened, and answered again. Used as a context manager; one process at a time holds it.

    done, failures   whole answers in the file, and how many of them are errors
    """

    def __init__(self, out: Path, items: Sequence[Item], provenance: Record, settings: Record) -> None:
        self.out, self.stats = out, beside(out)
        self.done = self.failures = 0
        self._items = items
        self._head: list[Record] = json.loads(json.dumps([provenance, settings]))  # as they come back from a file
        self._lock = FileLock(out.with_name(f".{out.name}.lock"))
        self._handles: list[BinaryIO] = []

    def __enter__(self) -> Files:
        """Raise InputError for files of another run, in use, or not writable."""
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise InputError(f"out: another process is writing {self.out}") from error
        except OSError as error:
            raise unwritable(self.out, error) from error
        try:
            self._open()
        except OSError as error:
            self.close()
            raise unwritable(self.out, error) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for handle in self._handles:
            handle.close()
        self._lock.release()

    def loaded(self, facts: Record) -> None:
        """Record an engine's facts before its first answer; InputError where earlier answers are another one's."""
        facts = json.loads(json.dumps({"record": "engine", **facts}))
        if len(self._head) > 2:
            require_same("engine", self.out, self._head[2], facts, tuple(self._head[2] | facts))
        else:
            self._head.append(facts)
            self._append(1, facts)

    def add(self, answered: Answered) -> None:
        """Add the next answer. It is on disk before this returns."""
        assert answered.place == self.done
        item = self._items[answered.place]
        self._append(1, {"record": "answer", "id": item.id, "seed": item.options["seed"], "stats": answered.stats})
        self._append(0, answered.line)
        self.done += 1
        self.failures += answered.failed

    def _append(self, which: int, record: Record) -> None:
        try:
            self._handles[which].write(_line(record))
        except OSError as error:
            raise unwritable((self.out, self.stats)[which], error) from error

    def _open(self) -> None:
        answers, stats = (_whole_lines(file) for file in (self.out, self.stats))
        if not stats:
            if answers:
                raise InputError(f"out: {self.out} exists without {self.stats}; name another file")
            with atomic(self.stats) as part:
                part.write_bytes(b"".join(map(_line, self._head)))
        else:
            self._resume(answers, stats)
        for file, lines in ((self.out, self.done), (self.stats, len(self._head) + self.done)):
            _cut(file, lines)
            self._handles.append(file.open("ab", buffering=0))

    def _resume(self, answers: list[bytes], stats: list[bytes]) -> None:
        settings, head = self._head[1], [_parsed(line) for line in stats[:3]]
        kinds = [record.get("record") for record in head]
        if kinds[:2] != ["provenance", "settings"] or kinds[2:] not in ([], ["engine"]):
            raise InputError(f"out: {self.stats} was not written by `specengine batch`; name another file")
        require_same("settings", self.out, head[1], settings, tuple(head[1] | settings))
        self._head = head
        self.done = min(len(answers), len(stats) - len(head))
        for item, line in zip(self._items, answers[: self.done], strict=False):
            answer = _parsed(line)
            if item.id not in (answer.get("id"), answer.get("custom_id")):
                raise InputError(f"out: {self.out} has another answer where that to {item.id!r} belongs")
            self.failures += bool(answer.get("error"))


def beside(out: Path) -> Path:
    """Return the file of the figures."""
    return out.with_name(f"{out.stem}.stats{out.suffix}")


def _line(record: Record) -> bytes:
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _parsed(line: bytes) -> Record:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _whole_lines(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []


def _cut(file: Path, lines: int) -> None:
    """Keep the first so many lines of a file, which is created where it is missing."""
    file.open("ab").close()
    with file.open("r+b") as handle:
        for _ in range(lines):
            handle.readline()
        handle.truncate(handle.tell())
