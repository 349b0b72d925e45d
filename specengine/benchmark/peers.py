"""Other engines as ways of a benchmark, each in a Python environment of its own, which `make peers` makes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specengine.benchmark.summaries import Answer
from specengine.benchmark.ways import Way
from specengine.checkpoints import embedded
from specengine.checkpoints.pretrained import is_gguf
from specengine.errors import BackendError, InputError, require, require_input

PREFIX = "peer:"
SCRIPT = "answer.py"  # in the folder of the environments: each runs it in its own Python
MODES: dict[str, tuple[str, ...]] = {  # by engine, besides plain decoding
    "llama.cpp": ("prompt-lookup", "draft=FILE"),
    "ik_llama.cpp": (),
    "openvino": ("prompt-lookup", "draft=FILE"),
    "vllm": ("ngram", "eagle3"),
    "onnxruntime": (),
}
NAMES = tuple(
    PREFIX + name
    for engine, modes in MODES.items()
    for name in (engine, *(f"{engine}/{m}" for m in modes))
)
END_SECONDS = 10.0


@dataclass(frozen=True)
class Model:
    """Files of the model: gguf, a GGUF file; folder, in Hugging Face's layout; head, an EAGLE head's folder.

    folder, head: None where there is none; engines that need one say so.
    """

    gguf: Path
    folder: Path | None
    head: Path | None
    cache: Path


def check(name: str) -> None:
    """Raise InputError for an unknown peer, or one whose draft, a GGUF file of a smaller model, is not there."""
    mode, equals, file = name.partition("=")
    require("way", repr(name), ", ".join(NAMES), mode + (equals and "=FILE") in NAMES)
    require_input(f"way {name}: {file} is not a file", not equals or Path(file).is_file())


def gguf_file(model: str | None, file: Path | None) -> Path | None:
    """Return the file that peers run: the one given, the model itself, or None for the embedded model's.

    InputError where there is no such file, or none is known of this model.
    """
    named = file or (Path(model) if model is not None and is_gguf(model) else None)
    require_input(
        f"gguf: other engines need a GGUF file of {model}, name it",
        named is not None or model is None or embedded.is_default(model),
    )
    require_input(f"gguf: {named} is not a file", named is None or named.is_file())
    return named


def engine_of(name: str) -> str:
    return name.removeprefix(PREFIX).partition("/")[0]


def python_of(name: str, folder: Path) -> Path:
    """Return the Python of a peer's environment below a folder."""
    parts = ("Scripts", "python.exe") if sys.platform == "win32" else ("bin", "python")
    return folder.joinpath(engine_of(name), *parts)


def way(name: str, folder: Path, model: Model, ends: list[int], context: int) -> Way:
    """Return a peer as a way; context: tokens of the longest prompt and its answer. One process runs all rounds."""
    running: list[Peer] = []

    def start() -> Peer:
        if not running:
            needed = {
                f"environment {engine_of(name)}": python_of(name, folder),
                SCRIPT: folder / SCRIPT,
            }
            if missing := [what for what, file in needed.items() if not file.is_file()]:
                raise BackendError(
                    f"way {name}: {folder} has no {missing[0]}; make it in a checkout with `make peers`, or name a "
                    "folder with --peers"
                )
            running.append(Peer(name, _command(name, folder, model, context), ends))
        return running[0]

    return Way(name, start, ours=False)


def _command(name: str, folder: Path, model: Model, context: int) -> list[str]:
    mode, _, draft = name.removeprefix(PREFIX).partition("=")
    command = [
        str(python_of(name, folder)),
        str(folder / SCRIPT),
        mode,
        "--gguf",
        str(model.gguf),
        "--draft",
        draft,
    ]
    if model.folder is not None:
        command += ["--folder", str(model.folder)]
    elif engine_of(name) in ("vllm", "onnxruntime"):
        raise InputError(
            f"way {name}: it needs the model as a folder in Hugging Face's layout, not only a GGUF file"
        )
    if name.endswith("/eagle3"):
        if model.head is None:
            raise InputError(f"way {name}: no EAGLE head of this model is known")
        command += ["--head", str(model.head)]
    return [
        *command,
        "--cache",
        str(model.cache),
        "--threads",
        str(torch.get_num_threads()),
        "--context",
        str(context),
    ]


class Peer:
    """Speak to an engine's process in lines of JSON. BackendError, with its last words, where it ends early."""

    def __init__(self, name: str, command: Sequence[str], ends: list[int]) -> None:
        self._name, self._ends = name, ends
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads would fill up
        threads = str(torch.get_num_threads())
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            list(command), stdin=pipe, stdout=pipe, stderr=self._said, text=True, env=environment
        )
        weakref.finalize(self, _stop, self._process)
        self.facts: dict[str, Any] = self._read()

    def __call__(self, prompt: list[int], length: int) -> Answer:
        request = json.dumps({"ids": prompt, "tokens": length, "ends": self._ends})
        began = time.perf_counter()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is nothing to read either
            print(request, file=self._process.stdin, flush=True)
        reply = self._read()
        return Answer(reply["ids"], len(prompt), time.perf_counter() - began, first=reply["first"])

    def prepare(self, tokens: int) -> None:
        """Do nothing: the context was given at the start."""

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._said.seek(0)
        last_words = self._said.read().strip().splitlines()
        raise BackendError(
            f"way {self._name}: {last_words[-1] if last_words else 'its process ended without a word'}"
        )


def _stop(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
