"""Run an engine in a process of its own, which answers lines with lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any


class Peer:
    """Start a process and read its first line, `about`. RuntimeError, with its last words, if it ends early."""

    def __init__(
        self, name: str, command: list[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads would fill up
        pipe, whole = subprocess.PIPE, {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(
            command, env=whole, stdin=pipe, stdout=pipe, stderr=self._said, text=True
        )
        self.about = self._read()

    def ask(self, line: str) -> Any:
        """Return the answer to a line."""
        print(line, file=self._process.stdin, flush=True)
        return self._read()

    def stop(self) -> None:
        """End the input, and wait until the process ends."""
        self._process.communicate(timeout=60)
        self._said.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._said.seek(0)
        said = self._said.read().strip().splitlines()
        raise RuntimeError(f"{self.name}: {said[-1] if said else 'ended'}")
