"""What the trainings that watch a running engine share: the engine, and its questions."""

from __future__ import annotations

import argparse
from typing import Any

from specengine.engine import Engine
from specengine.request.prompts import token_ids


def load_engine(arguments: argparse.Namespace) -> Engine:
    """The engine whose target and draft the command line names, with the draft's own policy."""
    names = ("dtype", "device", "offline", "trust_remote_code")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    lookup = getattr(arguments, "lookup", None)
    return Engine.from_pretrained(arguments.target, arguments.draft, lookup=lookup, **given)


def question(engine: Engine, text: str) -> list[int]:
    """`text` as a user's turn, in checked token ids."""
    target = engine.target
    return token_ids(text, engine.tokenizer, raw=False, vocab_size=target.vocab_size, max_context=target.max_context)
