"""llama.cpp on a GGUF file of the same model: through its Python binding, else through its server."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from specengine.benchmark.answers import Answer
from specengine.benchmark.ways import Way
from specengine.checkpoints import embedded
from specengine.checkpoints.pretrained import is_gguf
from specengine.engine import Engine
from specengine.errors import BackendError, InputError

LLAMA_CPP = "llama.cpp"
SERVER = "llama-server"
START_SECONDS = 120.0


def refuse_missing() -> None:
    """Raise BackendError where llama.cpp is not installed."""
    if not has_binding() and shutil.which(SERVER) is None:
        raise BackendError(
            f"way {LLAMA_CPP}: found neither {SERVER} on the path nor the package llama-cpp-python; install one of "
            f"them, or leave {LLAMA_CPP} out"
        )


def gguf_file(model: str | None, given: Path | None) -> Path | None:
    """Return the file that llama.cpp runs: the one given, the model itself, or None for the embedded model's.

    InputError where there is no such file, or none is known of this model.
    """
    named = given or (Path(model) if model is not None and is_gguf(model) else None)
    if named is None and model is not None and not embedded.is_default(model):
        raise InputError(f"gguf: way {LLAMA_CPP} needs a GGUF file of {model}, name it")
    if named is not None and not named.is_file():
        raise InputError(f"gguf: {named} is not a file")
    return named


def way(plain: Engine, options: dict[str, Any], ends: list[int], file: Path | None, context: int) -> Way:
    """Return llama.cpp as a way; context: tokens of the longest prompt and its answer. One process runs all rounds."""
    made: list[Binding | Server] = []

    def start() -> Binding | Server:
        if not made:
            found = file or embedded.gguf()
            cls: type[Binding | Server] = Binding if has_binding() else Server
            made.append(cls(found, context, plain.target.device, options, ends))
        return made[0]

    return Way(LLAMA_CPP, start, ours=False)


class Binding:
    """Decoding through llama-cpp-python, in this process."""

    def __init__(
        self, file: Path, context: int, device: torch.device, options: dict[str, Any], ends: Collection[int]
    ) -> None:
        import llama_cpp

        threads = torch.get_num_threads()
        self.llama = llama_cpp.Llama(
            str(file),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0 if device.type == "cpu" else -1,
            logits_all=False,
            verbose=False,
        )
        self._options, self._ends = options, ends
        version = importlib.metadata.version("llama-cpp-python")
        system = llama_cpp.llama_print_system_info().decode().strip()
        self.facts = {"policy": f"llama-cpp-python {version}, {file.name}, {threads} threads", "system": system}

    def __call__(self, prompt: list[int], length: int) -> Answer:
        began = time.perf_counter()
        first, tokens = None, list[int]()
        for token in decode(self.llama, prompt, length, self._ends, self._options):
            first = first or time.perf_counter() - began
            tokens.append(token)
        return Answer(tokens, len(prompt), time.perf_counter() - began, first=first)

    def prepare(self, tokens: int) -> None:
        """Do nothing: the context was given at the start."""


def decode(llama: Any, prompt: list[int], length: int, ends: Collection[int], options: dict[str, Any]) -> Iterator[int]:
    """Yield new tokens of a llama_cpp.Llama, up to `length` of them or the first of `ends`."""
    llama.reset()  # or it would keep what it has of the prompt from the round before
    sampling = {"temp": options.get("temperature", 0.0), "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if options.get("seed") is not None:
        llama.set_seed(options["seed"])
    for count, token in enumerate(llama.generate(prompt, repeat_penalty=1.0, **sampling), start=1):
        yield token
        if count == length or token in ends:
            return


class Server:
    """Decoding by a `llama-server` that this object starts, and stops when it is let go."""

    def __init__(
        self, file: Path, context: int, device: torch.device, options: dict[str, Any], ends: Collection[int]
    ) -> None:
        threads = torch.get_num_threads()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._options, self._ends = options, ends
        command = [SERVER, "-m", str(file), "--host", "127.0.0.1", "--port", str(port), "-c", str(context), "-np", "1"]
        command += ["-t", str(threads), "-ngl", "0" if device.type == "cpu" else "999"]
        log = tempfile.TemporaryFile()  # noqa: SIM115  the server writes to it for as long as it runs
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        weakref.finalize(self, _stop, process)
        self._wait(process, log)
        self.facts = {"policy": f"{SERVER}, {file.name}, {threads} threads"}

    def __call__(self, prompt: list[int], length: int) -> Answer:
        body = {
            "prompt": prompt,
            "n_predict": length,
            "temperature": self._options.get("temperature", 0.0),
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            "seed": self._options.get("seed", 0),
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self._address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request) as reply:
            found = json.load(reply)
        seconds, tokens = time.perf_counter() - began, found["tokens"]
        if found.get("stop_type") == "eos" and not set(tokens[-1:]) & set(self._ends):
            tokens += list(self._ends)[:1]  # which the server leaves out
        return Answer(tokens, len(prompt), seconds)

    def prepare(self, tokens: int) -> None:
        """Do nothing: the context was given at the start."""

    def _wait(self, process: subprocess.Popen[bytes], log: Any) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._address}/health", timeout=5):
                    return
            except OSError:  # not listening yet, or still loading
                time.sleep(0.1)
        process.kill()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines() or ["it gave no message"]
        raise BackendError(f"way {LLAMA_CPP}: {SERVER} did not start: {said[-1]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


def has_binding() -> bool:
    """Return whether llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None
