"""Files that appear whole or not at all, and JSON that someone else wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specengine.text_files import read_text


@contextmanager
def atomic(file: Path) -> Iterator[Path]:
    """What is written to the path that this gives becomes `file` at the end, unless an error came first.

    It has the permissions of any new file of this user, whoever writes it.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.touch()
        mode = part.stat().st_mode
        yield part
        part.chmod(mode)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. OSError where it cannot be read, ValueError where it holds something else."""
    try:
        found = json.loads(read_text(file))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError("holds no object")
    return found
