"""Provenance of figures: command, commit, device and versions."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import specengine
from specengine import ops
from specengine.files import CPU_FACTS, processor_name

PACKAGE = Path(specengine.__file__).parent


def provenance(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the first record of a result file; the commit is empty where the package is no checkout."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "record": "provenance",
        "command": f"{program} {shlex.join(public(arguments))}".strip(),
        "commit": _git("describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{device}, {torch.get_num_threads()} threads of {os.cpu_count()} cores",
        "specengine": specengine.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "backends": {op: backend.name for op, backend in ops.backends(torch.device("cpu")).items()},
    }


def public(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the folders of this machine."""
    return [Path(argument).name if argument.startswith("/") else argument for argument in arguments]


def _git(*arguments: str) -> str:
    """Return git's output; empty where the package is in no checkout of its own, as in a user's .venv."""
    try:
        for command in (("ls-files", "--error-unmatch", "__init__.py"), arguments):
            done = subprocess.run(
                ["git", *command], cwd=PACKAGE, capture_output=True, text=True, check=True
            )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpu_name() -> str:
    words = CPU_FACTS.read_text().split() if CPU_FACTS.exists() else []
    features = [each for each in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if each in words]
    return f"{processor_name()} ({', '.join(features[:2])})"
