"""Operations on trees and logits: plain torch references, and the compiled code of csrc/ and kernels/.

A family is a module: signature, checks and torch meaning of each op stand there once. Backends attach to them by name:
`cpp` is the extension built from csrc/, for CPU tensors; `triton` is kernels/ and `cuda` the library built from
csrc/*.cu, both for CUDA tensors; `reference` is the meaning, on any device. An op is bound when it first meets a
device: to the best backend there, or to the one that the environment variable SPECENGINE_BACKEND names, or of several
names (`triton,cpp`) to the first that has the op. `bind` reads the variable again; `backends` says which and why. On a
CUDA device an implementation that is not asked for by name is compared with its meaning on small inputs first, and left
out, with a warning, where it raises or differs.

A count is an int32 tensor of one element, on a CPU too, where reading it waits for nobody; entries after a count are
padding. So the same ops serve the eager driver, which reads counts, and the captured one.
"""

import importlib
from functools import partial

from specengine.ops._meanings import WORD_BITS, doubled, own_bits, precision
from specengine.ops._registry import (
    OPS,
    VARIABLE,
    Backend,
    attached,
    backends,
    bind,
    by_meaning,
    is_served,
    load_by,
    meaning,
)
from specengine.ops.attention import (
    Paths,
    Rotation,
    cached_attention,
    order_paths,
    pack_mask,
    rope_store,
    strict_cached_attention,
    tree_attention,
)
from specengine.ops.choose import (
    MASK64,
    Truncation,
    choose_tokens,
    couple,
    gather_rows,
    keyed_gumbel_argmax,
    philox4x32,
    philox_uniform,
    truncate,
)
from specengine.ops.networks import (
    QuantizedWeight,
    Window,
    add_rms_norm,
    beam_observation,
    best_action,
    classify_paths,
    classify_row,
    mlp,
    packed_linear,
    silu_mul,
)
from specengine.ops.queue import Drawn, Queues, Search, step_queues
from specengine.ops.select import (
    LARGEST,
    Candidates,
    Drafted,
    best_candidates,
    mix_rows,
    top_children,
    top_entropy,
)
from specengine.ops.tree import (
    Flag,
    Nodes,
    Number,
    PassRows,
    Walked,
    ancestor_words,
    append_children,
    append_nodes,
    at_most,
    compact_kv,
    extract,
    held,
    is_free,
    level_rows,
    number,
    root_rows,
    row_of,
    select_best,
    sent,
    subtree,
    tree_mask,
    walk,
    where,
)
from specengine.ops.worth import (
    Counts,
    Limits,
    Notes,
    Prices,
    SearchState,
    Throughput,
    bind_search,
    cells_of,
    chances,
    count_outcomes,
    grow_likely,
    keep_likely,
    next_pass,
    select_worth,
    start_search,
    update_throughput,
)

load_by(
    {
        name: partial(importlib.import_module, f"{__name__}.{name}")
        for name in ("cuda", "triton", "_trial")
    }
)

__all__ = [
    "LARGEST",
    "MASK64",
    "OPS",
    "VARIABLE",
    "WORD_BITS",
    "Backend",
    "Candidates",
    "Counts",
    "Drafted",
    "Drawn",
    "Flag",
    "Limits",
    "Nodes",
    "Notes",
    "Number",
    "PassRows",
    "Paths",
    "Prices",
    "QuantizedWeight",
    "Queues",
    "Rotation",
    "Search",
    "SearchState",
    "Throughput",
    "Truncation",
    "Walked",
    "Window",
    "add_rms_norm",
    "ancestor_words",
    "append_children",
    "append_nodes",
    "at_most",
    "attached",
    "backends",
    "beam_observation",
    "best_action",
    "best_candidates",
    "bind",
    "bind_search",
    "by_meaning",
    "cached_attention",
    "cells_of",
    "chances",
    "choose_tokens",
    "classify_paths",
    "classify_row",
    "compact_kv",
    "count_outcomes",
    "couple",
    "doubled",
    "extract",
    "gather_rows",
    "grow_likely",
    "held",
    "is_free",
    "is_served",
    "keep_likely",
    "keyed_gumbel_argmax",
    "level_rows",
    "meaning",
    "mix_rows",
    "mlp",
    "next_pass",
    "number",
    "order_paths",
    "own_bits",
    "pack_mask",
    "packed_linear",
    "philox4x32",
    "philox_uniform",
    "precision",
    "root_rows",
    "rope_store",
    "row_of",
    "select_best",
    "select_worth",
    "sent",
    "silu_mul",
    "start_search",
    "step_queues",
    "strict_cached_attention",
    "subtree",
    "top_children",
    "top_entropy",
    "tree_attention",
    "tree_mask",
    "truncate",
    "update_throughput",
    "walk",
    "where",
]
