"""Messages that docs/troubleshooting.md and other pages quote are printed so: each is found in the sources."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.blocks import ROOT, blocks

PAGES = [
    ROOT / "docs" / name
    for name in ("troubleshooting.md", "guide/fine-tunes.md", "guide/platforms.md")
]
MESSAGES = [
    " ".join(block.text.split())
    for block in blocks()
    if block.page in PAGES and block.language == "text"
]
LEAST = 15  # letters of a text in the sources that say enough to know it by


@cache
def texts() -> set[str]:
    """Return the strings of the sources, of those with values filled in the parts between them."""
    found: set[str] = set()
    for file in [ROOT / "setup.py", *sorted((ROOT / "specengine").rglob("*.py"))]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {
                    re.sub(r"\s+", " ", line) for line in (node.value, *node.value.splitlines())
                }
    return found


@cache
def telling() -> list[str]:
    return [text for text in texts() if sum(map(str.isalpha, text)) >= LEAST]


@cache
def words() -> set[str]:
    return {word for text in texts() for word in re.findall(r"[a-z]+", text)}


def is_printed(message: str) -> bool:
    """Return whether the message holds a text of the sources, and all its plain words occur in them."""
    plain = re.findall(r"(?<![^\s(])[a-z]{4,}(?=[;,:.)]*(?:\s|$))", message)
    return any(text in message for text in telling()) and set(plain) <= words()


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 25


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_the_program_prints_it(message: str) -> None:
    assert is_printed(message)


def test_other_messages_are_noticed() -> None:
    message = "device: cuda was asked for, but torch sees no CUDA device"
    assert is_printed(message)
    assert not is_printed(message.replace("was asked for", "was requested"))
    assert not is_printed("serve: uvicorn cannot be found; install the extra")
