"""Kernel tests: compiled on a CUDA device, elsewhere in Triton's interpreter, which leaves out bfloat16 arithmetic."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()


def _interpret() -> None:
    """Let Triton run kernels on the CPU; it reads the variable when a kernel is decorated, its own ones included."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        if not name.startswith("triton._C"):
            del sys.modules[name]  # transformers has imported it by now, decorated for the GPU


if INTERPRETED:
    _interpret()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a device all tests of this folder are tests of the device."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if not INTERPRETED:
            item.add_marker(pytest.mark.gpu)
        if config.pluginmanager.hasplugin("pytest_cov") and item.path.name != "test_provider.py":
            item.add_marker(pytest.mark.no_cover)  # it halves the interpreter's speed, and none of it is measured


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
