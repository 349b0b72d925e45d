"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
