"""Running the tests that a mutant names, and what follows from how they end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutants import warm
from tests.mutants.copies import BuildError, Copy
from tests.mutants.table import Mutant, StaleError

NOTHING_RAN = 5  # pytest's status
FAST, SLOW = "not slow", "slow"  # as `make test` and `make test-all` choose


@dataclass(frozen=True)
class Run:
    """How tests ended: node ids of those that passed and failed; the status of the process, as warm.py has it."""

    status: int
    passed: frozenset[str]
    failed: tuple[str, ...]
    output: str

    def has_passed(self, test: str) -> bool:
        """Return whether a test of this name, a file or a node id, passed."""
        name = re.compile(re.escape(test) + r"($|::|/|\[)")
        return any(name.match(each) for each in self.passed)

    @property
    def crashed(self) -> bool:
        """Return whether the process was ended by a signal, as by a wrong access to memory."""
        return self.status < 0


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `result`, the first test that failed, and seconds, building included.

    caught      a test of `make test` failed
    slow only   only a test that `make test-all` adds failed
    survived    all of its tests passed
    stale       its old text does not occur exactly once
    no change   the program stays the same
    no program  it cannot be compiled or imported
    unsound     the test fails without it as well, or a name of a test is that of none
    hung        its tests did not end
    """

    result: str
    test: str
    seconds: float


class Runner:
    """Runs tests of a copy in forks of one process, see warm.py."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self._output = copy.objects / "output.txt"
        self._warm = subprocess.Popen(
            [sys.executable, "-P", str(Path(warm.__file__))],
            cwd=copy.sources,
            env=copy.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], tier: str, stop: bool = True) -> Run:
        """Run tests, until the first failure if `stop`."""
        options = [
            "-q",
            "-rA",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "--hypothesis-profile=ci",
            "-m",
            tier,
        ]
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(
            json.dumps([[*options, *(["-x"] if stop else []), *tests], str(self._output)]) + "\n"
        )
        self._warm.stdin.flush()
        status = int(self._warm.stdout.readline())
        output = self._output.read_text(encoding="utf-8", errors="replace")
        lines = re.findall(r"^(PASSED|FAILED|ERROR) (\S+::.+?)(?: - .*)?$", output, re.MULTILINE)
        passed = frozenset(test for word, test in lines if word == "PASSED")
        return Run(
            status, passed, tuple(test for word, test in lines if word != "PASSED"), output[-8000:]
        )

    def verdicts(self, listed: Sequence[Mutant]) -> list[Verdict]:
        """Try mutants one after the other; then let the tests that noticed them run without a change."""
        found = [self._verdict(mutant) for mutant in listed]
        tests = sorted({one.test for one in found if one.test})
        passed = self.run(tests, f"{FAST} or {SLOW}", stop=False).passed if tests else frozenset()
        return [
            replace(one, result="unsound") if one.test and one.test not in passed else one
            for one in found
        ]

    def _verdict(self, mutant: Mutant) -> Verdict:
        began = time.monotonic()
        result, test = "survived", ""
        try:
            if mutant.changes_nothing(self.copy.sources):
                return Verdict("no change", "", 0.0)
            with self.copy.changed(mutant):
                for tier, tests, word in (
                    (FAST, mutant.tests, "caught"),
                    (SLOW, mutant.slow, "slow only"),
                ):
                    if tests and result == "survived":
                        result, test = _judged(self.run(tests, tier), tests, word)
        except StaleError:
            result = "stale"
        except (BuildError, SyntaxError):
            result = "no program"
        return Verdict(result, test, round(time.monotonic() - began, 1))


def _judged(ended: Run, tests: Sequence[str], word: str) -> tuple[str, str]:
    """Return the result and, of a mutant that was caught by a failed test, that test; word: the result of those."""
    if ended.status == -signal.SIGALRM:
        return "hung", ""
    if ended.crashed:
        return word, ""
    if ended.status == 1:
        return word, ended.failed[0]
    if ended.status not in (0, NOTHING_RAN):  # a file that cannot be imported, mostly
        return "no program", ""
    return "survived" if all(ended.has_passed(test) for test in tests) else "unsound", ""
