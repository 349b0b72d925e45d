"""The kernels compiled at run time: NVRTC needs no device for it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from specengine import ops
from specengine.errors import BackendError
from specengine.ops import cuda

OPS = {"step_queues", "extract", "start_search", "grow_likely", "keep_likely", "count_outcomes"}
needs_nvrtc = pytest.mark.skipif(cuda.find() is None, reason="needs NVRTC (nvidia-cuda-nvrtc)")


KERNELS = (cuda.STEP, cuda.LEVEL, cuda.KEEP, cuda.EXTRACT, cuda.OUTCOME)


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_compiles_for_devices(target: str) -> None:
    for kernel in KERNELS:
        cubin = cuda.compile_source(kernel.source, target)
        assert cubin[:4] == b"\x7fELF"
        assert f".text.{kernel.name}".encode() in cubin


@needs_nvrtc
def test_what_the_compiler_says_comes_with_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / cuda.STEP.source).write_text("wrong source;")
    monkeypatch.setattr(cuda, "sources", lambda: tmp_path)
    with pytest.raises(BackendError, match=r"of best_first.cu for sm_75: .*error"):
        cuda.compile_source(cuda.STEP.source, "sm_75")


def test_the_ops_are_there_where_nvrtc_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "find", lambda: tmp_path)
    assert set(cuda.implementations()) == OPS
    monkeypatch.setattr(cuda, "find", lambda: None)
    with pytest.raises(ImportError, match="NVRTC, of torch's CUDA wheels, was not found"):
        cuda.implementations()


def test_structures_have_the_size_of_the_headers() -> None:
    text = "".join(file.read_text() for file in (cuda.sources() / "spec").glob("device_*.hpp"))
    for structure in (
        cuda.BestFirstStep,
        cuda.LevelArgs,
        cuda.KeepArgs,
        cuda.ExtractArgs,
        cuda.OutcomeArgs,
    ):
        name = str(structure.__doc__).removeprefix("spec::").split()[0]
        assert f"sizeof({name}) == {ctypes.sizeof(structure) // 8} * 8" in text
    assert cuda.STEP.lanes == cuda.CAPACITY
    assert f"kCapacity = {cuda.CAPACITY};" in text
    assert f"kRuleLanes = {cuda.LEVEL.lanes};" in text
    assert f"kMostShared = {cuda.MAX_SHARED // 1024} * 1024;" in text
    assert set(ops.OPS) >= OPS
