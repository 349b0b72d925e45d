"""csrc/*.cu: the interface, what nvcc makes of it, and the library without a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from specengine import ops
from specengine.errors import BackendError
from specengine.ops import cuda

CSRC = Path(__file__).resolve().parents[2] / "csrc"
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc on the path")
KERNELS = {"step_kernel", "level_kernel", "keep_kernel", "extract_kernel", "outcome_kernel"}
OPS = {"step_queues", "extract", "start_search", "grow_likely", "keep_likely", "count_outcomes"}


@pytest.fixture(scope="module")
def built(setup_script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library, by the command of setup.py with warnings as errors, and what ptxas says of it."""
    library = tmp_path_factory.mktemp("cuda") / "_cuda.so"
    sources = sorted(str(source) for source in CSRC.glob("*.cu"))
    command = setup_script.nvcc_command(NVCC, sources, str(library), str(CSRC))
    strict = ["-Werror", "all-warnings", "-Xptxas", "-v"]
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # of a watched suite
    done = subprocess.run([*command, *strict], capture_output=True, text=True, timeout=300, env=plain)
    assert done.returncode == 0, done.stderr
    return library, done.stderr + done.stdout


@pytest.fixture
def library(built: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setattr(cuda, "LIBRARY", built[0])
    return cuda.library()


def declarations() -> dict[str, str]:
    """Names and arguments of what csrc/spec/device_abi.hpp exports."""
    text = re.sub(r"//.*", "", (CSRC / "spec" / "device_abi.hpp").read_text(encoding="utf-8"))
    return dict(re.findall(r"^SPEC_EXPORT [\w ]+?[ *]+(\w+)\(([^)]*)\);", text, re.MULTILINE))


def ctype(argument: str) -> type:
    if "*" in argument:
        return ctypes.c_void_p
    return {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "double": ctypes.c_double}[argument.split()[0]]


# ---- the interface


def test_signatures_are_those_of_the_header() -> None:
    declared = {name: [ctype(one.strip()) for one in rest.split(",") if one] for name, rest in declarations().items()}
    assert len(declared) == 8
    for name, arguments in cuda.SIGNATURES.items():
        assert list(arguments) == declared.pop(name), name
    assert set(declared) == {"spec_abi_version", "spec_error"}


def test_numbers_are_those_of_the_headers() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (CSRC / "spec").glob("device_*.hpp"))
    assert f"SPEC_ABI_VERSION {cuda.ABI_VERSION} " in text
    assert f"kCapacity = {cuda.CAPACITY};" in text


# ---- what nvcc makes of it


@needs_nvcc
def test_compiles_for_each_target_without_spills(built: tuple[Path, str]) -> None:
    report = built[1]
    compiled = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", report)
    for target in ("sm_80", "sm_90a"):
        names = " ".join(name for name, one in compiled if one == target)
        assert all(kernel in names for kernel in KERNELS), target
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(spills) == len(compiled)
    assert set(spills) == {("0", "0", "0")}
    assert max(int(count) for count in re.findall(r"Used (\d+) registers", report)) <= 64


@needs_nvcc
def test_exports_the_interface_alone(built: tuple[Path, str]) -> None:
    done = subprocess.run(["nm", "-D", "--defined-only", built[0]], capture_output=True, text=True, check=True)
    assert {line.split()[-1] for line in done.stdout.splitlines()} == set(declarations())


@needs_nvcc
def test_library_needs_neither_cuda_nor_torch_to_load(built: tuple[Path, str]) -> None:
    done = subprocess.run(["readelf", "-d", built[0]], capture_output=True, text=True, check=True)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", done.stdout)
    assert needed
    assert not [name for name in needed if "cuda" in name or "torch" in name]


# ---- where something is missing


def test_library_that_is_not_built_names_the_build_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "_cuda.so")
    monkeypatch.setattr(cuda._nvrtc, "find", lambda: None)
    with pytest.raises(BackendError, match=r"not built; .* SPECENGINE_CUDA=1 pip install"):
        cuda.library()
    with pytest.raises(ImportError, match="not built"):
        cuda.implementations()


def test_library_that_is_damaged_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "_cuda.so"
    damaged.write_bytes(b"nothing that loads")
    monkeypatch.setattr(cuda, "LIBRARY", damaged)
    with pytest.raises(BackendError, match=r"cannot be loaded .* build it again"):
        cuda.library()


@needs_nvcc
def test_library_of_other_sources_says_so(built: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    older = built[0].with_name("older.so")
    shutil.copy(built[0], older)
    monkeypatch.setattr(cuda, "LIBRARY", older)
    monkeypatch.setattr(cuda, "ABI_VERSION", cuda.ABI_VERSION + 1)
    with pytest.raises(BackendError, match="interface"):
        cuda.library()


def step(library: ctypes.CDLL, budget: int, batch: int = 10) -> int:
    """The code of a step of null pointers."""
    nothing = [None] * 7
    return library.spec_queues_step(*nothing, budget, *nothing[:5], 59, *nothing[:5], batch, 9, 0.0, 0, *nothing)


@needs_nvcc
def test_calls_without_a_driver_give_a_clean_error(library: ctypes.CDLL) -> None:
    if cuda.driver_version():
        pytest.skip("there is a driver")
    with pytest.raises(BackendError, match=r"CUDA error \d+: .*no NVIDIA driver was found"):
        cuda.check(step(library, 60))
    cuda.check(0)


@needs_nvcc
def test_sizes_outside_the_capacity_are_refused(library: ctypes.CDLL) -> None:
    invalid = 1  # cudaErrorInvalidValue
    assert step(library, cuda.CAPACITY + 1) == step(library, 0) == step(library, 60, batch=0) == invalid


@needs_nvcc
def test_provider_offers_ops_of_that_name(library: ctypes.CDLL) -> None:
    assert set(cuda.implementations()) <= set(ops.backends())
    assert set(cuda.implementations()) == OPS
