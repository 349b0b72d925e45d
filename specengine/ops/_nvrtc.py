"""The kernels of csrc/*.cu, compiled at run time.

NVRTC comes with torch's CUDA wheels; the sources are installed next to specengine (specengine_csrc). A source is
compiled once per process and kind of device, in about a second, and its kernels are launched by the driver's interface
on torch's stream. BackendError where the sources are refused or the driver reports an error.
"""

import ctypes
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specengine.errors import BackendError


class Kernel(NamedTuple):
    """A kernel of one block: its source below csrc/, its name, and the lanes of the block."""

    source: str
    name: str
    lanes: int


STEP = Kernel("best_first.cu", "step_kernel", 256)  # kCapacity of csrc/spec/device_best_first.hpp
LEVEL, KEEP, EXTRACT, OUTCOME = (  # kRuleLanes of csrc/spec/device_worth.hpp
    Kernel("worth.cu", name, 512)
    for name in ("level_kernel", "keep_kernel", "extract_kernel", "outcome_kernel")
)
PLAIN_SHARED = 48 * 1024  # bytes of a block's memory that a launch has without asking
ASKS_FOR_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvrtc")  # that hold lib/libnvrtc.so, of CUDA 13 and of 12
DRIVER = "libcuda.so.1"
HEADERS = {  # in place of a standard library, which NVRTC has not
    "cmath": "#define INFINITY __builtin_bit_cast(float, 0x7f800000)\n"
    "#define NAN __builtin_bit_cast(float, 0x7fc00000)\n",
    "cstdint": "using int32_t = int;\nusing int64_t = long long;\nusing uint8_t = unsigned char;\n"
    "using uint16_t = unsigned short;\nusing uint32_t = unsigned;\nusing uint64_t = unsigned long long;\n",
}

_P, _L, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class BestFirstStep(ctypes.Structure):
    """spec::Step of csrc/spec/device_best_first.hpp, member by member."""

    _fields_ = (
        ("queues", _P * 7),
        ("budget", _L),
        ("found", _P * 4),
        ("most", _L),
        ("frontier", _P * 3),  # nodes, depths, token ids
        ("batch", _L),
        ("max_depth", _L),
        ("threshold", _D),
        ("fill", ctypes.c_bool),
        ("out", _P * 6),
    )


class LevelArgs(ctypes.Structure):
    """spec::LevelArgs of csrc/spec/device_worth.hpp, member by member."""

    _fields_ = (
        ("tree", _P * 6),
        ("words", _L),
        ("capacity", _L),
        ("counters", _P * 3),  # size, passes, overflow
        ("frontier", _P * 2),
        ("rows", _L),
        ("children", _P * 2),  # stated, columns
        ("places", _L),
        ("ids_and_marks", _P * 2),
        ("stride", _L),
        ("counts", _P * 3),  # table, profile, group
        ("notes", _P * 5),
        ("seconds", _P * 2),  # drafting, of passes
        ("prices", _P * 2),
        ("nodes", _L),
        ("width", _L),
        ("widths", _P),
        ("tried", _L),
        ("least", _D),
        ("most", _L),
        ("rounds", _L),
        ("max_passes", _L),
        ("out", _P * 2),
        ("begins", _L),
    )


class KeepArgs(ctypes.Structure):
    """spec::KeepArgs of csrc/spec/device_worth.hpp, member by member."""

    _fields_ = (
        ("tree", _P * 2),
        ("capacity", _L),
        ("price", _P),
        ("nodes", _L),
        ("most", _L),
        ("out", _P * 3),
    )


class ExtractArgs(ctypes.Structure):
    """spec::ExtractArgs of csrc/spec/device_worth.hpp, member by member."""

    _fields_ = (
        ("tree", _P * 6),
        ("words", _L),
        ("nodes", _P * 2),  # and how many are live
        ("rows", _L),
        ("out", _P * 6),
        ("words_out", _L),
    )


class OutcomeArgs(ctypes.Structure):
    """spec::OutcomeArgs of csrc/spec/device_worth.hpp, member by member."""

    _fields_ = (
        ("tree", _P * 4),  # tokens, parents, edges, size
        ("capacity", _L),
        ("path", _P * 3),  # nodes, chosen, live
        ("width", _L),
        ("counts", _P * 6),
        ("notes", _P * 4),  # without those that wait
        ("throughput", _P * 5),  # verify, draft, their prices, recent
        ("verified", _L),
        ("drafted", _L),
        ("cycle", _P * 3),  # drafting, overhead, verified
        ("memory", _D),
    )


