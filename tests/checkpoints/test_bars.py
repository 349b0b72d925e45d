"""Bars over what takes long: on a terminal and in a notebook alone, and nothing is left of them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tqdm.auto
from transformers.utils import logging

from specengine.checkpoints.folder import quiet_loading_bars
from specengine.engine import Engine
from specengine.models.native.weights import progress_bar
from tests.toy import byte_tokenizer, tiny


@pytest.mark.parametrize("backend", ["huggingface", "native"])
def test_loading_shows_no_bars(backend: str, tmp_path: Path, capfd: Any) -> None:
    tiny(seed=1).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    logging.enable_progress_bar()
    capfd.readouterr()
    engine = Engine.from_pretrained(str(tmp_path), "ngram", backend=backend)
    assert engine.target.model is not None
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()


def test_the_hook_of_bars_is_as_before() -> None:
    before = logging.set_tqdm_hook(None)
    try:
        with quiet_loading_bars():
            assert logging.tqdm(range(3), disable=False).disable, "standard error is no terminal"
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert logging.set_tqdm_hook(before) is None


@pytest.mark.parametrize("place", ["terminal", "notebook"])
def test_bars_are_shown_after_a_second(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    if place == "terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    else:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert list(progress_bar(range(3), "Answers", 3)) == [0, 1, 2]
    assert terminal.getvalue() == "", "a bar that is over at once is not shown"
    bar = progress_bar(range(3), "Answers", 3)
    assert isinstance(bar, tqdm.auto.tqdm)
    assert (bar.disable, bar.delay, bar.leave, bar.total) == (False, 1, False, 3)
    bar.close()
    logging.disable_progress_bar()
    try:
        hidden = progress_bar(range(3), "Answers")
        assert not isinstance(hidden, tqdm.auto.tqdm)
        assert list(hidden) == [0, 1, 2]
    finally:
        logging.enable_progress_bar()
