"""Loading says nothing of its own to standard error, and leaves transformers' settings as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging

from specengine.checkpoints.folder import no_loading_bars
from specengine.engine import Engine
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


@pytest.mark.parametrize("enabled", [True, False])
def test_settings_are_as_before(enabled: bool) -> None:
    (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()
    try:
        with no_loading_bars():
            assert not logging.is_progress_bar_enabled()
            assert are_progress_bars_disabled() is not enabled, "downloads are still shown"
        assert logging.is_progress_bar_enabled() is enabled
        assert are_progress_bars_disabled() is not enabled
    finally:
        logging.enable_progress_bar()
