"""The house's figures are no higher than budgets.json holds them; `python -m tests.house --write` holds lower ones."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

from tests.house import figures, imports, journeys, members, reading, seats

TABLE = figures.read()
has_instructions = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason=f"needs {journeys.INSTRUCTIONS}",
)


@pytest.mark.model
@pytest.mark.slow
@has_instructions
def test_a_cycle_takes_no_longer_way(default_model_path: Path) -> None:
    measured = journeys.measure()
    assert figures.higher(measured, TABLE) == []
    assert len(measured) == 24
    assert all(value > 0 for value in measured.values())
    assert journeys.extensions()
    assert journeys.unseen() == []


def test_rooms_stand_on_no_more_storeys_and_in_no_more_circles() -> None:
    assert figures.higher(imports.measure(figures.PACKAGE), TABLE) == []


def test_interfaces_have_no_more_members() -> None:
    assert figures.higher(members.measure(), TABLE) == []


def test_the_package_has_no_more_statements_and_files() -> None:
    assert figures.higher(figures.sizes(), TABLE) == []


def test_the_documents_have_no_more_words() -> None:
    assert figures.higher(figures.pages(), TABLE) == []


def test_nothing_costs_more_second_readings() -> None:
    assert figures.higher(reading.measure(figures.PACKAGE), TABLE) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", seats.SEATS)
def test_one_more_touches_no_more_files(kind: str, tmp_path: Path) -> None:
    name = f"files to touch: {kind}"
    try:
        files = seats.follow(kind, tmp_path)
    except seats.NoSeatError as reason:
        pytest.skip(f"no seat yet, held at {TABLE[name]['held']} as counted by hand: {reason}")
    assert figures.higher({name: len(files)}, TABLE) == []


def test_held_figures_are_none_that_rose() -> None:
    for name, row in TABLE.items():
        began = row["survey"] if row["start"] is None else row["start"]
        assert row["held"] <= began, name


# ---- negative controls


@pytest.mark.parametrize("name", TABLE)
def test_a_figure_one_higher_fails(name: str) -> None:
    held = TABLE[name]["held"]
    assert figures.higher({name: held}, TABLE) == []
    assert figures.higher({name: held + 1}, TABLE) == [f"{name}: {held + 1}, held at {held}"]
    assert figures.lowered({name: held + 1}, TABLE) == TABLE


def test_lower_figures_are_held_and_unknown_ones_fail() -> None:
    lower = figures.lowered({"storeys": 3, "package statements": 26_901}, TABLE)
    assert lower["storeys"]["held"] == 3
    assert lower["package statements"]["held"] == 26_901
    assert lower["package files"] == TABLE["package files"]
    assert figures.higher({"doors": 1}, TABLE) == ["doors: 1, not in the table"]


def test_packed_and_unpacked_statements_count_alike() -> None:
    packed = ast.parse("if True: a = 1; b = 2\n")
    unpacked = ast.parse("if True:\n    a = 1\n\n    b = 2  # a comment\n")
    assert reading.statements(packed) == reading.statements(unpacked) == 3


def test_the_table_is_as_it_is_written() -> None:
    content = json.loads(figures.TABLE.read_text())
    assert figures.text(content) == figures.TABLE.read_text()
