"""`specengine list` and `specengine clean`: what is on the disk, and what is deleted only after a yes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specengine.cli import main, storage
from tests.cli.streams import Terminal, pipe_in


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("SPECENGINE_CACHE", str(root))
    sizes = {
        "models/a-model/model.safetensors": 2500,
        "costs/1.json": 10,
        "costs/2.json": 20,
        "history/readline": 5,
    }
    for name, size in sizes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * size)
    mine = root / "heads" / "mine"
    mine.mkdir(parents=True)
    (mine / "target.json").write_text('{"model": "a base"}')
    return root


def test_list_says_what_there_is(cache: Path, capsys: Any) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert any(line.startswith("a-model 2.5 kB") for line in words)
    assert any(line.startswith("costs 30 B 2 files") for line in words)
    assert any(line.startswith("history 5 B 1 file;") for line in words)
    assert any(
        line.startswith("default-head") and line.endswith("for smollm2-135m-instruct")
        for line in words
    )
    assert any(
        line.startswith(str(cache / "heads" / "mine")) and line.endswith("for a base")
        for line in words
    )


def test_list_as_json(cache: Path, capsys: Any) -> None:
    assert main(["list", "--json"]) == 0
    found = {kept["name"]: kept for kept in json.loads(capsys.readouterr().out)}
    assert found["a-model"]["size"] == 2500
    assert found["costs"]["deletable"]
    assert not found["default-head"]["deletable"]


def test_models_of_the_hub_are_listed_and_left_alone(
    monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    class Repository:
        repo_type, repo_id, size_on_disk, repo_path = (
            "model",
            "owner/model",
            3_000_000_000,
            tmp_path / "hub",
        )

    monkeypatch.setattr(storage, "scan_cache_dir", lambda: type("", (), {"repos": [Repository()]}))
    (tmp_path / "hub").mkdir()
    assert main(["list"]) == 0
    assert "owner/model" in capsys.readouterr().out
    assert main(["clean", "--yes"]) == 0
    assert (tmp_path / "hub").is_dir()


def test_clean_says_what_and_asks(cache: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    for answer, status in (("", 1), ("n", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert (cache / "costs").is_dir()
        assert main(["clean"]) == status
        err = capsys.readouterr().err
        assert f"  {cache / 'costs'}  30 B  2 files; measured costs" in err
        assert ("Nothing was deleted." in err) == (status == 1)
    assert sorted(path.name for path in cache.iterdir()) == ["heads", "models"]
    assert not list((cache / "models").iterdir())
    assert (cache / "heads" / "mine").is_dir()


def test_clean_of_one_kind_without_asking(cache: Path, capsys: Any) -> None:
    assert main(["clean", "costs", "--yes"]) == 0
    assert not (cache / "costs").exists()
    assert (cache / "models" / "a-model").is_dir()
    assert main(["clean", "costs", "--yes"]) == 0
    assert "nothing to delete" in capsys.readouterr().err


def test_clean_deletes_nothing_where_it_cannot_ask(
    cache: Path, monkeypatch: Any, capsys: Any
) -> None:
    pipe_in(monkeypatch, "y\n")
    assert main(["clean"]) == 2
    assert "pass --yes" in capsys.readouterr().err
    assert (cache / "costs" / "1.json").is_file()


def test_a_link_is_removed_and_not_followed(cache: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (cache / "models" / "linked").symlink_to(outside)
    (cache / "downloads").symlink_to(outside)
    assert main(["clean", "--yes"]) == 0
    assert (outside / "file").read_text() == "mine"
    assert not (cache / "models" / "linked").is_symlink()
    assert not (cache / "downloads").is_symlink()


def test_all_kinds_are_explained() -> None:
    assert tuple(storage.ABOUT) == storage.KEPT


def test_what_it_cleans_is_one_of_these(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["clean", "cost"])
    assert "did you mean costs?" in capsys.readouterr().err


def test_listing_needs_no_torch() -> None:
    """Which takes seconds to import."""
    script = "import sys; from specengine.cli import main; main(['list']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
