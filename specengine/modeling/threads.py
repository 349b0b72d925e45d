"""How many threads a native forward takes, and keeping torch's own from spinning on the same cores meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_given: ContextVar[int | None] = ContextVar("threads", default=None)
_before: list[int] = []  # what torch had in the threads that are in `alone`


def count() -> int:
    """As many as torch has outside `alone`."""
    return _given.get() or torch.get_num_threads()


@contextmanager
def alone() -> Iterator[None]:
    """Torch runs on one thread inside.

    After an operation on several threads OpenMP's wait for the next one, spinning for some milliseconds on the cores
    that the forward needs; the tensors between two forwards are too small to gain from them.
    """
    # torch gives a thread that is begun meanwhile the one that is set here
    before = max([torch.get_num_threads(), *_before])
    mark = _given.set(_given.get() or before)
    _before.append(before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _before.remove(before)
        _given.reset(mark)
