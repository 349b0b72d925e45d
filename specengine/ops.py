"""ops: the only door to the compiled parts (csrc/, kernels/); every op also exists in plain torch.

Backends: `reference` is torch, on any device (reference.py); `cpp` is the extension built from csrc/, for CPU tensors
(native.py); `triton` is kernels/ (triton_kernels.py) and `cuda` the library built from csrc/*.cu (cuda.py), both for
CUDA tensors. The best available one is taken, or the one that the environment variable SPECENGINE_BACKEND names, or of
several names (`triton,cpp`) the first that has the op on that device; `backends` says which and why. Shapes and dtypes
are checked here, once, by attribute comparisons only: most ops run several times per cycle.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specengine import reference
from specengine.errors import BackendError, InputError
from specengine.reference import LARGEST, MASK64, WORD_BITS, Candidates, Popped, philox4x32, philox_uniform

__all__ = [
    "LARGEST",
    "MASK64",
    "VARIABLE",
    "WORD_BITS",
    "Backend",
    "BestFirst",
    "Candidates",
    "Popped",
    "ancestor_words",
    "append_nodes",
    "backends",
    "best_candidates",
    "best_first",
    "cached_attention",
    "choose_tokens",
    "compact_kv",
    "keyed_gumbel_argmax",
    "pack_mask",
    "philox4x32",
    "philox_uniform",
    "rope_store",
    "select_best",
    "strict_attention",
    "subtree",
    "top_children",
    "top_entropy",
    "tree_attention",
    "tree_mask",
    "walk",
]

VARIABLE = "SPECENGINE_BACKEND"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------------------------------------- ops


def ancestor_words(parents: Tensor) -> Tensor:
    """Bit j of row i is set iff node j is node i or an ancestor of it.

    parents: int64 [n], parents[0] = -1, 0 <= parents[i] < i. Returns int64 [n, ceil(n / 64)], bit j in word j // 64.
    InputError where a parent is not an earlier node (on a CUDA device: an asynchronous assertion).
    """
    if parents.dtype is not torch.int64 or parents.dim() != 1:
        raise InputError(f"parents: int64 [n] is needed, got {_describe(parents)}")
    return _implementation("ancestor_words", parents.device.type)(parents)


def subtree(parents: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The parents of `nodes`, renumbered in their order, and their ancestor words (as `ancestor_words` gives them).

    parents: int64 [n], of the whole tree; nodes: int64 [m], ascending, with the root first and closed under parent.
    Returns int64 [m] and int64 [m, ceil(m / 64)]. InputError otherwise (on a CUDA device: an asynchronous assertion).
    """
    if not parents.dtype is nodes.dtype is torch.int64 or parents.dim() != 1 or nodes.dim() != 1:
        raise InputError(f"parents, nodes: int64 [n], [m] are needed, got {_describe(parents, nodes)}")
    return _implementation("subtree", parents.device.type)(parents, nodes)


def append_nodes(
    tree: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    size: int,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
) -> None:
    """Write nodes into a tree's arrays from entry `size` on: tokens, parents, depths, edge and path log-probabilities,
    ancestor words.

    tree: int64 [capacity] x 3, float32 [capacity] x 2, int64 [capacity, ceil(capacity / 64)], contiguous; parents,
    tokens: int64 [m], parents below `size`; log_probs: float32 [m]; size + m within the capacity.
    """
    m, capacity = parents.shape[0], tree[0].shape[0]
    if not parents.shape == tokens.shape == log_probs.shape or size + m > capacity:
        given = _describe(parents, tokens, log_probs)
        raise InputError(f"parents, tokens, log_probs: [m] with m up to {capacity - size} is needed, got {given}")
    if not parents.dtype is tokens.dtype is torch.int64 or log_probs.dtype is not torch.float32:
        given = _describe(parents, tokens, log_probs)
        raise InputError(f"parents, tokens, log_probs: int64 [m] x 2, float32 [m] are needed, got {given}")
    _implementation("append_nodes", parents.device.type)(tree, size, parents, tokens, log_probs)


