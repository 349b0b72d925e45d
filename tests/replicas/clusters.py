"""A cluster of Ray's for tests, in a process of its own that ends with whoever started it; and who works on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import psutil

# Ray reads these when it is imported: a token of this run's own, which processes below inherit.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

HEAD = """
import logging, os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
context = ray.init(
    address="local", num_cpus=int(sys.argv[1]), include_dashboard=False, object_store_memory=100 << 20,
    logging_level=logging.ERROR, log_to_driver=False,
)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def cluster(cpus: int) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-c", HEAD, str(cpus)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as head:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        assert address, "Ray did not start"
        yield address
        assert head.stdin is not None
        head.stdin.close()


def workers(address: str, name: str) -> list[psutil.Process]:
    """Processes of this actor on that cluster."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if command and command[0].startswith(f"ray::{name}") and address in _arguments(process):
                found.append(process)
    return found


def _arguments(process: psutil.Process) -> str:
    """Ray gives its processes titles, which hide their arguments; the raylet above them keeps its own."""
    parent = process.parent()
    return " ".join(parent.cmdline()) if parent is not None else ""
