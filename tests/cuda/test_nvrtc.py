"""The queue's kernel compiled at run time: NVRTC needs no device for it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from specengine import ops
from specengine.errors import BackendError
from specengine.ops import _nvrtc, cuda

needs_nvrtc = pytest.mark.skipif(_nvrtc.find() is None, reason="needs NVRTC (nvidia-cuda-nvrtc)")


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_compiles_for_the_devices_that_the_library_is_built_for(target: str) -> None:
    cubin = _nvrtc.compile_kernel(target)
    assert cubin[:4] == b"\x7fELF"
    assert b".text." + _nvrtc.KERNEL in cubin


@needs_nvrtc
def test_what_the_compiler_says_comes_with_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / _nvrtc.SOURCE).write_text("wrong source;")
    monkeypatch.setattr(_nvrtc, "sources", lambda: tmp_path)
    with pytest.raises(BackendError, match=r"of best_first.cu for sm_75: .*error"):
        _nvrtc.compile_kernel("sm_75")


def test_without_the_library_the_op_is_there_as_nvrtc_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr(_nvrtc, "find", lambda: tmp_path)
    assert set(cuda.implementations()) == {"step_queues"}
    monkeypatch.setattr(_nvrtc, "find", lambda: None)
    with pytest.raises(ImportError, match="not built"):
        cuda.implementations()


def test_step_has_the_layout_of_the_header() -> None:
    assert ctypes.sizeof(_nvrtc.Step) == 26 * 8
    assert (_nvrtc.sources() / "spec" / "device_best_first.hpp").exists()
    assert _nvrtc.LANES == cuda.CAPACITY
    assert "step_queues" in ops.OPS
