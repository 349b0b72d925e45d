"""Servers for clients that others wrote, in a process of their own: these tests need nothing of specengine themselves.

The server runs with the Python in SPECENGINE_SERVER_PYTHON, else with that of the tests. `make test-clients` runs them
where the clients are installed; a client that is not is skipped.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("httpx")
from tests.serve.processes import ROOT, free_port, running

PYTHON = os.environ.get("SPECENGINE_SERVER_PYTHON", sys.executable)
KEY = "a-key"


def address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def saved(folder: Path, *options: str) -> Path:
    """Save a tiny model of random weights there; `--tools`: its chat template takes tools; `--other`: other weights."""
    command = [PYTHON, "-m", "tests.serve.tiny_model", str(folder), *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@contextlib.contextmanager
def serving(arguments: Sequence[str]) -> Iterator[str]:
    """Run a server with these arguments; its address."""
    _require_extra()
    port = free_port()
    with running(arguments, port=port, python=PYTHON, seconds=300):
        yield address(port)


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a model named `tiny` that answers random bytes: for shapes, not for meaning. No key is needed."""
    folder = saved(tmp_path_factory.mktemp("models") / "tiny")
    limits = ["--default-max-tokens", "8", "--max-tokens", "256", "--queue", "64"]
    with serving([str(folder), "--draft", "none", "--strict-model", *limits]) as server:
        yield server


@pytest.fixture(scope="session")
def calling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve such a model with a chat template that takes tools; its name is any."""
    folder = saved(tmp_path_factory.mktemp("models") / "calling", "--tools")
    limits = ["--default-max-tokens", "64", "--queue", "64"]
    with serving([str(folder), "--draft", "none", *limits]) as server:
        yield server


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[str]:
    """Serve a model that says what tests.serve.scripted makes it say: it calls tools where it may, and ends."""
    _require_extra()
    command, pipe = [PYTHON, "-m", "tests.serve.scripted"], subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture(scope="session")
def default_server() -> Iterator[str]:
    """Serve the default model, named `smol`, for tests marked `model`. KEY is needed."""
    with serving(["--served-model-name", "smol", "--api-key", KEY]) as server:
        yield server


def _require_extra() -> None:
    if sys.executable == PYTHON and not all(
        map(importlib.util.find_spec, ("torch", "fastapi", "uvicorn"))
    ):
        pytest.skip(
            "the server cannot run here: SPECENGINE_SERVER_PYTHON names no Python that has it"
        )
