"""ops: the only door to the compiled parts (csrc/, kernels/); every op also exists in plain torch.

Backends: `reference` is torch, on any device (reference.py); `cpp` is the extension built from csrc/, for CPU tensors
(native.py); `triton` is kernels/ (triton_kernels.py) and `cuda` the library built from csrc/*.cu (cuda.py), both for
CUDA tensors. The best available one is taken, or the one that the environment variable SPECENGINE_BACKEND names, or of
several names (`triton,cpp`) the first that has the op on that device; `backends` says which and why. Shapes and dtypes
are checked here, once, by attribute comparisons only: most ops run several times per cycle.
"""

from __future__ import annotations

from specengine.ops._backends import VARIABLE, Backend, backends
from specengine.ops.caches import (
    cached_attention,
    compact_kv,
    order_paths,
    pack_mask,
    rope_store,
    strict_attention,
    strict_cached_attention,
    tree_attention,
)
from specengine.ops.choices import choose_tokens, keyed_gumbel_argmax, walk
from specengine.ops.decisions import beam_observation, best_action
from specengine.ops.resident import (
    choose_rows,
    fill_queues,
    gather_rows,
    hang_nodes,
    move_rows,
    select_candidates,
    select_nodes,
    step_queues,
    take_subtree,
    walk_down,
)
from specengine.ops.selection import (
    BestFirst,
    best_candidates,
    best_first,
    classify_paths,
    classify_row,
    mlp,
    select_best,
    top_children,
    top_entropy,
)
from specengine.ops.trees import ancestor_words, append_nodes, subtree, tree_mask
from specengine.reference import LARGEST, MASK64, WORD_BITS, Candidates, Paths, Popped, philox4x32, philox_uniform
from specengine.reference_resident import Drawn, Found, Frontier, Queues, Selection, Walked

__all__ = [
    "LARGEST",
    "MASK64",
    "VARIABLE",
    "WORD_BITS",
    "Backend",
    "BestFirst",
    "Candidates",
    "Drawn",
    "Found",
    "Frontier",
    "Paths",
    "Popped",
    "Queues",
    "Selection",
    "Walked",
    "ancestor_words",
    "append_nodes",
    "backends",
    "beam_observation",
    "best_action",
    "best_candidates",
    "best_first",
    "cached_attention",
    "choose_rows",
    "choose_tokens",
    "classify_paths",
    "classify_row",
    "compact_kv",
    "fill_queues",
    "gather_rows",
    "hang_nodes",
    "keyed_gumbel_argmax",
    "mlp",
    "move_rows",
    "order_paths",
    "pack_mask",
    "philox4x32",
    "philox_uniform",
    "rope_store",
    "select_best",
    "select_candidates",
    "select_nodes",
    "step_queues",
    "strict_attention",
    "strict_cached_attention",
    "subtree",
    "take_subtree",
    "top_children",
    "top_entropy",
    "tree_attention",
    "tree_mask",
    "walk",
    "walk_down",
]
