"""`specengine serve` in a process of its own, as users run it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


@contextlib.contextmanager
def running(
    arguments: Sequence[str],
    *,
    port: int,
    python: str = sys.executable,
    log: IO[str] | None = None,
    seconds: float = 120,
) -> Iterator[subprocess.Popen[Any]]:
    """A server that is ready at 127.0.0.1, killed at the end if it still runs.

    arguments: MODEL and options; log: what it writes, else it goes where the caller's does; AssertionError where it
    is not ready in time.
    """
    command = [python, "-m", "specengine", "serve", *arguments, "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=log, env=environment) as process:
        try:
            end = time.monotonic() + seconds
            while not is_healthy(port):
                assert process.poll() is None, f"it ended with {process.returncode}"
                assert time.monotonic() < end, f"it was not ready in {seconds:.0f} s"
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def is_healthy(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    return False
