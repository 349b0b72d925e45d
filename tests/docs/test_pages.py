"""Tables, plots and options on the pages are those of the result files and parsers."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest

from docs.build import command_line, drawings, packages, pages, results
from docs.build.__main__ import main
from specengine.cli.commands import make_parser
from tests.docs.blocks import PAGES, ROOT


def test_pages_and_plots_are_what_would_be_drawn_now() -> None:
    assert not pages.stale(), "run python -m docs.build and commit"


def test_another_figure_in_a_result_file_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = tmp_path / "results"
    shutil.copytree(results.RESULTS, changed)
    file = changed / "auto-policies.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        if record["record"] == "summary" and record["way"] == "auto":
            record["speed_mean"] += 0.1
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    before = set(pages.stale())  # another test says what is wrong with these
    monkeypatch.setattr(results, "RESULTS", changed)
    stale = {str(page.relative_to(ROOT)) for page in set(pages.stale()) - before}
    assert stale == {"README.md", "docs/results/policies.md", "docs/pictures/policies.svg"}


def test_every_plot_is_on_a_page_and_every_file_is_there() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for name in drawings.DRAWINGS:
        assert f"drawn: plot {name} -->" in text


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"page\.md: unknown block 'nothing', known are plot, headline"
    ):
        pages.drawn("<!-- drawn: nothing -->\n<!-- /drawn -->", Path("page.md"))


def test_every_command_is_listed_with_every_option() -> None:
    text = command_line.listing()
    for name, parser in command_line.commands(make_parser(), "specengine"):
        assert f"### `{name}`" in text
        for action in parser._actions:
            for flag in action.option_strings:
                assert flag in text or flag in {"-h", "--help"}
    assert "### `specengine train draft`" in text


def test_every_package_is_listed_with_its_purpose(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "specengine").rglob("__init__.py")}
    assert folders
    for folder in folders:
        assert f"| `{folder.as_posix()}/`" in text
    (tmp_path / "__init__.py").write_text('"""Do one thing.\n\nMore about it.\n"""\n')
    assert packages.purpose(tmp_path) == "Do one thing."
    (tmp_path / "__init__.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="the package has no docstring"):
        packages.purpose(tmp_path)


def test_check_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "stale", lambda: [ROOT / "README.md"])
    before = (ROOT / "README.md").read_text()
    assert main(["--check"]) == 1
    assert capsys.readouterr().err == (
        "README.md\nout of date: run python -m docs.build and commit\n"
    )
    assert (ROOT / "README.md").read_text() == before


def test_each_parser_is_listed_by_every_option_that_is_its_own() -> None:
    text = command_line.listing()
    headings = {
        line.removeprefix("### ").strip("`")
        for line in text.splitlines()
        if line.startswith("### ")
    }
    assert {
        "specengine",
        "specengine bench",
        "specengine bench report",
        "specengine train draft",
    } <= headings
    for flag in ("--way", "--rounds", "--per-set", "--out", "--version"):
        assert f"`{flag}" in text
    assert not any(line.strip() == "." for line in text.splitlines())


def test_a_command_without_a_description_is_not_listed_as_a_dot() -> None:
    with pytest.raises(ValueError, match="tool: it has no description"):
        command_line._described("tool", argparse.ArgumentParser("tool"))


def test_common_options_stand_once() -> None:
    text = command_line.listing()
    lines = [line for line in text.splitlines() if line.startswith("- `--")]
    assert len([line for line in lines if line.startswith("- `--backend")]) == 1
    assert len([line for line in lines if line.startswith("- `--debug")]) == 1
    parts = re.split(r"^### `", text, flags=re.MULTILINE)
    serve = next(part for part in parts if part.startswith("specengine serve`"))
    assert "[model](#model) (without `--model`), [draft and policy](#draft-and-policy)." in serve
    assert "generation" not in serve
