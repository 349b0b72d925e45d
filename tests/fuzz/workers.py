"""Cases in a process of their own, so that one that ends it is found, and the next is run in another.

`python -m tests.fuzz.workers` reads names of cases, a line each, and writes what became of each as a JSON line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from specengine.errors import shown
from tests.fuzz.cases import GIVEN
from tests.fuzz.running import Ran, here

ROOT = Path(__file__).parents[2]
# of a case, by the clock; the processor's seconds are counted where Python runs
MOST_SECONDS = 300.0
BEFORE = 5  # cases that are named beside one in which the process died
FILLING = "165"  # what glibc writes into memory that is given out or given back


class Worker:
    """A process that runs cases; a new one takes the place of one that has ended."""

    def __init__(self, *command: str) -> None:
        self._command = command or ("-m", "tests.fuzz.workers")
        self._process: subprocess.Popen[str] | None = None
        self._ran: list[str] = []

    def run(self, name: str) -> Ran:
        """Run the case of this name and return its outcome."""
        process = self._process = self._process or self._start()
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(name + "\n")
            stdin.flush()
        line = stdout.readline() if select.select([stdout], [], [], MOST_SECONDS)[0] else None
        before, self._ran = self._ran, [*self._ran, name][-BEFORE:]
        if line:
            return Ran(**json.loads(line))
        what = self._died(process) if line is not None else f"it takes more than {MOST_SECONDS:g} s"
        self.close()
        return Ran(
            _given(name),
            error=f"{what}; before it this process ran {', '.join(before) or 'nothing'}",
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._ran = None, []

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_PERTURB_": FILLING}
        command, pipe = [sys.executable, *self._command], subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment
        )

    @staticmethod
    def _died(process: subprocess.Popen[str]) -> str:
        status = process.wait()
        return (
            f"the process died of {signal.Signals(-status).name}"
            if status < 0
            else f"the process ended: {status}"
        )


def _given(name: str) -> str:
    """The case of this name as it is shown, where drawing it takes no model."""
    kind = name.split("/")[1]
    return (
        shown(GIVEN[kind](None, random.Random(name))[0], 600)
        if kind in GIVEN
        else "what this name draws"
    )


@contextlib.contextmanager
def worker(*command: str) -> Iterator[Callable[[str], Ran]]:
    """Yield a function that runs cases in another process. command: of Python, by default this module."""
    made = Worker(*command)
    try:
        yield made.run
    finally:
        made.close()


def serve() -> None:
    """Run what standard input names; what cases print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = here(Path(folder))
        for line in sys.stdin:
            answers.write(json.dumps(vars(run(line.strip()))) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
