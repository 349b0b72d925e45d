"""Fixtures of the tests of the command line: a model, a head, and the environment of an ordinary terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from specengine.checkpoints.eagle import save_head
from tests.toy import byte_tokenizer, head_config, random_state, tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model with its tokenizer, as from_pretrained reads them; it repeats itself, so drafts are taken."""
    path = tmp_path_factory.mktemp("model")
    tiny(seed=1, initializer_range=0.1, max_position_embeddings=2048).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def head(tmp_path: Path) -> str:
    config = head_config(layer_ids=(0, 1, 1))
    save_head(config, random_state(config), tmp_path / "head")
    return str(tmp_path / "head")
