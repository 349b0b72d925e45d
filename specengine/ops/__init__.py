"""Operations on trees and logits: plain torch references, and the compiled code of csrc/ and kernels/.

A family is a module: signature, checks and torch meaning of each op stand there once. Backends attach to them: `cpp` is
the extension built from csrc/, for CPU tensors; `triton` is kernels/ and `cuda` the library built from csrc/*.cu, both
for CUDA tensors; `reference` is the meaning, on any device. The best available one is taken, or the one that the
environment variable SPECENGINE_BACKEND names, or of several names (`triton,cpp`) the first that has the op on that
device; `backends` says which and why. On a CUDA device an implementation that is not asked for by name is compared
with its meaning on small inputs when it is first needed, and left out, with a warning, where it raises or differs.

A count is an int32 tensor of one element, on a CPU too, where reading it waits for nobody; what stands behind a count
is padding. So the same ops serve who looks at a count and who captures them in a graph.
"""

from __future__ import annotations

import importlib
from functools import partial

from specengine.ops._registry import OPS, VARIABLE, Backend, backends, by_meaning, load_by, meaning
from specengine.ops.attention import (
    Paths,
    cached_attention,
    compact_kv,
    order_paths,
    pack_mask,
    rope_store,
    strict_cached_attention,
    tree_attention,
)
from specengine.ops.choose import (
    MASK64,
    Walked,
    choose_tokens,
    couple,
    gather_rows,
    keyed_gumbel_argmax,
    philox4x32,
    philox_uniform,
    walk,
)
from specengine.ops.mixing import mix_rows
from specengine.ops.networks import Window, beam_observation, best_action, classify_paths, classify_row, mlp
from specengine.ops.numbers import (
    WORD_BITS,
    Flag,
    Nodes,
    Number,
    at_most,
    held,
    is_free,
    number,
    own_bits,
    row_of,
    where,
)
from specengine.ops.queue import Drawn, Queues, Search, step_queues
from specengine.ops.select import LARGEST, Candidates, best_candidates, top_children, top_entropy
from specengine.ops.tree import ancestor_words, append_children, append_nodes, select_best, subtree, tree_mask
from specengine.ops.worth import (
    Counts,
    Ledger,
    Notes,
    Prices,
    cell_of,
    cells_of,
    chances,
    count_outcomes,
    hang_likely,
    next_pass,
    select_worth,
    settle,
)

load_by({name: partial(importlib.import_module, f"{__name__}.{name}") for name in ("cpp", "cuda", "triton", "_trial")})

__all__ = [
    "LARGEST",
    "MASK64",
    "OPS",
    "VARIABLE",
    "WORD_BITS",
    "Backend",
    "Candidates",
    "Counts",
    "Drawn",
    "Flag",
    "Ledger",
    "Nodes",
    "Notes",
    "Number",
    "Paths",
    "Prices",
    "Queues",
    "Search",
    "Walked",
    "Window",
    "ancestor_words",
    "append_children",
    "append_nodes",
    "at_most",
    "backends",
    "beam_observation",
    "best_action",
    "best_candidates",
    "by_meaning",
    "cached_attention",
    "cell_of",
    "cells_of",
    "chances",
    "choose_tokens",
    "classify_paths",
    "classify_row",
    "compact_kv",
    "count_outcomes",
    "couple",
    "gather_rows",
    "hang_likely",
    "held",
    "is_free",
    "keyed_gumbel_argmax",
    "meaning",
    "mix_rows",
    "mlp",
    "next_pass",
    "number",
    "order_paths",
    "own_bits",
    "pack_mask",
    "philox4x32",
    "philox_uniform",
    "rope_store",
    "row_of",
    "select_best",
    "select_worth",
    "settle",
    "step_queues",
    "strict_cached_attention",
    "subtree",
    "top_children",
    "top_entropy",
    "tree_attention",
    "tree_mask",
    "walk",
    "where",
]
