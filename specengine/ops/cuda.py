"""The kernels of csrc/*.cu: SALF's queue for CUDA tensors.

They stand in specengine/_cuda.so, a plain shared library behind a C interface (csrc/spec/device_abi.hpp), which is
loaded on first use; where it was not built, NVRTC compiles the queue's kernel (_nvrtc.py). BackendError where it is
missing or stale, names the build command; where there is no driver or a call fails, the CUDA error. Calls run on
torch's current stream of the tensors' device; call each once before a capture, so that its kernel is loaded. Contents
of tensors are the caller's promise, as reading them would make the host wait.
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
from specengine.ops import _nvrtc, queue
from specengine.ops._registry import by_meaning
from specengine.ops.queue import Drawn, Queues, Search
from specengine.ops.select import Candidates
from specengine.ops.tree import Nodes

LIBRARY = Path(__file__).parents[1] / "_cuda.so"
BUILD = "SPECENGINE_CUDA=1 pip install -e ."
ABI_VERSION = 3  # as in csrc/spec/device_abi.hpp
CAPACITY = 256  # largest budget of a best-first queue
DEVICE = "cuda"  # whose addresses the library takes

_P, _I, _L, _D = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
SIGNATURES: dict[str, tuple[Any, ...]] = {  # of functions that return 0 or a CUDA error code
    "spec_driver_version": (_P,),
    "spec_queues_step": (*(_P,) * 7, _I, *(_P,) * 5, _I, *(_P,) * 5, _L, _L, _D, _I, *(_P,) * 7),
}


# ---- the library


def library() -> ctypes.CDLL:
    """Return the loaded library; raises BackendError, with the build command, where it is missing, damaged or stale."""
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
    for name, arguments in SIGNATURES.items():
        getattr(opened, name).argtypes = arguments
    return opened


def check(code: int) -> None:
    """Raise BackendError where `code`, of a call into the library, is a CUDA error."""
    if code == 0:
        return
    driver = driver_version()
    hint = f"driver of CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "no NVIDIA driver was found"
    raise BackendError(f"CUDA error {code}: {library().spec_error(code).decode()} ({hint})")


def driver_version() -> int:
    """Return 1000 * major + 10 * minor of the CUDA version that the driver knows; 0 without a driver."""
    version = ctypes.c_int(0)
    library().spec_driver_version(ctypes.byref(version))
    return version.value


def implementations() -> dict[str, Callable[..., Any]]:
    """Return the op that is here; raises ImportError where neither the library nor NVRTC can be used."""
    reason = why_not_built()
    if reason and _nvrtc.find() is None:
        raise ImportError(reason.partition(";")[0])  # ops adds the build command
    return {"step_queues": step_queues}


def why_not_built() -> str:
    """Return why the library cannot be used; empty where it can."""
    try:
        library()
    except BackendError as error:
        return str(error)
    return ""


def _run(function: str, device: torch.device, *arguments: Any) -> None:
    run = getattr(library(), function)
    with torch.cuda.device(device):
        check(run(*arguments, torch.cuda.current_stream(device).cuda_stream))


def _address(name: str, tensor: Tensor, dtype: torch.dtype, least: int = 1) -> int:
    """Return the address of a contiguous CUDA tensor of `dtype` that has `least` elements or more."""
    if tensor.device.type != DEVICE or tensor.dtype is not dtype or tensor.numel() < least:
        given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        kind = str(dtype).removeprefix("torch.")
        raise InputError(f"{name}: {kind} [{least}] on {DEVICE} is needed, got {given}")
    if not tensor.is_contiguous():
        raise InputError(f"{name}: a contiguous tensor is needed, got strides {tensor.stride()}")
    return tensor.data_ptr()


# ---- best-first queues


def step_queues(
    queues: Queues,
    found: Candidates,
    frontier: Nodes,
    depths: Tensor,
    token_ids: Tensor | None,
    passes: Tensor,
    search: Search,
) -> Drawn:
    """Run in one launch. A score of NaN is passed over as -inf is: to report it would take further launches."""
    budget, device = queues.scores.shape[0], passes.device
    if budget > CAPACITY or not all(part.is_contiguous() for part in queues):
        return by_meaning(queue.step_queues, queues, found, frontier, depths, token_ids, passes, search)
    width = min(search.batch, budget)
    found = Candidates(*(part.contiguous() for part in found))
    nodes, depths = frontier.ids.contiguous(), depths.contiguous()
    token_ids = None if token_ids is None else token_ids.contiguous()
    parents, tokens, expand = torch.empty(2 * budget + width, dtype=torch.int64, device=device).split(
        [budget, budget, width]
    )
    log_probs = torch.empty(budget, device=device, dtype=torch.float32)
    counts = torch.empty(2, dtype=torch.int32, device=device)
    drawn = Drawn(parents, tokens, log_probs, counts[:1], Nodes(expand, counts[1:]))
    lists = [part.data_ptr() for part in queues], [part.data_ptr() for part in found[:4]]
    given = nodes.data_ptr(), depths.data_ptr(), None if token_ids is None else token_ids.data_ptr()
    out = [part.data_ptr() for part in (parents, tokens, log_probs, drawn.live, expand, drawn.expand.live)]
    live = found.live.data_ptr(), frontier.live.data_ptr(), passes.data_ptr()
    most = found.scores.shape[0]
    if LIBRARY.exists():
        sizes = budget, *lists[1], live[0], most, given[0], live[1], *given[1:], live[2]
        _run("spec_queues_step", device, *lists[0], *sizes, *search, *out)
    else:
        step = _nvrtc.Step(
            (_P * 7)(*lists[0]), budget, (_P * 4)(*lists[1]), most, (_P * 3)(*given), *search, (_P * 6)(*out)
        )
        _nvrtc.launch(step, live, device)
    return drawn