def find() -> Path | None:
    """Return NVRTC's library, if this environment has one and the sources are installed."""
    if sources() is None:
        return None
    folders = [Path(place) / "lib" for package in PACKAGES for place in _places(package)]
    folders.append(Path(torch.__file__).parent / "lib")  # of wheels that bring their own
    libraries = (file for folder in folders for file in sorted(folder.glob("libnvrtc*.so*")))
    return next(
        (file for file in libraries if "builtins" not in file.name and ".alt." not in file.name),
        None,
    )


def sources() -> Path | None:
    """Return the folder of csrc/ as it is installed, or of the repository."""
    places = [
        *(Path(place) for place in _places("specengine_csrc")),
        Path(__file__).parents[2] / "csrc",
    ]
    return next((place for place in places if (place / STEP.source).exists()), None)


def _places(package: str) -> Iterator[str]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the package around it
        return
    yield from (spec and spec.submodule_search_locations) or ()


@cache
def compile_source(source: str, target: str) -> bytes:
    """Return the cubin for sm_80, sm_90 and so on; needs no device."""
    path, folder = find(), sources()
    if path is None or folder is None:
        raise BackendError(f"NVRTC or csrc/{source} was not found")
    for builtins in path.parent.glob(
        "libnvrtc-builtins.so*"
    ):  # which NVRTC asks for by name, wherever it lies itself
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(str(path))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    count = len(HEADERS)
    texts = (ctypes.c_char_p * count)(*(text.encode() for text in HEADERS.values()))
    names = (ctypes.c_char_p * count)(*(name.encode() for name in HEADERS))
    text = (folder / source).read_bytes()

    def insist(code: int, what: str) -> None:
        _insist(code, what, source)

    insist(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), count, texts, names),
        "create",
    )
    try:
        options = [
            f"--gpu-architecture={target}",
            "--std=c++17",
            "--fmad=false",
            f"--include-path={folder}",
        ]
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if code := nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            insist(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "log")
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BackendError(
                f"NVRTC error {code} of {source} for {target}: {log.value.decode()[:2000]}"
            )
        insist(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "size")
        cubin = ctypes.create_string_buffer(size.value)
        insist(nvrtc.nvrtcGetCUBIN(program, cubin), "cubin")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def launch(kernel: Kernel, values: tuple[Any, ...], device: torch.device, shared: int = 0) -> None:
    """Run a kernel. values: its arguments, structures and addresses; shared: bytes of memory that its block needs."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        function = _function(kernel, torch.cuda.current_device())
        if shared > PLAIN_SHARED:
            _insist(
                _driver().cuFuncSetAttribute(function, ASKS_FOR_SHARED, shared),
                "give memory to",
                kernel.source,
            )
        start(kernel, function, values, stream, shared)


def start(
    kernel: Kernel, function: ctypes.c_void_p, values: tuple[Any, ...], stream: int, shared: int
) -> None:
    arguments = [
        value if isinstance(value, ctypes.Structure) else ctypes.c_void_p(value) for value in values
    ]
    addresses = (ctypes.c_void_p * len(arguments))(
        *(ctypes.addressof(value) for value in arguments)
    )
    _insist(
        _driver().cuLaunchKernel(
            function, 1, 1, 1, kernel.lanes, 1, 1, shared, ctypes.c_void_p(stream), addresses, None
        ),
        "run",
        kernel.source,
    )


@cache
def _function(kernel: Kernel, index: int) -> ctypes.c_void_p:
    """Return the kernel in the context of the current device, which must be that one."""
    function = ctypes.c_void_p()
    status = _driver().cuModuleGetFunction(
        ctypes.byref(function), _module(kernel.source, index), kernel.name.encode()
    )
    _insist(status, "find", kernel.source)
    return function


@cache
def _module(source: str, index: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(index)
    module = ctypes.c_void_p()
    loaded = _driver().cuModuleLoadData(
        ctypes.byref(module), compile_source(source, f"sm_{major}{minor}")
    )
    _insist(loaded, "load", source)
    return module


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(DRIVER)


def _insist(code: int, what: str, source: str) -> None:
    if code:
        raise BackendError(f"error {code} of the CUDA compiler or driver: {what} {source}")
