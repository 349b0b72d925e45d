"""The fenced blocks of README.md and docs, and how each is meant to be tried."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- ([a-z ]+) -->\n)?```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RUN, PARSED, NOT_RUN, DEFAULT_MODEL = "", "parsed", "not run", "default model"
MARKS = {
    RUN: "runs, with stand-ins for the models that it names",
    PARSED: "would take long or needs more than a model: its options are parsed",
    NOT_RUN: "installs, or shows a part of a file",
    DEFAULT_MODEL: "runs on the default model, and the block behind it is what it prints",
}


class Block(NamedTuple):
    """A fenced block; `mark` is the comment on the line before it, `output` the text block behind it."""

    page: Path
    mark: str
    language: str
    text: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0]}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        own = [
            Block(page, mark or RUN, language, text, None)
            for mark, language, text in BLOCK.findall(page.read_text())
        ]
        for block, after in zip(own, [*own[1:], None], strict=False):
            text = after.text if after is not None and after.language == "text" else None
            found.append(block._replace(output=text))
    return found


def commands(block: Block) -> list[str]:
    """The lines of a shell block without their comments."""
    return [re.sub(r"\s+#.*", "", line) for line in block.text.splitlines() if line.strip()]
