"""Processes in which llguidance reads schemas and grammars first: what crashes, loops or takes memory ends there."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUICK_SECONDS = 0.1  # after which a text makes room for others, and is read again among the slow ones
MAX_BYTES = 1 << 28
STACK_BYTES = 1 << 28  # whoever reads the text afterwards needs more, so that nothing fails there that did not here
_START_SECONDS = 30.0
_QUICK_READERS, _SLOW_READERS = 4, 2  # texts read at once
_NICENESS = 10  # of slow ones, beside answers

log = logging.getLogger(__name__)


class NoReaderError(Exception):
    """No process of Python can be started here."""


class Reader:
    """A process that reads one text after another, until it is closed or this process ends."""

    def __init__(self, niceness: int = 0) -> None:
        package = importlib.util.find_spec("llguidance")
        folders = [] if package is None else list(package.submodule_search_locations or ())
        if not sys.executable or getattr(sys, "frozen", False) or not folders:
            raise NoReaderError
        script = str(Path(__file__).with_name("_reader.py"))
        numbers = [str(number) for number in (MAX_BYTES, STACK_BYTES, niceness)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, folders[0], *numbers], stdin=pipe, stdout=pipe, stderr=nothing
            )
        except OSError as error:
            raise NoReaderError from error
        self._is_ready = False
        self.is_late = False

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Return the line that answers; nothing where the process failed, or took longer and is `is_late`."""
        if not self._is_ready and not self._within(_START_SECONDS, b""):
            raise NoReaderError
        self._is_ready = True
        return self._within(seconds, line)

    def _within(self, seconds: float, line: bytes) -> bytes:
        asked, answered = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answered is not None
        timer = threading.Timer(seconds, self._end)
        timer.start()
        try:
            asked.write(line)
            asked.flush()
            return answered.readline()
        except OSError:  # it ended before it had read the line
            return b""
        finally:
            timer.cancel()
            timer.join()

    def _end(self) -> None:
        self.is_late = True
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(OSError), self._process:
            pass


class Readers:
    """Warm processes for texts that are read at once; those that take long stand in a line of their own."""

    def __init__(self) -> None:
        self._idle: list[Reader] = []
        self._quick, self._slow = threading.Semaphore(_QUICK_READERS), threading.Semaphore(_SLOW_READERS)

    def start(self) -> None:
        """Start a process, without waiting for it."""
        if not self._idle:
            with contextlib.suppress(NoReaderError):
                self._idle.append(Reader())

    def fault(self, grammar: str, limits: Mapping[str, Any], seconds: float) -> str:
        """Return what is wrong with a grammar, or ''; NoReaderError.

        TimeoutError where reading it takes longer; MemoryError where the process ended with it.
        """
        line = json.dumps([grammar, limits]).encode() + b"\n"
        with self._quick:
            reader = self._taken()
            answer = reader.ask(line, min(QUICK_SECONDS, seconds))
        if reader.is_late or not answer:
            reader.close()
            self.start()
        else:
            self._idle.append(reader)
        if not answer and reader.is_late:
            if not self._slow.acquire(timeout=seconds):
                raise TimeoutError("others that take long are read before it; try again later")
            try:
                reader = Reader(_NICENESS)
                answer = reader.ask(line, seconds)
                reader.close()
            finally:
                self._slow.release()
            if not answer and reader.is_late:
                raise TimeoutError(f"reading it takes more than {seconds:g} s")
        if not answer:
            raise MemoryError(f"reading it fails, or takes more than {MAX_BYTES >> 20} MB")
        return str(json.loads(answer))

    def _taken(self) -> Reader:
        try:
            return self._idle.pop()
        except IndexError:
            return Reader()

    def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().close()


READERS = Readers()
atexit.register(READERS.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=READERS.__init__)  # type: ignore[misc]