def tree_mask(ancestors: Tensor, columns: int) -> Tensor:
    """The first `columns` bits of each word row as bool [n, columns].

    ancestors: int64 [n, words], 0 <= columns <= 64 * words; InputError otherwise.
    """
    if ancestors.dtype is not torch.int64 or ancestors.dim() != 2:
        raise InputError(f"ancestors: int64 [n, words] is needed, got {_describe(ancestors)}")
    if not 0 <= columns <= WORD_BITS * ancestors.shape[1]:
        raise InputError(f"columns: got {columns}, accepted 0 to {WORD_BITS * ancestors.shape[1]}")
    return _implementation("tree_mask", ancestors.device.type)(ancestors, columns)


def select_best(log_probs: Tensor, count: int) -> Tensor:
    """Indices of the `count` best by (log-probability descending, index ascending), in ascending order.

    log_probs: float32 [m], in creation order. Returns int64 [min(count, m)], or fewer, as -inf is never selected.
    For path log-probabilities the result is closed under parent, also under ties: a child is never better than its
    parent and comes later. InputError on NaN (on a CUDA device: an asynchronous assertion) and on a negative count.
    """
    if log_probs.dtype is not torch.float32 or log_probs.dim() != 1:
        raise InputError(f"log_probs: float32 [m] is needed, got {_describe(log_probs)}")
    if count < 0:
        raise InputError(f"count: got {count}, accepted 0 or more")
    return _implementation("select_best", log_probs.device.type)(log_probs, count)


def top_children(logits: Tensor, k: int, normalized: bool = False) -> tuple[Tensor, Tensor]:
    """The k best columns of each row by (value descending, column ascending), with log-probabilities.

    logits: float32, bfloat16 or float16 [rows, V]; `normalized` says that they are log-probabilities already.
    Returns log_probs float32 [rows, min(k, V)] (natural log, over the whole row) and columns int64 of the same shape.
    Ties are those of the values as given. NaN counts as -inf and +inf as 3e38; columns of -inf come last, with -inf.
    """
    if logits.dtype not in _FLOATS or logits.dim() != 2:
        raise InputError(f"logits: float32, bfloat16 or float16 [rows, V] is needed, got {_describe(logits)}")
    if k < 1 or logits.shape[1] < 1:
        raise InputError(f"k: got {k} of {logits.shape[1]} columns, at least 1 of 1 is needed")
    return _implementation("top_children", logits.device.type)(logits, min(k, logits.shape[1]), normalized)


def best_candidates(
    logits: Tensor,
    scores: Tensor,
    count: int,
    *,
    log_gate: float = -math.inf,
    bound: float = -math.inf,
    normalized: bool = False,
) -> Candidates:
    """The `count` best continuations of a whole layer, by path log-probability, as far as they pass gate and bound.

    logits: float32, bfloat16 or float16 [rows, V], read as in `top_children`; scores: float32 [rows], the rows' own
    path log-probabilities, -inf for a row that is padding; on the same device or on the host, and the results are where
    they are. A candidate's score is its row's plus its log-probability.
    log_gate: with m the layer's best score, only scores of m + log_gate and above pass. bound: only scores above it
    pass. Ordered by (score descending, row ascending, log-probability descending, column ascending); -inf never passes.
    Sources: TALON Alg. 2 (gate); SALF Alg. 2 (bounded queue).
    """
    if logits.dtype not in _FLOATS or logits.dim() != 2:
        raise InputError(f"logits: float32, bfloat16 or float16 [rows, V] is needed, got {_describe(logits)}")
    if scores.dtype is not torch.float32 or scores.shape != logits.shape[:1]:
        raise InputError(f"scores: float32 [{logits.shape[0]}] is needed, got {_describe(scores)}")
    if count < 0 or log_gate > 0 or math.isnan(log_gate) or math.isnan(bound):
        raise InputError(
            f"count, log_gate, bound: got {count}, {log_gate}, {bound}, accepted 0 or more, 0 or less, not NaN"
        )
    run = _implementation("best_candidates", logits.device.type)
    return run(logits, scores, count, log_gate, bound, normalized)


def top_entropy(logits: Tensor, top: int, normalized: bool = False) -> Tensor:
    """-sum p log p over the `top` most likely columns of each row, in nats; p over the whole row, not renormalised.

    logits: as in `top_children`. Returns float32 [rows]; 0 for a row of -inf alone. Source: C2T App. C.
    """
    if logits.dtype not in _FLOATS or logits.dim() != 2:
        raise InputError(f"logits: float32, bfloat16 or float16 [rows, V] is needed, got {_describe(logits)}")
    if top < 1 or logits.shape[1] < 1:
        raise InputError(f"top: got {top} of {logits.shape[1]} columns, at least 1 of 1 is needed")
    return _implementation("top_entropy", logits.device.type)(logits, min(top, logits.shape[1]), normalized)


