"""A slice of `python -m tests.batch.kills`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.batch import files, kills


@pytest.mark.slow
def test_a_command_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    model = ("--model", str(files.make_model(tmp_path / "tiny")))
    tried = dict(kills.tried(tmp_path, model, 3, random.Random(0), 14))
    assert tried
    assert all(tried.values()), tried
