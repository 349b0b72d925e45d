"""The kernels of csrc/*.cu on the host, where the lanes of a block run in lock step."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from specengine.ops import cuda
from tests.csrc.test_spec import COMPILER, CSRC


def built(folder: Path) -> Path:
    """The library, compiled into that folder; skips the test where it cannot be."""
    if COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C++ compiler (g++ or clang++) on the path")
    library, source = folder / "driver.so", CSRC / "tests" / "host_device_library.cpp"
    command = [
        COMPILER,
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        f"-I{CSRC}",
        str(source),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def take(library: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the ops launch their kernels as those that NVRTC compiles, which this library stands in for."""
    driver = ctypes.CDLL(str(library))
    kernels = cuda.STEP, cuda.LEVEL, cuda.KEEP, cuda.OUTCOME, cuda.EXTRACT
    patch.setattr(cuda, "_driver", lambda: driver)
    patch.setattr(cuda, "find", lambda: library)

    def launch(kernel: cuda.Kernel, values: tuple, _: object, shared: int = 0) -> None:
        cuda.start(kernel, ctypes.c_void_p(kernels.index(kernel)), values, 0, shared)

    patch.setattr(cuda, "launch", launch)
