"""What makes a result file believable: the command, commit, device and versions that it came from."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import specengine
from specengine import ops

ROOT = Path(__file__).parent.parent
ROWS = ".rows"  # the end of the name of a file that grows


def provenance() -> dict[str, Any]:
    """The first record of every result file."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "record": "provenance",
        "command": f"python -m bench.{_module()} " + shlex.join(_public(sys.argv[1:])),
        "commit": _git("describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{device}, {torch.get_num_threads()} threads of {os.cpu_count()} cores",
        "specengine": specengine.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "backends": {op: backend.name for op, backend in ops.backends(torch.device("cpu")).items()},
    }


def kept(rows: Iterable[dict[str, Any]], path: Path | None) -> Iterator[dict[str, Any]]:
    """The same records, each in the file beside `path` that ends in .rows before the next one is made.

    What a run that breaks off has measured stays there, and `bench.report` reads it; `write` removes it.
    """
    if path is None:
        yield from rows
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(ROWS).open("w") as log:
        log.write(json.dumps(provenance()) + "\n")
        for row in rows:
            log.write(json.dumps(row) + "\n")
            log.flush()
            yield row


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A result file: provenance, then one record per line; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in [provenance(), *rows]))
    temporary.replace(path)
    path.with_suffix(ROWS).unlink(missing_ok=True)


def _module() -> str:
    """What was run: of a package, the program is its `__main__.py`."""
    program = Path(sys.argv[0])
    return program.parent.name if program.stem == "__main__" else program.stem


def _public(arguments: list[str]) -> list[str]:
    """Arguments without the folders of this machine."""
    return [Path(argument).name if argument.startswith("/") else argument for argument in arguments]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    features = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if _has(name)]
    return f"{name} ({', '.join(features[:2])})"


def _has(feature: str) -> bool:
    try:
        return feature in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
