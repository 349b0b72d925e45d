"""The file of answers with the file of figures, which continue where they broke off; or a stream of answers alone."""

import errno
import json
import os
import re
import select
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from specengine.batch.answering import Answered, failed
from specengine.batch.lines import Item
from specengine.errors import InputError, require_input
from specengine.files import require_same, unwritable

Record = dict[str, Any]

READER_SECONDS = 10.0  # to wait for the reader of a named pipe
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_STANDARD = {"-": 1, "/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_NO_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
_NO_LOCKS = {*_NO_SYNC, errno.ENOLCK}
_PROVENANCE = b'{"record": "provenance"'


class Lines:
    """An open file that takes whole lines. After an error a regular file ends with its last whole line."""

    def __init__(self, handle: BinaryIO) -> None:
        self.handle = handle
        self._regular = stat.S_ISREG(os.fstat(handle.fileno()).st_mode)

    def cut(self, length: int) -> None:
        """Keep the first `length` bytes, and write after them."""
        self.handle.truncate(length)
        self.handle.seek(length)

    def append(self, record: Record) -> None:
        """Write one line. OSError where it cannot be written."""
        size = os.fstat(self.handle.fileno()).st_size
        data = memoryview(_line(record))
        try:
            while data:
                if written := self.handle.write(data):
                    data = data[written:]
                else:  # of a stream that does not wait
                    select.select([], [self.handle], [])
        except BaseException:
            if self._regular:
                self.cut(size)
            raise

    def close(self) -> None:
        """Write to the disk what the system holds back, and close. OSError where that fails."""
        with self.handle:
            try:
                os.fsync(self.handle.fileno())
            except OSError as error:
                if self._regular and error.errno not in _NO_SYNC:
                    raise


class Stream:
    """Writes answers, in the order of the prompts, to a pipe, a device or an open descriptor. Nothing continues it.

    done, failures  answers written, and how many of them are errors
    """

    remedy = "nothing continues a stream"

    def __init__(self, out: Path, items: Sequence[Item]) -> None:
        self.out = out
        self.done = self.failures = 0
        self._items = items
        self._opened: dict[Path, Lines] = {}

    def __str__(self) -> str:
        return str(self.out)

    def __enter__(self) -> Self:
        """Raise InputError for an output that is in use, not writable, or of another run. It stays as it is."""
        try:
            self._open()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise unwritable(self.out, error) from error
            raise
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        problem = self._close()
        if problem is not None and kind is None:
            raise problem

    def loaded(self, facts: Record) -> None:
        """Take the facts of an engine before its first answer."""

    def add(self, answered: Answered) -> None:
        """Append the next answer. InputError where it cannot be written, and then no part of it counts."""
        assert answered.place == self.done
        self._append(self.out, answered.line)
        self.done += 1
        self.failures += answered.failed

    def _append(self, file: Path, record: Record) -> None:
        try:
            self._opened[file].append(record)
        except OSError as error:
            missing = (
                f"the answer to {self._items[self.done].id!r} is missing (line {self.done + 1})"
            )
            raise InputError(f"{unwritable(file, error)}: {missing}; {self.remedy}") from error

    def _open(self) -> None:
        self._opened[self.out] = _stream(self.out)

    def _close(self) -> InputError | None:
        """Close all files. Return the first error."""
        problem = None
        for file, lines in self._opened.items():
            try:
                lines.close()
            except OSError as error:
                problem = problem or unwritable(file, error)
        self._opened.clear()
        return problem


class Files(Stream):
    """Appends answers in the order of the prompts.

    The statistics of an answer are written before it. Bytes after the last whole line of either file are cut off
    when they are opened, and answered again. Used as a context manager; one process at a time holds the files, by
    whatever name.

    inputs  files that are read, which the output is never
    """

    remedy = "the same command continues from there"

    def __init__(
        self,
        out: Path,
        items: Sequence[Item],
        provenance: Record,
        settings: Record,
        inputs: Sequence[Path] = (),
    ) -> None:
        super().__init__(out, items)
        self.stats = beside(out)
        self._inputs = inputs
        # as they come back from a file
        self._head: list[Record] = json.loads(json.dumps([provenance, settings]))

    def __str__(self) -> str:
        return f"{self.out}, figures in {self.stats}"

    def loaded(self, facts: Record) -> None:
        """Record an engine's facts before its first answer; InputError where earlier answers are another one's."""
        facts = json.loads(json.dumps({"record": "engine", **facts}))
        if len(self._head) > 2:
            require_same("engine", self.out, self._head[2], facts, tuple(self._head[2] | facts))
        else:
            self._head.append(facts)
            self._append(self.stats, facts)

    def add(self, answered: Answered) -> None:
        item = self._items[answered.place]
        self._append(
            self.stats,
            {
                "record": "answer",
                "id": item.id,
                "seed": item.options["seed"],
                "stats": answered.stats,
            },
        )
        super().add(answered)

    def _open(self) -> None:
        both = (self.out, self.stats)
        inputs = [file for file in self._inputs if os.path.isfile(file)]
        if same := [
            file
            for file in both
            for other in inputs
            if os.path.exists(file) and file.samefile(other)
        ]:
            raise InputError(f"out: {same[0]} is the file of prompts; name another file")
        lengths = self._resume(*map(self._read, both))
        for file, length in zip(both, lengths, strict=True):
            if file not in self._opened:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._opened[file] = _locked(file, "x+b")
            self._opened[file].cut(length)
        if not lengths[1]:
            for record in self._head:
                self._opened[self.stats].append(record)

    def _read(self, file: Path) -> bytes:
        """Open a file and return its content, which is empty where there is none."""
        try:
            self._opened[file] = _locked(file, "r+b")
        except FileNotFoundError:
            return b""
        return self._opened[file].handle.read()

    def _resume(self, answers: bytes, figures: bytes) -> tuple[int, int]:
        """Take over the whole lines of earlier runs. Return the bytes of both files that hold; InputError for others'.

        Each line of the answers, whole or not, must begin as an answer of its place does.
        """
        lines = figures.split(b"\n")[:-1]
        head = [_parsed(line) for line in lines[:3]]
        kinds = [record.get("record") for record in head]
        if len(lines) < 2 and _begins(figures, _PROVENANCE):
            require_input(
                f"out: {self.out} exists without {self.stats}; name another file", not answers
            )
            return 0, 0
        require_input(
            f"out: {self.stats} was not written by `specengine batch`; name another file",
            kinds[:2] == ["provenance", "settings"] and kinds[2:] in ([], ["engine"]),
        )
        require_same("settings", self.out, head[1], self._head[1], tuple(head[1] | self._head[1]))
        *whole, torn = answers.split(b"\n")
        parsed = [*map(_parsed, whole), {"torn": True}]
        for place, line in enumerate([*whole, torn] if torn else whole):
            require_input(
                f"out: line {place + 1} of {self.out} is no answer of this run; name another file",
                place < len(self._items)
                and bool(parsed[place])
                and _begins(line, _beginning(self._items[place])),
            )
        self._head = head
        self.done = min(len(whole), len(lines) - len(head))
        self.failures = sum(bool(answer.get("error")) for answer in parsed[: self.done])
        return _length(whole[: self.done]), _length(lines[: len(head) + self.done])


def opened(
    out: Path, items: Sequence[Item], provenance: Record, settings: Record, inputs: Sequence[Path]
) -> Stream:
    """Return the output of a run: files, or a stream where `out` is no regular file. "-" is standard output."""
    special = os.path.exists(out) and not (os.path.isfile(out) or os.path.isdir(out))
    if special or _descriptor(out) is not None:
        return Stream(out, items)
    return Files(out, items, provenance, settings, inputs)


def beside(out: Path) -> Path:
    """Return the file of the figures."""
    return out.with_name(f"{out.stem}.stats{out.suffix}")


def _locked(file: Path, mode: str) -> Lines:
    """Open a file that no other run holds, by this name or another."""
    handle = cast(BinaryIO, open(os.path.realpath(file), mode, buffering=0))  # noqa: SIM115
    try:
        if sys.platform == "win32":
            import msvcrt

            handle.seek(1 << 40)  # after all lines, as a locked byte cannot be read
            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
            handle.seek(0)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            handle.close()
            raise InputError(f"out: another process is writing {file}") from error
    return Lines(handle)


def _stream(out: Path) -> Lines:
    """Open a pipe, a device or a descriptor. A named pipe is opened once it has a reader."""
    number = _descriptor(out)
    if number is not None:
        return Lines(os.fdopen(os.dup(number), "wb", buffering=0))
    end = time.monotonic() + READER_SECONDS
    while True:
        try:
            opened = os.open(out, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
            break
        except OSError as error:
            if error.errno != errno.ENXIO or not out.is_fifo():
                raise
            if time.monotonic() > end:
                raise InputError(
                    f"out: {out} is a pipe that nobody reads; start its reader first"
                ) from error
            time.sleep(0.05)
    os.set_blocking(opened, True)
    return Lines(os.fdopen(opened, "wb", buffering=0))


def _descriptor(out: Path) -> int | None:
    """Return the number of the open descriptor that a name means."""
    numbered = _DESCRIPTOR.fullmatch(str(out))
    return int(numbered[1]) if numbered else _STANDARD.get(str(out))


def _beginning(item: Item) -> bytes:
    """Return the bytes with which the answer of a line begins."""
    line = failed(item, "", "").line
    names = ("id",) if item.url is None else ("id", "custom_id")
    return _line({name: line[name] for name in names}).removesuffix(b"}\n")


def _begins(line: bytes, beginning: bytes) -> bool:
    """Return whether a line, of which the end may be missing, begins like this. A crash may leave zeros at its end."""
    return beginning.startswith(line.rstrip(b"\0")[: len(beginning)])


def _length(lines: list[bytes]) -> int:
    return sum(map(len, lines)) + len(lines)


def _line(record: Record) -> bytes:
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _parsed(line: bytes) -> Record:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}
