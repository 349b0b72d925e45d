"""A model, prompts and their answers by one process, which all tests here compare with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.batch import files


class Example(NamedTuple):
    model: Path
    prompts: Path
    out: Path


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    folder = tmp_path_factory.mktemp("batch")
    made = Example(
        files.make_model(folder / "tiny"),
        folder / "prompts.jsonl",
        folder / "out" / "answers.jsonl",
    )
    files.write(made.prompts, files.lines(28))
    assert files.batch(made.prompts, made.out, made.model) == 1, (
        "some of the lines cannot be answered"
    )
    return made
