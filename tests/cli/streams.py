"""Helpers to type at the command line: input, a terminal, and what plain decoding prints."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

import specengine

PROMPT = "the cat and the dog and the cat"
ANSI = re.compile(r"\x1b\[\d+m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def expected(folder: str, prompt: str = PROMPT, **options: Any) -> str:
    made = specengine.Engine.from_pretrained(folder, policy="plain")
    return made.generate(prompt, **{"max_new_tokens": 20, **options}).text
