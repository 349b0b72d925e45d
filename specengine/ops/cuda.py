"""The kernels of csrc/*.cu: ops for CUDA tensors, and the same without a host read for captured graphs.

They stand in specengine/_cuda.so, a plain shared library behind a C interface (csrc/spec/device_abi.hpp), which is
loaded on first use. BackendError where it is missing or stale, names the build command; where there is no driver or
a call fails, the CUDA error. Calls run on torch's current stream of the tensors' device; call each once before a
capture, so that its kernel is loaded. What they check is type, dtype, shape and contiguity; contents are the caller's
promise, as reading them would make the host wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specengine.errors import BackendError, InputError

LIBRARY = Path(__file__).parents[1] / "_cuda.so"
BUILD = "SPECENGINE_CUDA=1 pip install -e ."
ABI_VERSION = 1  # as in csrc/spec/device_abi.hpp
CAPACITY = 256  # largest budget of a best-first queue
MOST_WALKED = 1024  # largest tree of a walk
DEVICE = "cuda"  # whose addresses the library takes

_P, _I, _L, _D = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
SIGNATURES: dict[str, tuple[Any, ...]] = {  # of functions that return 0 or a CUDA error code
    "spec_driver_version": (_P,),
    "spec_queues_start": (_P, _I, _I, _I, _P, _P),
    "spec_queues_push": (_P, _P, _P, _P, _P, _P, _P, _P, _I, _P, _P, _P),
    "spec_queues_draw": (_P, _I, _D, _P, _P, _P, _P, _P, _P, _P, _P, _P),
    "spec_tree_append": (*(_P,) * 7, _I, _I, *(_P,) * 6, _I, *(_P,) * 5),
    "spec_walk": (_P, _P, _P, _P, _I, _P, _P, _P, _P),
    "spec_compact_kv": (_P, _L, _L, _L, _P, _P, _P, _P),
    "spec_loop_create": (_P, _P, _P, _P, _P, _I, _P),
    "spec_loop_launch": (_P, _P),
    "spec_loop_destroy": (_P,),
}


# ---- the library


def library() -> ctypes.CDLL:
    """The loaded library; BackendError, with the build command, where it is missing, damaged or of other sources."""
    return _open(LIBRARY)


@cache
def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise BackendError(f"{path} is not built; build it, with nvcc of CUDA 12.4 or later, by: {BUILD}")
    try:
        opened = ctypes.CDLL(str(path))
        version = opened.spec_abi_version()
    except (OSError, AttributeError) as error:
        raise BackendError(f"{path} cannot be loaded ({error}); build it again by: {BUILD}") from error
    if version != ABI_VERSION:
        raise BackendError(f"{path} has interface {version}, {ABI_VERSION} is needed; build it again by: {BUILD}")
    opened.spec_error.restype, opened.spec_error.argtypes = ctypes.c_char_p, (_I,)
    opened.spec_queues_bytes.restype = _L
    for name, arguments in SIGNATURES.items():
        getattr(opened, name).argtypes = arguments
    return opened


def check(code: int) -> None:
    """BackendError where `code`, of a call into the library, is a CUDA error."""
    if code == 0:
        return
    driver = driver_version()
    hint = f"driver of CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "no NVIDIA driver was found"
    raise BackendError(f"CUDA error {code}: {library().spec_error(code).decode()} ({hint})")


def driver_version() -> int:
    """1000 * major + 10 * minor of the CUDA version that the driver knows; 0 without a driver."""
    version = ctypes.c_int(0)
    library().spec_driver_version(ctypes.byref(version))
    return version.value


def implementations() -> dict[str, Callable[..., Any]]:
    """What `ops` finds here; ImportError where the library cannot be used."""
    try:
        library()
    except BackendError as error:
        raise ImportError(str(error).partition(";")[0]) from error  # ops adds the build command
    return {}


def _run(function: str, device: torch.device, *arguments: Any) -> None:
    run = getattr(library(), function)
    with torch.cuda.device(device):
        check(run(*arguments, torch.cuda.current_stream(device).cuda_stream))


def _address(name: str, tensor: Tensor, dtype: torch.dtype, least: int = 1) -> int:
    """The address of a contiguous CUDA tensor of `dtype` that has `least` elements or more."""
    if tensor.device.type != DEVICE or tensor.dtype is not dtype or tensor.numel() < least:
        given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        kind = str(dtype).removeprefix("torch.")
        raise InputError(f"{name}: {kind} [{least}] on {DEVICE} is needed, got {given}")
    if not tensor.is_contiguous():
        raise InputError(f"{name}: a contiguous tensor is needed, got strides {tensor.stride()}")
    return tensor.data_ptr()


# ---- captured loop


class Loop:
    """One launch: `before`; then `body` while `flag` is not 0, at most `limit` times; then `after`.

    The graphs are captured with torch.cuda.CUDAGraph(keep_graph=True), hold no host function and no random numbers of
    torch, and are kept alive here, as they own the memory that their kernels use. flag, rounds: int32 [1] on the
    device; `before` or a round sets the flag, `rounds` says afterwards how many there were. Needs a driver of CUDA 12.4
    or later.
    """

    def __init__(
        self,
        body: torch.cuda.CUDAGraph,
        flag: Tensor,
        rounds: Tensor,
        limit: int,
        before: torch.cuda.CUDAGraph | None = None,
        after: torch.cuda.CUDAGraph | None = None,
    ) -> None:
        if limit < 1:
            raise InputError(f"limit: got {limit}, accepted 1 or more")
        addresses = _address("flag", flag, torch.int32), _address("rounds", rounds, torch.int32)
        self._kept = body, flag, rounds, before, after
        self._device = flag.device
        self._loop = ctypes.c_void_p()
        graphs = [graph and graph.raw_cuda_graph() for graph in (before, body, after)]
        with torch.cuda.device(self._device):
            check(library().spec_loop_create(*graphs, *addresses, limit, ctypes.byref(self._loop)))

    def launch(self) -> None:
        _run("spec_loop_launch", self._device, self._loop)

    def __del__(self) -> None:
        if getattr(self, "_loop", None):  # none where the construction failed
            library().spec_loop_destroy(self._loop)
