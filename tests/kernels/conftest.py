"""Kernel tests: compiled on a CUDA device, elsewhere in Triton's interpreter, which leaves out bfloat16 arithmetic."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import patch_once_a_launch
from tests.kernels.products import fix_the_order

INTERPRETED = not torch.cuda.is_available()


def _interpret() -> None:
    """Let Triton run kernels on the CPU; it reads the variable when a kernel is decorated, its own ones included."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        if not name.startswith("triton._C"):
            del sys.modules[name]  # transformers has imported it by now, decorated for the GPU


if INTERPRETED:
    _interpret()
    with contextlib.suppress(ImportError):  # without triton the tests are skipped
        fix_the_order()
        patch_once_a_launch()


# for a device that need not be there
COMPILED_ANYWHERE = "test_cards.py", "test_compiled.py", "test_programs.py"


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a device the tests of this folder are tests of the device."""
    for item in items:
        here = (
            Path(__file__).parent in item.path.parents and item.path.name not in COMPILED_ANYWHERE
        )
        if here and not INTERPRETED:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if INTERPRETED:  # another folder's tests may have imported the interpreter anew
        with contextlib.suppress(ImportError):
            fix_the_order()
            patch_once_a_launch()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _not_traced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Coverage measures specengine: of these tests the provider's. Its tracer halves the interpreter's speed.

    Where cases are drawn, each op's first one is another test's.
    """
    tracer = sys.gettrace()
    if not type(tracer).__module__.startswith("coverage") or (
        request.path.name == "test_provider.py" and not hasattr(request.function, "hypothesis")
    ):
        yield
        return
    sys.settrace(None)
    yield
    sys.settrace(tracer)
