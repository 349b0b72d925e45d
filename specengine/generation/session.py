"""Conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specengine.errors import InputError
from specengine.generation.text_generation import Starts, TextGeneration


class Session:
    """A conversation. `messages` holds the turns so far; each turn runs only what the caches do not hold yet."""

    def __init__(self, engine: Starts, messages: list[dict[str, str]] | None = None) -> None:
        self.engine = engine
        self.messages = list(messages or [])

    def generate(self, text: str, **options: Any) -> Any:
        """Add a user turn and answer it; options and result as in Engine.generate."""
        return self.stream(text, **options).run()

    def stream(self, text: str, **options: Any) -> TextGeneration:
        """As `generate`, streamed; the turn enters `messages` when the stream has ended."""
        return _Turn(self, text, options)


class _Turn(TextGeneration):
    """A turn that writes itself into its session once it is complete."""

    def __init__(self, session: Session, text: str, options: Mapping[str, Any]) -> None:
        if not isinstance(text, str) or not text:
            raise InputError("text: it is empty, a turn needs a string")
        self._session, self._turn = session, {"role": "user", "content": text}
        super().__init__(session.engine, [*session.messages, self._turn], options, reuse_cache=True)

    def _finish(self, reason: str) -> str:
        text = super()._finish(reason)
        self._session.messages += [self._turn, {"role": "assistant", "content": text}]
        return text
