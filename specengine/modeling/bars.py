"""transformers' progress bars."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging


@contextlib.contextmanager
def no_loading_bars() -> Iterator[None]:
    """Without the bars over reading weights, which take seconds; those over downloads stay as they are."""
    loading, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()  # both kinds
    _show_downloads(downloads)
    try:
        yield
    finally:
        if loading:
            logging.enable_progress_bar()
        _show_downloads(downloads)


def _show_downloads(shown: bool) -> None:
    (enable_progress_bars if shown else disable_progress_bars)()
