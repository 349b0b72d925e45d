"""An answer as a terminal shows Markdown, by rich: finished blocks stay, the one under way is drawn over."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

from specengine.cli.terminal import why_no_colours

FENCES = ("```", "~~~")  # of code, in which an empty line ends no block


class Markdown:
    """Draws the text of one answer after the other."""

    def __init__(self, file: Any = None) -> None:
        self._console = importlib.import_module("rich.console").Console(file=file, highlight=False)
        self._drawn = importlib.import_module("rich.markdown").Markdown
        self._live_of = importlib.import_module("rich.live").Live
        self._text, self._printed = "", False
        self._live: Any = None

    @classmethod
    def where_wanted(cls, asked: bool | None, *, interactive: bool) -> Markdown | None:
        """Return one where it was asked for, or by default at a terminal with rich. MissingExtraError without rich."""
        shown = interactive and why_no_colours() is None
        if asked is False or (asked is None and not (shown and importlib.util.find_spec("rich"))):
            return None
        try:
            return cls()
        except ImportError as error:
            from specengine.errors import missing_extra

            raise missing_extra("markdown", "chat", error) from error

    def write(self, text: str) -> None:
        self._text += text
        whole, rest = finished(self._text)
        if whole:
            self._stop()
            self._print(whole)
            self._text = rest
        if self._text.strip():
            if self._live is None:
                self._live = self._live_of(console=self._console, transient=True, refresh_per_second=8)
                self._live.start()
            self._live.update(self._drawn(self._text))

    def end(self) -> None:
        """End an answer, and be ready for the next one."""
        self._stop()
        if self._text.strip():
            self._print(self._text)
        self._text, self._printed = "", False

    def _stop(self) -> None:
        if self._live is not None:
            with contextlib.suppress(Exception):  # a terminal that is gone
                self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        if self._printed:
            self._console.print()
        self._console.print(self._drawn(text.strip("\n")))
        self._printed = True


def finished(text: str) -> tuple[str, str]:
    """Split a text behind its last block that an empty line has ended; whole code blocks count as one."""
    end, place, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        place += len(line)
        bare = line.strip()
        if fence:
            fence = "" if bare.startswith(fence) else fence
        elif bare.startswith(FENCES):
            fence = bare[:3]
        elif not bare and line.endswith("\n"):
            end = place
    return text[:end] if text[:end].strip() else "", text[end:]
