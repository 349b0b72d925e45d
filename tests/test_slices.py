"""The slice that `make test` runs of a test with many cases."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slices import covering, spread


@pytest.mark.parametrize("sizes", [(1,), (7,), (3, 3), (8, 18, 2), (2, 3, 4, 5)])
def test_each_value_of_each_parameter_stands_in_the_slice(sizes: tuple[int, ...]) -> None:
    cases = [
        dict(zip("abcd", values, strict=False)) for values in itertools.product(*map(range, sizes))
    ]
    chosen = covering(cases)
    for axis, size in zip("abcd", sizes, strict=False):
        assert {cases[place][axis] for place in chosen} == set(range(size))
    assert len(chosen) == max(sizes)


def test_values_that_occur_in_few_cases_are_not_missed() -> None:
    cases = [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 0, "b": 1}, {"a": 0, "b": 2}]
    assert covering(cases) == [0, 1, 3]


def test_the_values_of_a_short_axis_are_used_alike() -> None:
    cases = [{"a": a, "b": b} for a in range(3) for b in range(12)]
    uses = [cases[place]["a"] for place in covering(cases)]
    assert [uses.count(value) for value in range(3)] == [4, 4, 4]


def test_spread() -> None:
    assert spread(5, 9) == [0, 1, 2, 3, 4]
    assert spread(5, 1) == [0]
    assert spread(9, 3) == [0, 4, 8]


SUITE = """
import pytest

@pytest.mark.sliced
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", "pq")
def test_axes(a, b): ...

@pytest.mark.sliced(2)
@pytest.mark.parametrize("a", range(9))
def test_count(a): ...

@pytest.mark.sliced
def test_one(): ...

@pytest.mark.sliced
@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_slow_ones_are_no_part(a): ...
"""


RUNS = """
import sys, pytest
for marked in ("not slow", "slow", ""):
    pytest.main(["-c", "pyproject.toml", "-p", "tests.conftest", "--collect-only", "-q", "-m", marked, sys.argv[1]])
    print("\\f")
"""


def collected(suite: Path) -> list[list[str]]:
    """Return the tests of `make test`, those that it leaves, and all: collected one after the other in one process."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(suite)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        [line.partition("::")[2] for line in run.splitlines() if "::" in line]
        for run in done.stdout.split("\f\n")[:3]
    ]


def test_the_marker_leaves_all_but_the_slice_to_the_slow_tier(tmp_path: Path) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    fast, slow, everything = collected(suite)
    assert fast[-3:] == [
        "test_one",
        "test_slow_ones_are_no_part[0]",
        "test_slow_ones_are_no_part[2]",
    ]
    assert fast[-5:-3] == ["test_count[0]", "test_count[8]"]
    assert {name[-2] for name in fast[:-5]} | {name[-4] for name in fast[:-5]} == set("pqxyz")
    assert len(fast) == 8
    assert sorted(fast + slow) == sorted(everything)
    assert len(slow) == 11
