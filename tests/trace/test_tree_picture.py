"""Tests of the picture of one cycle's tree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from specengine.cli import main
from specengine.errors import InputError
from specengine.trace import Trace
from tests.trace.runs import TREE


def drawn(file: Path, **options: Any) -> str:
    pytest.importorskip("matplotlib")
    from specengine.trace.pictures import draw_tree

    draw_tree(TREE, file, **options)
    return file.read_text()


def test_every_verified_node_is_drawn_and_pruned_ones_when_asked(tmp_path: Path) -> None:
    verified, everything = drawn(tmp_path / "a.svg"), drawn(tmp_path / "b.svg", pruned=True)
    for text in ("root", "␣a", r"b\n", "d"):  # matplotlib notes each text beside its glyphs
        assert f"<!-- {text} -->" in verified
    for text in (r"\x1b[31m", "e", "f", "drafted, not verified"):
        assert f"<!-- {text} -->" not in verified
        assert f"<!-- {text} -->" in everything


def test_the_same_tree_is_the_same_file(tmp_path: Path) -> None:
    assert drawn(tmp_path / "a.svg") == drawn(tmp_path / "b.svg")


def test_the_command_draws_the_cycle_that_was_asked_for(
    written: Trace, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / "tree.svg"
    assert (
        main(["trace", str(written.file), "--query", "2", "--cycle", "3", "--tree", str(file)]) == 0
    )
    assert capsys.readouterr().out == f"{file}\n"
    assert f"<!-- {written.queries[1].cycles[2].committed_texts[-1]} -->" in file.read_text()
    assert main(["trace", str(written.file), "--cycle", "999", "--tree", str(file)]) == 2
    assert "cycle: got 999" in capsys.readouterr().err


def test_it_says_what_it_needs(tmp_path: Path, monkeypatch: Any) -> None:
    from specengine.trace.pictures import draw_tree

    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"tree: .*cannot be written"):
        drawn(tmp_path / "file" / "tree.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="tree: needs matplotlib"):
        draw_tree(TREE, tmp_path / "tree.svg")


BEGINS = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF", ".PNG": b"\x89PNG"}


@pytest.mark.parametrize("suffix", BEGINS)
def test_a_file_holds_what_its_name_says(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from specengine.trace.pictures import draw_tree

    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        draw_tree(TREE, file)
    assert files[0].read_bytes().startswith(BEGINS[suffix])
    assert files[0].read_bytes() == files[1].read_bytes(), "the same tree, the same file"


@pytest.mark.parametrize("name", ["tree.jpg", "tree", "tree.html", "tree.svg.txt"])
def test_a_name_of_what_cannot_be_drawn_is_refused(name: str, tmp_path: Path) -> None:
    from specengine.trace.pictures import draw_tree

    with pytest.raises(
        InputError,
        match=r"tree: got .*, accepted a file whose name ends in \.svg or \.png or \.pdf",
    ):
        draw_tree(TREE, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["page.png", "page", "page.svg"])
def test_a_page_is_written_into_a_page(
    name: str, written: Trace, tmp_path: Path, capsys: Any
) -> None:
    assert main(["trace", str(written.file), "--html", str(tmp_path / name)]) == 2
    assert "html: got " in (told := capsys.readouterr().err)
    assert "accepted a file whose name ends in .html or .htm" in told
    assert not (tmp_path / name).exists()
