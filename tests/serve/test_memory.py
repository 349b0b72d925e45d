"""Freed memory goes back to the system while a server runs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import subprocess
import sys

import pytest

from specengine.serve import app as app_module, models as memory
from tests.serve.served import served

needs_glibc = pytest.mark.skipif(memory._glibc() is None, reason="needs glibc")
MEBIBYTE = 2**20


def freed_but_kept() -> int:
    """Have the C library keep 64 MiB that are free, below one piece in use; return the resident bytes."""
    library = ctypes.CDLL("libc.so.6")
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    pieces = [library.malloc(64 * 1024) for _ in range(1024)]
    for piece in pieces:
        ctypes.memset(piece, 1, 64 * 1024)
    for piece in pieces[:-1]:
        library.free(piece)
    return memory.resident_bytes()


@needs_glibc
def test_freed_memory_goes_back_where_the_process_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # this process may be so large that 64 MiB are little
    monkeypatch.setattr(memory, "GROWTH", 1.0)

    async def serve() -> tuple[int, int]:
        task = asyncio.create_task(memory.give_back(0.01))
        await asyncio.sleep(0)  # it notes the level
        kept = freed_but_kept()
        for _ in range(500):
            await asyncio.sleep(0.01)
            if memory.resident_bytes() < kept - 48 * MEBIBYTE:
                break
        task.cancel()
        return kept, memory.resident_bytes()

    kept, level = asyncio.run(serve())
    assert level < kept - 48 * MEBIBYTE


@pytest.mark.slow
@needs_glibc
def test_threads_share_arenas() -> None:
    code = """
import re, sys, threading
from ctypes import CDLL
from specengine.serve import models as memory
if sys.argv[1] == "limited":
    memory.limit_arenas()
library = CDLL("libc.so.6")
barrier = threading.Barrier(8)
def run():
    library.malloc(1000)
    barrier.wait()
threads = [threading.Thread(target=run) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
library.malloc_stats()
"""
    arenas = {}
    for mode in ("limited", "not"):
        done = subprocess.run(
            [sys.executable, "-c", code, mode], capture_output=True, text=True, check=True
        )
        arenas[mode] = done.stderr.count("Arena ")
    assert arenas["limited"] <= memory.MAX_ARENAS < arenas["not"]


def test_a_server_gives_back_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    async def give_back() -> None:
        states.append("begun")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        states.append("ended")

    monkeypatch.setattr(app_module, "give_back", give_back)
    with served():
        assert states == ["begun"]
    assert states == ["begun", "ended"]
