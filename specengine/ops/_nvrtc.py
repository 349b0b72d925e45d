"""The kernel of csrc/best_first.cu compiled at run time, where the library was not built at installation.

NVRTC comes with torch's CUDA wheels; the sources are installed beside specengine (specengine_csrc). The kernel is
compiled once per process and kind of device, in about a second, and launched by the driver's interface on torch's
stream. BackendError where the sources are refused or the driver reports an error.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specengine.errors import BackendError

SOURCE, KERNEL = "best_first.cu", b"step_kernel"
LANES = 256  # kCapacity of csrc/spec/device_best_first.hpp
PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvrtc")  # that hold lib/libnvrtc.so, of CUDA 13 and of 12
DRIVER = "libcuda.so.1"
HEADERS = {  # in place of a standard library, which NVRTC has not
    "cmath": "#define INFINITY __builtin_bit_cast(float, 0x7f800000)\n",
    "cstdint": "using int32_t = int;\nusing int64_t = long long;\nusing uint16_t = unsigned short;\n",
}

_P, _L = ctypes.c_void_p, ctypes.c_int64


class Step(ctypes.Structure):
    """spec::Step of csrc/spec/device_best_first.hpp, member by member."""

    _fields_ = (
        ("queues", _P * 7),
        ("budget", _L),
        ("found", _P * 4),
        ("most", _L),
        ("frontier", _P * 3),  # nodes, depths, token ids
        ("batch", _L),
        ("max_depth", _L),
        ("threshold", ctypes.c_double),
        ("fill", ctypes.c_bool),
        ("out", _P * 6),
    )


def find() -> Path | None:
    """Return NVRTC's library, if this environment has one and the sources are installed."""
    if sources() is None:
        return None
    folders = [Path(place) / "lib" for package in PACKAGES for place in _places(package)]
    folders.append(Path(torch.__file__).parent / "lib")  # of wheels that bring their own
    found = (file for folder in folders for file in sorted(folder.glob("libnvrtc*.so*")))
    return next((file for file in found if "builtins" not in file.name and ".alt." not in file.name), None)


def sources() -> Path | None:
    """Return the folder of csrc/ as it is installed, or of the repository."""
    places = [*(Path(place) for place in _places("specengine_csrc")), Path(__file__).parents[2] / "csrc"]
    return next((place for place in places if (place / SOURCE).exists()), None)


def _places(package: str) -> Iterator[str]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the package around it
        return
    yield from (spec and spec.submodule_search_locations) or ()


@cache
def compile_kernel(target: str) -> bytes:
    """Return the cubin for sm_80, sm_90 and so on; needs no device."""
    path, folder = find(), sources()
    if path is None or folder is None:
        raise BackendError(f"NVRTC or csrc/{SOURCE} was not found")
    nvrtc = ctypes.CDLL(str(path))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    texts, names = ([part.encode() for part in parts] for parts in (HEADERS.values(), HEADERS))
    count = len(HEADERS)
    arrays = (ctypes.c_char_p * count)(*texts), (ctypes.c_char_p * count)(*names)
    source = (folder / SOURCE).read_bytes()
    _insist(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.encode(), count, *arrays), "create")
    try:
        options = [f"--gpu-architecture={target}", "--std=c++17", f"--include-path={folder}"]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if code := nvrtc.nvrtcCompileProgram(program, len(options), given):
            _insist(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "log")
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BackendError(f"NVRTC error {code} of {SOURCE} for {target}: {log.value.decode()[:2000]}")
        _insist(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "size")
        cubin = ctypes.create_string_buffer(size.value)
        _insist(nvrtc.nvrtcGetCUBIN(program, cubin), "cubin")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def launch(step: Step, counts: tuple[int, int, int], device: torch.device) -> None:
    """Run one pass; counts: addresses of found.live, frontier.live and passes."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        start(_function(torch.cuda.current_device()), step, counts, stream)


def start(function: ctypes.c_void_p, step: Step, counts: tuple[int, int, int], stream: int) -> None:
    values: list[Any] = [step, *(ctypes.c_void_p(count) for count in counts)]
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    _insist(
        _driver().cuLaunchKernel(function, 1, 1, 1, LANES, 1, 1, 0, ctypes.c_void_p(stream), addresses, None), "run"
    )


@cache
def _function(index: int) -> ctypes.c_void_p:
    """Return the kernel in the context of the current device, which must be that one."""
    major, minor = torch.cuda.get_device_capability(index)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _insist(_driver().cuModuleLoadData(ctypes.byref(module), compile_kernel(f"sm_{major}{minor}")), "load")
    _insist(_driver().cuModuleGetFunction(ctypes.byref(function), module, KERNEL), "find")
    return function


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(DRIVER)


def _insist(code: int, what: str) -> None:
    if code:
        raise BackendError(f"error {code} of the CUDA compiler or driver: {what} {SOURCE}")
