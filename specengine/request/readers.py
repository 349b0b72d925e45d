"""Processes that read schemas and grammars first, and fill chat templates.

What crashes, never ends or takes all memory ends there.
"""

import atexit
import contextlib
import functools
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specengine.errors import require_or, restating

MAX_BYTES = 1 << 28
# reading the text afterwards needs more, so that nothing fails there that did not here
STACK_BYTES = 1 << 28
_START_SECONDS = 120.0  # on a machine that has much else to do
_QUICK_READERS, _SLOW_READERS = 4, 2  # texts read at once
_NICENESS = 10  # of slow ones, so that answers go first

log = logging.getLogger(__name__)


class ReaderKind(NamedTuple):
    """What processes do.

    package        that does the work
    work           what it is called in errors
    quick_seconds  after which a text makes room for others, and is read again among the slow ones
    """

    package: str
    work: str
    quick_seconds: float


GRAMMARS, TEMPLATES = (
    ReaderKind("llguidance", "reading it", 0.1),
    ReaderKind("transformers", "filling it", 1.0),
)


class NoReaderError(Exception):
    """No process of Python can be started here."""


class ReadingProcess:
    """A process that reads one text after another, until it is closed or this process ends."""

    def __init__(self, kind: ReaderKind, niceness: int = 0) -> None:
        package = importlib.util.find_spec(kind.package)
        folders = [] if package is None else list(package.submodule_search_locations or ())
        if not sys.executable or getattr(sys, "frozen", False) or not folders:
            raise NoReaderError
        script = str(Path(__file__).with_name("_reader.py"))
        arguments = json.dumps(
            {
                "package": kind.package,
                "folder": os.fspath(folders[0]),
                "path": [os.fspath(folder) for folder in sys.path],
                "memory": MAX_BYTES,
                "stack": STACK_BYTES,
                "niceness": niceness,
            }
        )
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with restating(OSError, lambda _: NoReaderError()):
            self._process: Any = subprocess.Popen(
                [sys.executable, "-I", "-S", script, arguments],
                stdin=pipe,
                stdout=pipe,
                stderr=nothing,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        self._is_ready, self.is_late = False, False

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Return the line that answers; nothing where the process failed, or took longer and is `is_late`."""
        if not self._is_ready and not self._within(_START_SECONDS, b""):
            raise NoReaderError
        self._is_ready = True
        return self._within(seconds, line)

    def _within(self, seconds: float, line: bytes) -> bytes:
        timer = threading.Timer(seconds, self._end)
        timer.start()
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except OSError:  # it ended before it had read the line
            return b""
        finally:
            timer.cancel()
            timer.join()

    def _end(self) -> None:
        self.is_late = True
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError), self._process:
            pass


class Readers:
    """Warm processes for texts that are read at once; those that take long stand in a line of their own."""

    def __init__(self, kind: ReaderKind) -> None:
        self.kind = kind
        self._idle: list[ReadingProcess] = []
        self._quick, self._slow = (
            threading.Semaphore(_QUICK_READERS),
            threading.Semaphore(_SLOW_READERS),
        )

    def start(self) -> None:
        """Start a process, without waiting for it."""
        if not self._idle:
            with contextlib.suppress(NoReaderError):
                self._idle.append(ReadingProcess(self.kind))

    def answer(self, question: list[Any], seconds: float) -> Any:
        """Return the answer to what `_reader` reads, of JSON's types; NoReaderError.

        TimeoutError where reading it takes longer; MemoryError where the process ended with it.
        """
        line = json.dumps(question, default=_plain).encode() + b"\n"
        with self._quick:
            try:
                reader = self._idle.pop()
            except IndexError:
                reader = ReadingProcess(self.kind)
            answer = reader.ask(line, min(self.kind.quick_seconds, seconds))
        if reader.is_late or not answer:
            reader.close()
            self.start()
        else:
            self._idle.append(reader)
        if not answer and reader.is_late:
            require_or(
                TimeoutError,
                "others that take long are read before it; try again later",
                self._slow.acquire(timeout=seconds),
            )
            try:
                reader = ReadingProcess(self.kind, _NICENESS)
                answer = reader.ask(line, seconds)
                reader.close()
            finally:
                self._slow.release()
            require_or(
                TimeoutError,
                f"{self.kind.work} takes more than {seconds:g} s",
                bool(answer) or not reader.is_late,
            )
        require_or(
            MemoryError,
            f"{self.kind.work} fails, or takes more than {MAX_BYTES >> 20} MB",
            bool(answer),
        )
        return json.loads(answer)

    def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().close()


def _plain(value: Any) -> Any:
    """Return what a template sees of a value that JSON does not know: transformers shows it nothing but the type."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


READERS, FILLERS = Readers(GRAMMARS), Readers(TEMPLATES)
for each in (READERS, FILLERS):
    atexit.register(each.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(each.__init__, each.kind))  # type: ignore[misc]
