"""A tiny model in a folder, prompts of every form, and what one process answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specengine.cli import main
from tests.toy import TEMPLATE, byte_tokenizer, tiny

FEW = ("--max-new-tokens", "12")


def make_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Make a model that repeats itself, so that drafts are accepted."""
    tiny(seed=1, initializer_range=0.1, max_position_embeddings=512).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


def lines(count: int) -> list[Any]:
    """Return lines of every form; every seventh cannot be answered."""
    made: list[Any] = []
    for number in range(count):
        forms: list[Any] = [
            f"the cat {number} and the dog",
            {"id": f"m{number}", "messages": [{"role": "user", "content": f"hello {number}"}]},
            {"prompt": f"once {number}", "options": {"temperature": 0.9, "max_new_tokens": 30}},
            {"question_id": 1000 + number, "category": "any", "turns": ["a b a b", "and then?"]},
            {
                "custom_id": f"r{number}",
                "body": {"messages": [{"role": "user", "content": "hi"}], "temperature": 1},
            },
            {"prompt": [5, 6, 7, 5, 6]},
            {"prompt": [1, 2, 99999]},
        ]
        made.append(forms[number % len(forms)])
    return made


def write(file: Path, entries: list[Any]) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def batch(prompts: Path, out: Path, model: Path, *more: str) -> int:
    return main(["batch", str(prompts), "--out", str(out), "--model", str(model), *FEW, *more])


def read(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]
