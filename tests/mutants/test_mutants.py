"""The mutants themselves: each still applies, changes the program, and names tests that exist."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.running import Run, _judged
from tests.mutants.table import ROOT, Mutant, StaleError, mutants, named

MUTANTS = mutants()
MAX_PER_FILE = 4


def test_each_applies_and_changes_the_program() -> None:
    stale, same = [], []
    for mutant in MUTANTS:
        try:
            same += [mutant.name] if mutant.changes_nothing() else []
        except StaleError as error:
            stale.append(str(error))
    assert stale == []
    assert same == []


def test_there_are_many_and_they_are_spread() -> None:
    assert len(MUTANTS) >= 80
    assert {
        file: count
        for file, count in Counter(m.file for m in MUTANTS).items()
        if count > MAX_PER_FILE
    } == {}


def test_their_tests_exist() -> None:
    missing = set()
    for test in {test for mutant in MUTANTS for test in (*mutant.tests, *mutant.slow)}:
        file, *names = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        missing |= {test} if not text or any(f" {name}" not in text for name in names) else set()
    assert missing == set()


# ---- negative controls


@pytest.fixture
def mutant(tmp_path: Path) -> Mutant:
    (tmp_path / "sum.py").write_text("def total(a, b):\n    # of both\n    return a + b\n")
    (tmp_path / "sum.hpp").write_text("int total(int a, int b) { return a + b; }  // of both\n")
    return Mutant("sum", "sum.py", "a + b", "a - b", "a sum", ("tests/test_sum.py",))


@pytest.mark.parametrize("file", ["sum.py", "sum.hpp"])
@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("a + b", "a - b", False),
        ("a + b", "a + b", True),
        ("a + b", "a +  b", True),
        ("of both", "of two", True),
    ],
)
def test_a_mutant_that_changes_nothing_is_told(
    mutant: Mutant, tmp_path: Path, file: str, old: str, new: str, same: bool
) -> None:
    assert Mutant("sum", file, old, new, mutant.why, mutant.tests).changes_nothing(tmp_path) is same


@pytest.mark.parametrize("old", ["a * b", "a"])
def test_a_stale_mutant_is_refused(mutant: Mutant, tmp_path: Path, old: str) -> None:
    with pytest.raises(StaleError, match=r"occurs \d times in sum.py, it must occur once"):
        Mutant("sum", "sum.py", old, "b", mutant.why, mutant.tests).text(tmp_path)


ROW = """
[[mutant]]
name = "sum"
file = "sum.py"
old = "a + b"
new = "a - b"
why = "a sum"
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROW, "sum names no test"),
        (ROW + 'tests = ["a.py"]\n' + ROW + 'tests = ["a.py"]\n', "names used twice: sum"),
        (ROW + 'test = ["a.py"]\n', "unknown test; known: file"),
    ],
)
def test_tables_with_faults_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "table.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        mutants([tmp_path / "table.toml"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no mutant is called nobody"):
        named(MUTANTS, ["nobody"])


@pytest.mark.parametrize(
    ("status", "passed", "failed", "result"),
    [
        (1, [], ["tests/test_sum.py::test_it"], "caught"),
        (0, ["tests/test_sum.py::test_it[1]"], [], "survived"),
        (0, [], [], "unsound"),
        (5, [], [], "unsound"),
        (2, [], ["tests/test_sum.py"], "no program"),
        (-11, [], [], "caught"),
        (-14, [], [], "hung"),
    ],
)
def test_only_a_test_that_fails_notices(
    status: int, passed: list[str], failed: list[str], result: str
) -> None:
    assert (
        _judged(Run(status, frozenset(passed), tuple(failed), ""), ["tests/test_sum.py"], "caught")[
            0
        ]
        == result
    )
