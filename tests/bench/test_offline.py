"""The default model travels in parts to a machine without a network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bench import offline
from specengine.checkpoints.embedded import PinnedFile


def test_parts_make_up_the_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 41
    (tmp_path / "a.gguf").write_bytes(content)
    parts = offline.split(tmp_path / "a.gguf", tmp_path / "parts", size=1000)
    assert [part.stat().st_size for part in parts] == [1000] * 10 + [496]
    pinned = PinnedFile("somewhere/a.gguf", len(content), hashlib.sha256(content).hexdigest())
    assert offline.join(tmp_path / "parts", pinned, tmp_path / "joined") is None
    assert (tmp_path / "joined").read_bytes() == content
    parts[3].unlink()
    damage = offline.join(tmp_path / "parts", pinned, tmp_path / "joined")
    assert damage is not None
    assert "has 9,496 bytes instead of 10,496" in damage


def test_missing_parts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert offline.main(["join", str(tmp_path), str(tmp_path / "model")]) == 1
    assert "not all parts are in" in capsys.readouterr().err
