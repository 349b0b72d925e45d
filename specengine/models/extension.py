"""The compiled forward for CPUs, specengine._cpu: its instruction sets, its numerics and the threads it runs on."""

import importlib
import os
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from specengine.errors import BackendError, require, require_or

INTERFACE = 23  # as in csrc/cpu_binding.cpp
VARIABLE = "SPECENGINE_CPU"
# these multiply bfloat16; for float32 weights the plain vectors serve
WITH_PAIRS = "amx", "avx512bf16"
INTEGER = "int_"  # of kinds that are multiplied as integers; the rest of the name is a file's kind
_ALSO_THERE = {  # sets of the same CPUs, the fastest first: one has products of floats, or of integers, alone
    "amx": ("avx512vnni", "avx512"),
    "avx512bf16": ("avx512vnni", "avx512"),
    "avx512vnni": ("avx512",),
    "avxvnni": ("avx2",),
    "portable": ("neon",),
    "neon": ("portable",),
}
try:
    _extension: Any = importlib.import_module("specengine._cpu")
except ImportError:  # no compiler was there at installation
    _extension = None
if getattr(_extension, "INTERFACE", 1) != INTERFACE:  # other sources were compiled
    _extension = None

NOT_BUILT = (
    "the extension specengine._cpu is not built: install a C++17 compiler, then `pip install -e .`"
)


def is_built() -> bool:
    """Return whether specengine._cpu is built from these sources."""
    return _extension is not None


def extension() -> Any:
    """Return specengine._cpu; BackendError where it is not built."""
    require_or(BackendError, f"native: {NOT_BUILT}", is_built())
    return _extension


def instruction_sets(numerics: str = "bfloat16") -> list[str]:
    """List the instruction sets that were built and that this CPU runs, fastest first; empty without the extension.

    numerics: integer, or any other for products of floats
    """
    return list(extension().instruction_sets(table_of(numerics))) if is_built() else []


def instruction_set(numerics: str) -> str:
    """Return the instruction set for products in `numerics`. Raises BackendError if there is none, or not the one set.

    SPECENGINE_CPU names a CPU by one of its sets. Where that has no such products, another set of such a CPU has them.
    """
    usable, requested = (
        list(extension().instruction_sets(table_of(numerics))),
        os.environ.get(VARIABLE),
    )
    accepted = dict.fromkeys([*instruction_sets(), *instruction_sets("integer")])
    require_or(
        BackendError,
        f"{VARIABLE}: got {requested!r}, accepted on this CPU: {', '.join(accepted)}",
        not requested or requested in accepted,
    )
    if numerics == "float32":
        usable = [name for name in usable if name not in WITH_PAIRS]
    require_or(
        BackendError,
        f"native: this build has no {numerics} products for this CPU",
        bool(usable),
    )
    candidates = (requested, *_ALSO_THERE.get(requested, ())) if requested else ()
    return next((name for name in candidates if name in usable), usable[0])


def table_of(numerics: str) -> str:
    """Return the extension's name for a table of functions; the one for bfloat16 also multiplies float32 weights."""
    return "integer" if numerics == "integer" else "bfloat16"


def numerics_of(numerics: str, dtype: torch.dtype, *, whole: bool) -> str:
    """Return how products are computed: integer, or the name of the model's dtype.

    numerics: integer, a dtype's name, or auto; whole: whether there are weights that integers can stand for. InputError
    where these products are not available. By default the instruction set alone decides, no timing, so that a machine's
    answers stay the same.
    """
    floats = str(dtype).removeprefix("torch.")
    if numerics == "auto":
        # AMX's tiles give bfloat16 16 rows for one; portable C++ on x86 emulates fused multiply-adds
        return (
            "integer"
            if whole
            and instruction_sets("integer")
            and instruction_set("bfloat16") != "amx"
            and instruction_set("integer") != "portable"
            else floats
        )
    require(
        "numerics",
        f"integer for weights in {floats}",
        "with packed blocks of a GGUF file (dtype auto or bfloat16), or with quantize='int8'",
        numerics != "integer" or whole,
    )
    require(
        "numerics",
        f"{numerics!r} for a model in {floats}",
        f"auto, {floats} or integer",
        numerics in (floats, "integer"),
    )
    return numerics


def kinds_of(numerics: str, *, quantize: bool = False) -> dict[str, str]:
    """Map the storage types of matrices to the kinds they are packed as."""
    prefix = INTEGER if numerics == "integer" else ""
    kinds: dict[str, str] = {"f32": "f32", "bf16": "bf16"} | {
        kind.removeprefix(prefix): kind
        for kind in extension().formats()
        if kind.startswith(INTEGER) == bool(prefix)
    }
    return dict.fromkeys(("f32", "bf16"), kinds["i8"]) if quantize else kinds


def is_plain(tensor: Tensor) -> bool:
    """Return whether this is memory of the CPU, with nothing to be known of it but dtype, shape and strides."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and not (tensor.is_quantized or tensor.is_neg() or tensor.is_conj())
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
    )


# threads of a forward inside `one_torch_thread`
team: ContextVar[int | None] = ContextVar("team", default=None)


def thread_count() -> int:
    """Return the number of threads of a forward: torch's, outside `one_torch_thread`."""
    return team.get() or torch.get_num_threads()
