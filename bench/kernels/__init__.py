"""The kernels of kernels/ on a GPU, compared with alternatives.

Every method is compared with a float64 result first; a wrong one is reported and not timed. Captured ways run in one
CUDA graph, at least `timing.CALLS` times: the time is a replay's over its calls, so it holds no launch from the host.
"cold" calls take turns on copies of the inputs that are together five times the L2 cache; "warm" calls read the same
inputs again. Beside each time stand the least bytes and operations over the device's rates; the row "launch floor" is
what a kernel costs at least.

    python -m bench.kernels --dry-run          the cases, and which ways are installed; needs no GPU
    python -m bench.kernels --out FILE         the table, with provenance
"""

from bench.kernels import attention, choice, compaction, rule, search, selection

WAYS = [*attention.WAYS, *selection.WAYS, *compaction.WAYS, *choice.WAYS, *search.WAYS, *rule.WAYS]
