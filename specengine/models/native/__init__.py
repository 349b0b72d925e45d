"""The forward of csrc/cpu: causal language models of known families, and draft heads, in C++ on a CPU."""

from specengine.models.native.lm import (
    PREFILL_ROWS,
    NativeDflashHead,
    NativeHead,
    NativeLane,
    NativeLM,
    NativeTarget,
    RowBatch,
    one_torch_thread,
)
from specengine.models.native.loaded import from_model
from specengine.models.native.weights import progress_bar

__all__ = [
    "PREFILL_ROWS",
    "NativeDflashHead",
    "NativeHead",
    "NativeLM",
    "NativeLane",
    "NativeTarget",
    "RowBatch",
    "from_model",
    "one_torch_thread",
    "progress_bar",
]