def best_first(budget: int, batch: int, max_depth: int | None = None, device: torch.device | str = "cpu") -> BestFirst:
    """The bounded queues of a best-first search (SALF Alg. 2) over one tree: see BestFirst."""
    for name, value in {"budget": budget, "batch": batch, "max_depth": 1 if max_depth is None else max_depth}.items():
        if value < 1:
            raise InputError(f"{name}: got {value}, accepted 1 or more")
    make = _implementation("best_first", torch.device(device).type)
    return BestFirst(make(budget, batch, budget if max_depth is None else max_depth, device))


class BestFirst:
    """The queue Q of scored, not yet drawn nodes and the scores of the accepted set G, each the best `budget` of all.

    Ranked by (path log-probability descending, order of creation ascending). The root is in G from the start.
    Made by `best_first`.
    """

    __slots__ = ("_queues",)

    def __init__(self, queues: Any) -> None:
        self._queues = queues

    @property
    def bound(self) -> float:
        """No candidate at or below this path log-probability can come to anything; -inf while there is room."""
        return self._queues.bound

    def push(
        self, parents: Tensor, depth_of_parents: Tensor, tokens: Tensor, log_probs: Tensor, scores: Tensor
    ) -> None:
        """Add candidates, in order of creation. int64 [m] x 3, float32 [m] x 2 (edge, path).

        A path log-probability of -inf is passed over, NaN is refused (InputError, nothing is added).
        """
        given = parents, depth_of_parents, tokens, log_probs, scores
        if (
            not parents.shape == depth_of_parents.shape == tokens.shape == log_probs.shape == scores.shape
            or not parents.dtype is depth_of_parents.dtype is tokens.dtype is torch.int64
            or not log_probs.dtype is scores.dtype is torch.float32
            or scores.dim() != 1
        ):
            raise InputError(f"candidates: int64 [m] x 3, float32 [m] x 2 are needed, got {_describe(*given)}")
        self._queues.push(*given)

    def pop(self) -> Popped:
        """Move the best `batch` of Q above the greatest depth into G, and all that rank before the last of them.

        Not drafted from: the worst of a full G, and nodes at the greatest depth. What was driven out of G again does
        not become a node.
        """
        return self._queues.pop()

    def fill(self) -> Popped:
        """Move the best of Q into G while there is room; none of them is drafted from."""
        return self._queues.fill()


def keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    """A draw from softmax(scores) whose noise depends on (seed, position, index) alone: argmax of scores + noise.

    scores: float32 [V], logits divided by the temperature. seed and position are taken modulo 2**64. The noise is
    -log(-log(u)) in float64, u = (x + 0.5) / 2**32, x = word i % 4 of Philox4x32-10 with the seed as its key and
    the counter (i // 4, position, 0). Ties go to the lowest index; NaN counts as -inf, +inf as 3e38. InputError
    (a ValueError) where no score is finite. Source: Salmon et al. 2011 (Philox); Gumbel-max.
    """
    if scores.dtype is not torch.float32 or scores.dim() != 1:
        raise InputError(f"scores: float32 [V] is needed, got {_describe(scores)}")
    index = _implementation("keyed_gumbel_argmax", scores.device.type)(scores, seed & MASK64, position & MASK64)
    if index < 0:
        raise InputError("scores: none is finite, nothing can be drawn")
    return index


def choose_tokens(
    logits: Tensor, positions: Sequence[int] = (), seed: int | None = None, temperature: float = 1.0
) -> Tensor:
    """The choice in each row: its argmax, or with a seed `keyed_gumbel_argmax` of logits / temperature at its position.

    logits: float32, bfloat16 or float16 [n, V]; positions: n of them, where there is a seed. The division is in
    float32; what is not finite is never chosen, the lowest index wins a tie. Returns int64 [n], -1 for a row without a
    finite logit.
    """
    if logits.dtype not in _FLOATS or logits.dim() != 2 or not logits.shape[1]:
        raise InputError(f"logits: float32, bfloat16 or float16 [n, V] is needed, got {_describe(logits)}")
    if seed is not None and (len(positions) != logits.shape[0] or not 0 < temperature < math.inf):
        raise InputError(
            f"positions, temperature: got {len(positions)} and {temperature}, accepted {logits.shape[0]}, above 0"
        )
    return _implementation("choose_tokens", logits.device.type)(logits, positions, seed, temperature)


def walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> list[int]:
    """Node ids from the root down while a child carries the token that the target chose at its parent.

    tokens, parents, chosen: int64 [n], n >= 1; siblings carry distinct tokens. The path starts with node 0, and
    chosen[path[-1]] is the bonus token.
    """
    if not tokens.shape == parents.shape == chosen.shape or tokens.dim() != 1 or not tokens.shape[0]:
        raise InputError(f"tokens, parents, chosen: int64 [n] each is needed, got {_describe(tokens, parents, chosen)}")
    if not tokens.dtype is parents.dtype is chosen.dtype is torch.int64:
        raise InputError(f"tokens, parents, chosen: int64 [n] each is needed, got {_describe(tokens, parents, chosen)}")
    return _implementation("walk", tokens.device.type)(tokens, parents, chosen)


def compact_kv(slab: Tensor, prefix: int, path: Sequence[int]) -> None:
    """Move slot prefix + path[j] to slot prefix + j of every layer and head, in place.

    slab: [layers, 2, KV heads, capacity, head size]; path: ascending, starting with 0, within the capacity.
    """
    if slab.dim() != 5:
        raise InputError(f"slab: [layers, 2, KV heads, capacity, head size] is needed, got {_describe(slab)}")
    if not path or path[0] != 0 or any(a >= b for a, b in pairwise(path)):
        raise InputError(f"path: got {path}, ascending node ids from 0 are needed")
    if prefix < 0 or prefix + path[-1] >= slab.shape[3]:
        raise InputError(f"path: {path} after {prefix} slots leaves the {slab.shape[3]} slots of the slab")
    _implementation("compact_kv", slab.device.type)(slab, prefix, path)


def pack_mask(mask: Tensor, groups: int, dtype: torch.dtype, prefix: int = 0) -> Any:
    """A visibility mask as `tree_attention` takes it at the least cost there: make it once per forward.

    mask: bool [n, L], True where row sees slot; groups: query heads per key-value head; dtype: that of the queries;
    prefix: how many slots at the start every row sees, as far as is known without looking.
    """
    if mask.dtype is not torch.bool or mask.dim() != 2 or not 0 <= prefix <= mask.shape[1]:
        raise InputError(f"mask: bool [n, L] with L of {prefix} or more is needed, got {_describe(mask)}")
    return _implementation("pack_mask", mask.device.type)(mask, groups, dtype, prefix)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
    """Attention of n tree rows over L slots; query head h reads key-value head h // G, with G = Hq / Hkv.

    query: [Hq, n, D]; key, value: [Hkv, L, D], one floating dtype, any strides. mask: what `pack_mask` gives, or
    bool [n, L], or that repeated for the heads of a group, [G * n, L]; None where every row sees every slot.
    Returns [Hq, n, D]; a row that sees nothing gives 0.
    """
    heads, rows, _ = query.shape
    if key.shape != value.shape or heads % key.shape[0]:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, L, D] are needed, got {_describe(query, key, value)}")
    if isinstance(mask, Tensor):
        groups = heads // key.shape[0]
        if mask.shape[0] == rows and groups > 1:
            mask = mask.repeat(groups, 1)
        if mask.shape[0] != groups * rows or mask.shape[1] != key.shape[1]:
            raise InputError(f"mask: [{rows} or {groups * rows}, {key.shape[1]}] is needed, got {_describe(mask)}")
    return _implementation("tree_attention", query.device.type)(query, key, value, mask, scale)


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    words: Tensor,
    prefix: Tensor,
    live: Tensor,
    seen: Tensor,
    scale: float,
) -> Tensor:
    """As `tree_attention` with static shapes: over a whole cache, of which each row sees the first `prefix` slots and,
    of the `seen` slots behind them, those that its words name.

    query: [Hq, n, D]; key, value: [Hkv, capacity, D], one floating dtype. words: int64 [n, w], bit j % 64 of word
    j // 64 names slot prefix + j. prefix, live, seen: int32 [1] on the device; rows from `live` on are padding and
    give 0. What stands in the other slots, NaN too, changes nothing. No host read, so it can be captured.
    """
    heads, rows, _ = query.shape
    if key.shape != value.shape or heads % key.shape[0] or not query.dtype is key.dtype is value.dtype:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, L, D] are needed, got {_describe(query, key, value)}")
    if words.dtype is not torch.int64 or words.dim() != 2 or words.shape[0] != rows:
        raise InputError(f"words: int64 [{rows}, words] is needed, got {_describe(words)}")
    if any(number.dtype is not torch.int32 or number.shape != (1,) for number in (prefix, live, seen)):
        raise InputError(f"prefix, live, seen: int32 [1] each is needed, got {_describe(prefix, live, seen)}")
    run = _implementation("cached_attention", query.device.type)
    return run(query, key, value, words, prefix, live, seen, scale)


def rope_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor],
    slab: Tensor,
    slot: Tensor,
    live: Tensor,
) -> Tensor:
    """The queries rotated by their positions; keys, rotated as well, and values go into the slots from `slot` on.

    query: [Hq, n, D]; key, value: [Hkv, n, D]; slab: [2, Hkv, capacity, D], of keys and of values, one floating dtype.
    positions: int64 [n]; tables: cosines and sines, float32 [positions, D / 2]; slot: int64 [1]; live: int32 [1]; all
    on the device. Rows from `live` on are padding, and what is stored of them, if anything, stands behind the others.
    Llama's rotation, channel c with channel c + D / 2, in float32. No host read, so it can be captured.
    """
    heads, rows, size = query.shape
    if size % 2 or key.shape != value.shape or key.shape[1:] != (rows, size) or heads % key.shape[0]:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, n, D] are needed, got {_describe(query, key, value)}")
    if slab.dim() != 4 or slab.shape[:2] != (2, key.shape[0]) or slab.shape[3] != size or slab.dtype is not key.dtype:
        raise InputError(f"slab: [2, {key.shape[0]}, capacity, {size}] is needed, got {_describe(slab)}")
    if any(table.dtype is not torch.float32 or table.shape[1:] != (size // 2,) for table in tables):
        raise InputError(f"tables: float32 [positions, {size // 2}] x 2 are needed, got {_describe(*tables)}")
    if positions.dtype is not torch.int64 or slot.dtype is not torch.int64 or live.dtype is not torch.int32:
        raise InputError(
            f"positions, slot, live: int64 [n], int64 [1], int32 [1], got {_describe(positions, slot, live)}"
        )
    return _implementation("rope_store", query.device.type)(query, key, value, positions, tables, slab, slot, live)


def strict_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """As `tree_attention`, but a row's result depends on nothing except the keys and values that it sees, in their
    order: not on other rows, nor on slots that it does not see. So a tree node's bits are those of plain decoding.

    mask: bool [n, L], or None where every row sees every slot.
    """
    heads, rows, _ = query.shape
    if key.shape != value.shape or heads % key.shape[0] or not query.dtype is key.dtype is value.dtype:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, L, D] are needed, got {_describe(query, key, value)}")
    if mask is not None and (mask.dtype is not torch.bool or mask.shape != (rows, key.shape[1])):
        raise InputError(f"mask: bool [{rows}, {key.shape[1]}] is needed, got {_describe(mask)}")
    return _implementation("strict_attention", query.device.type)(query, key, value, mask, scale)


# ---------------------------------------------------------------------------------------------------- backends


@dataclass(frozen=True)
class Backend:
    """What runs an op: the backend `name` taken, the `reason`, and all that are `available` for it, best first."""

    name: str
    reason: str
    available: tuple[str, ...]


@dataclass(frozen=True)
class _Provider:
    """A set of implementations: on which device types (empty: all), how to load them (ImportError), how to build.

    interpreted: on CPU tensors as well, where TRITON_INTERPRET=1 lets Triton run its kernels there.
    """

    devices: tuple[str, ...]
    load: Callable[[], dict[str, Callable[..., Any]]]
    build: str
    interpreted: bool = False


def _load_reference() -> dict[str, Callable[..., Any]]:
    return {
        "ancestor_words": reference.ancestor_words,
        "subtree": reference.subtree,
        "append_nodes": reference.append_nodes,
        "tree_mask": reference.tree_mask,
        "select_best": reference.select_best,
        "top_children": reference.top_children,
        "best_candidates": reference.best_candidates,
        "top_entropy": reference.top_entropy,
        "best_first": reference.BestFirst,
        "keyed_gumbel_argmax": reference.keyed_gumbel_argmax,
        "choose_tokens": reference.choose_tokens,
        "walk": reference.walk,
        "compact_kv": reference.compact_kv,
        "pack_mask": reference.pack_mask,
        "tree_attention": reference.tree_attention,
        "cached_attention": reference.cached_attention,
        "rope_store": reference.rope_store,
        "strict_attention": reference.strict_attention,
    }


def _load_cpp() -> dict[str, Callable[..., Any]]:
    from specengine import native  # here, as it raises ImportError where the extension is missing

    return {
        "ancestor_words": native.ancestor_words,
        "append_nodes": native.append_nodes,
        "subtree": native.subtree,
        "tree_mask": native.tree_mask,
        "select_best": native.select_best,
        "top_children": native.top_children,
        "best_candidates": native.best_candidates,
        "top_entropy": native.top_entropy,
        "best_first": native.BestFirst,
        "keyed_gumbel_argmax": native.keyed_gumbel_argmax,
        "walk": native.walk,
        "compact_kv": native.compact_kv,
        "strict_attention": native.strict_attention,
    }


def _load_triton() -> dict[str, Callable[..., Any]]:
    from specengine import triton_kernels  # here, as it raises ImportError where Triton is missing

    return triton_kernels.implementations()


def _load_cuda() -> dict[str, Callable[..., Any]]:
    from specengine import cuda  # here, as it raises ImportError where the library is not built

    return cuda.implementations()


_PROVIDERS = {  # best first; a new backend is a new entry
    "cpp": _Provider(("cpu",), _load_cpp, "pip install -e ."),
    "reference": _Provider((), _load_reference, ""),
    # behind the reference, so on request alone: they have not been run on a device yet
    "triton": _Provider(("cuda",), _load_triton, "pip install -e '.[kernels]'", interpreted=True),
    "cuda": _Provider(("cuda",), _load_cuda, "SPECENGINE_CUDA=1 pip install -e ."),
}


def backends(device: torch.device | str = "cpu") -> dict[str, Backend]:
    """Which backend runs each op on `device`, and why; BackendError as for the ops themselves."""
    kind, asked = torch.device(device).type, os.environ.get(VARIABLE, "")
    return {op: _choose(op, kind, asked) for op in _load_reference()}


def _implementation(op: str, kind: str) -> Callable[..., Any]:
    return _resolve(op, kind, os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=256)
def _resolve(op: str, kind: str, asked: str) -> Callable[..., Any]:
    return _loaded(_choose(op, kind, asked).name)[op]


def _choose(op: str, kind: str, asked: str) -> Backend:
    able = tuple(name for name, provider in _PROVIDERS.items() if _serves(provider, kind) and op in _loaded(name))
    if asked in ("", "auto"):
        better = list(_PROVIDERS)[: list(_PROVIDERS).index(able[0])]
        reason = "; ".join(_why_not(name, op, kind) for name in better)
        return Backend(able[0], reason or f"first choice on {kind}", able)
    names = asked.split(",")
    if not set(names) <= set(_PROVIDERS):
        raise BackendError(f"{VARIABLE}={asked}: unknown, accepted are auto, {', '.join(_PROVIDERS)}")
    missing = [name for name in names if not _loaded(name)]
    if missing:
        raise BackendError(f"{VARIABLE}={asked}: {_not_built(missing[0])}")
    taken = next((name for name in names if name in able), None)
    if taken is not None:
        return Backend(taken, f"{VARIABLE}={asked}", able)
    return Backend("reference", "; ".join(_why_not(name, op, kind) for name in names), able)


def _why_not(name: str, op: str, kind: str) -> str:
    if _serves(_PROVIDERS[name], kind) and not _loaded(name):
        return _not_built(name)
    return f"{name} has no {op} on {kind}"


def _not_built(name: str) -> str:
    return f"{name} is not built ({_load(name)[1]}); build it with: {_PROVIDERS[name].build}"


def _serves(provider: _Provider, kind: str) -> bool:
    interpreted = provider.interpreted and kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return not provider.devices or kind in provider.devices or interpreted


@cache
def _load(name: str) -> tuple[dict[str, Callable[..., Any]], str]:
    try:
        return _PROVIDERS[name].load(), ""
    except ImportError as error:
        return {}, str(error)


def _loaded(name: str) -> dict[str, Callable[..., Any]]:
    return _load(name)[0]


def _describe(*tensors: Tensor) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
