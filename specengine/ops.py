"""ops: the only door to the compiled parts (csrc/, kernels/); every op also exists in plain torch.

Backends: `reference` is torch, on any device; `cpp` is the extension built from csrc/, for CPU tensors. The best
available one is taken, or the one that the environment variable SPECENGINE_BACKEND names; `backends` says which and
why. Shapes and dtypes are checked here, once, by attribute comparisons only: most ops run several times per cycle.
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
from torch.nn.functional import scaled_dot_product_attention

from specengine.errors import BackendError, InputError

VARIABLE = "SPECENGINE_BACKEND"
WORD_BITS = 64
LARGEST = 3e38  # what +inf counts as: finite in float32, so that differences of scores stay defined
MASK64 = (1 << 64) - 1


# ---------------------------------------------------------------------------------------------------- ops


def ancestor_words(parents: Tensor) -> Tensor:
    """Bit j of row i is set iff node j is node i or an ancestor of it.

    parents: int64 [n], parents[0] = -1, 0 <= parents[i] < i. Returns int64 [n, ceil(n / 64)], bit j in word j // 64.
    InputError where a parent is not an earlier node (on a CUDA device: an asynchronous assertion).
    """
    if parents.dtype is not torch.int64 or parents.dim() != 1:
        raise InputError(f"parents: int64 [n] is needed, got {_describe(parents)}")
    return _implementation("ancestor_words", parents.device.type)(parents)


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


def pack_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A visibility mask as `tree_attention` takes it at the least cost: make it once per forward.

    mask: bool [n, L], True where row sees slot; groups: query heads per key-value head; dtype: that of the queries.
    Returns [groups * n, L] of that dtype: 0 where seen, -inf where not.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf).repeat(groups, 1)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of n tree rows over L slots; query head h reads key-value head h // G, with G = Hq / Hkv.

    query: [Hq, n, D]; key, value: [Hkv, L, D], one floating dtype, any strides. mask: what `pack_mask` gives, or
    bool [n, L], or that repeated for the heads of a group, [G * n, L]; None where every row sees every slot.
    Returns [Hq, n, D]; a row that sees nothing gives 0.
    """
    heads, rows, _ = query.shape
    if key.shape != value.shape or heads % key.shape[0]:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, L, D] are needed, got {_describe(query, key, value)}")
    if mask is not None:
        groups = heads // key.shape[0]
        if mask.shape[0] == rows and groups > 1:
            mask = mask.repeat(groups, 1)
        if mask.shape[0] != groups * rows or mask.shape[1] != key.shape[1]:
            raise InputError(f"mask: [{rows} or {groups * rows}, {key.shape[1]}] is needed, got {_describe(mask)}")
    return _implementation("tree_attention", query.device.type)(query, key, value, mask, scale)


# ---------------------------------------------------------------------------------------------------- references


def _ancestor_words(parents: Tensor) -> Tensor:
    # Pointer doubling: after round r a row knows its 2**r nearest ancestors. Row n stands for "above the root".
    n, device = parents.shape[0], parents.device
    nodes = torch.arange(n, device=device)
    _require((parents < nodes).all() & (parents[1:] >= 0).all() & (parents[:1] == -1).all(), "parents: " + _PARENTS)
    words = torch.zeros(n + 1, -(-n // WORD_BITS), dtype=torch.int64, device=device)
    words[nodes, nodes // WORD_BITS] = torch.ones_like(nodes) << (nodes % WORD_BITS)
    jump = torch.cat([parents, parents.new_tensor([n])])
    jump[:1] = n
    for _ in range((n - 1).bit_length()):
        words |= words[jump]
        jump = jump[jump]
    return words[:n]


def _tree_mask(ancestors: Tensor, columns: int) -> Tensor:
    column = torch.arange(columns, device=ancestors.device)
    return ((ancestors[:, column // WORD_BITS] >> (column % WORD_BITS)) & 1).bool()


def _select_best(log_probs: Tensor, count: int) -> Tensor:
    _require(~log_probs.isnan().any(), "log_probs: " + _NAN)
    best = _order_keys(log_probs).topk(min(count, log_probs.shape[0])).indices.sort().values
    return best[log_probs[best] > -math.inf]


def _top_children(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    values = _defined(logits.float())
    columns = _order_keys(values).topk(k).indices
    best = values.gather(1, columns)
    if normalized:
        return best, columns
    peak = best[:, :1].clamp(min=torch.finfo(torch.float32).min)  # finite also in rows of -inf alone
    return (best - peak) - (values - peak).exp().sum(1, keepdim=True).log().clamp(min=0.0), columns


def _keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    values = _defined(scores).double()
    if not bool((values > -math.inf).any()):
        return -1
    noise = -torch.log(-torch.log(philox_uniform(seed, position, scores.shape[0]).to(scores.device)))
    return int((values + noise).argmax())


def _walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> list[int]:
    # One pass is enough, as children come after their parents.
    choice = chosen.tolist()
    path, wanted, last = [0], choice[0], 0
    for node, (parent, token) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True)):
        if parent == last and token == wanted:
            path.append(node)
            last, wanted = node, choice[node]
    return path


def _compact_kv(slab: Tensor, prefix: int, path: Sequence[int]) -> None:
    first = next((j for j, slot in enumerate(path) if slot != j), len(path))
    if first < len(path):
        moved = torch.tensor(path[first:], device=slab.device) + prefix
        slab[:, :, :, prefix + first : prefix + len(path)] = slab.index_select(3, moved)


def _tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    # The query heads of a group become rows of one head, so keys and values are read once and never repeated.
    heads, rows, size = query.shape
    packed = query.reshape(1, key.shape[0], -1, size)
    one_row = packed.shape[2] == 1 and packed.dtype is torch.bfloat16
    if packed.device.type == "cpu" and (one_row or packed.dtype is torch.float16):
        # Here torch's CPU kernel takes 2 to 4 times as long as float32 with the conversions, and is less exact.
        packed, key, value = packed.float(), key.float(), value.float()
    if mask is not None and mask.dtype not in (torch.bool, packed.dtype):
        mask = mask.to(packed.dtype)
    out = scaled_dot_product_attention(packed, key[None], value[None], mask, scale=scale)
    return out.to(query.dtype).view(heads, rows, size)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PARENTS = "the root's must be -1, every other's an earlier node"
_NAN = "contains NaN"


def _defined(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=-math.inf, posinf=LARGEST, neginf=-math.inf).clamp(max=LARGEST)


def _order_keys(values: Tensor) -> Tensor:
    """int64 keys of the order (value descending, index along the last axis ascending): larger is better, none equal.

    values: float32 without NaN. topk itself leaves open which of two equal values it takes.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0, its equal
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (
        0xFFFFFFFF - torch.arange(values.shape[-1], device=values.device)
    )


def _require(holds: Tensor, message: str) -> None:
    if holds.device.type == "cpu":
        if not holds:
            raise InputError(message)
    else:
        torch._assert_async(holds, message)  # the same without making the host wait


def philox_uniform(seed: int, position: int, n: int) -> Tensor:
    """The uniforms behind `keyed_gumbel_argmax`: float64 [n], on the CPU, in the open interval (0, 1)."""
    index = torch.arange(-(-n // 4))
    position &= MASK64
    counter = (index, index.new_tensor(position & 0xFFFFFFFF), index.new_tensor(position >> 32), index.new_tensor(0))
    words = torch.stack(torch.broadcast_tensors(*philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))), 1)
    return (words.reshape(-1)[:n].double() + 0.5) / 2.0**32


def philox4x32(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four counter words (int64 tensors of values below 2**32); four tensors of the same kind."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _multiply(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * factor, both below 2**32; in halves, as the product exceeds a signed 64-bit word."""
    upper = a * (factor >> 16)
    lower = a * (factor & 0xFFFF)
    total = (upper >> 16) + (((upper & 0xFFFF) << 16) + lower >> 32)
    return total, ((upper << 16) + lower) & 0xFFFFFFFF


# ---------------------------------------------------------------------------------------------------- backends


@dataclass(frozen=True)
class Backend:
    """What runs an op: the backend `name` taken, the `reason`, and all that are `available` for it, best first."""

    name: str
    reason: str
    available: tuple[str, ...]


@dataclass(frozen=True)
class _Provider:
    """A set of implementations: on which device types (empty: all), how to load them (ImportError), how to build."""

    devices: tuple[str, ...]
    load: Callable[[], dict[str, Callable[..., Any]]]
    build: str


def _load_reference() -> dict[str, Callable[..., Any]]:
    return {
        "ancestor_words": _ancestor_words,
        "tree_mask": _tree_mask,
        "select_best": _select_best,
        "top_children": _top_children,
        "keyed_gumbel_argmax": _keyed_gumbel_argmax,
        "walk": _walk,
        "compact_kv": _compact_kv,
        "tree_attention": _tree_attention,
    }


def _load_cpp() -> dict[str, Callable[..., Any]]:
    from specengine._expander import (
        ancestor_words,
        compact_rows,
        keyed_gumbel_argmax,
        select_best,
        top_children,
        tree_mask,
        walk,
    )

    def cpp_ancestor_words(parents: Tensor) -> Tensor:
        n, parents = parents.shape[0], parents.contiguous()
        out = torch.empty(n, -(-n // WORD_BITS), dtype=torch.int64)
        if not ancestor_words(parents.data_ptr(), n, out.data_ptr()):
            raise InputError("parents: " + _PARENTS)
        return out

    def cpp_tree_mask(ancestors: Tensor, columns: int) -> Tensor:
        (n, words), ancestors = ancestors.shape, ancestors.contiguous()
        out = torch.empty(n, columns, dtype=torch.bool)
        tree_mask(ancestors.data_ptr(), n, words, columns, out.data_ptr())
        return out

    def cpp_select_best(log_probs: Tensor, count: int) -> Tensor:
        size, log_probs = log_probs.shape[0], log_probs.contiguous()
        out = torch.empty(min(count, size), dtype=torch.int64)
        kept = select_best(log_probs.data_ptr(), size, count, out.data_ptr())
        if kept < 0:
            raise InputError("log_probs: " + _NAN)
        return out if kept == out.shape[0] else out[:kept]

    def cpp_top_children(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
        if logits.dtype is torch.float16:
            logits = logits.float()
        elif logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, columns = logits.shape
        log_probs, best = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        top_children(
            logits.data_ptr(),
            logits.dtype is torch.bfloat16,
            rows,
            columns,
            logits.stride(0),
            k,
            normalized,
            log_probs.data_ptr(),
            best.data_ptr(),
        )
        return log_probs, best

    def cpp_keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
        scores = scores.contiguous()
        return keyed_gumbel_argmax(scores.data_ptr(), scores.shape[0], seed, position)

    def cpp_walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> list[int]:
        tokens, parents, chosen = tokens.contiguous(), parents.contiguous(), chosen.contiguous()
        return walk(tokens.data_ptr(), parents.data_ptr(), chosen.data_ptr(), tokens.shape[0])

    def cpp_compact_kv(slab: Tensor, prefix: int, path: Sequence[int]) -> None:
        if not slab.is_contiguous():
            return _compact_kv(slab, prefix, path)
        layers, two, heads, capacity, size = slab.shape
        row_bytes = size * slab.element_size()
        compact_rows(slab.data_ptr(), layers * two * heads, capacity * row_bytes, row_bytes, prefix, path)
        return None

    return {
        "ancestor_words": cpp_ancestor_words,
        "tree_mask": cpp_tree_mask,
        "select_best": cpp_select_best,
        "top_children": cpp_top_children,
        "keyed_gumbel_argmax": cpp_keyed_gumbel_argmax,
        "walk": cpp_walk,
        "compact_kv": cpp_compact_kv,
    }


_PROVIDERS = {  # best first; a new backend is a new entry
    "cpp": _Provider(("cpu",), _load_cpp, "pip install -e ."),
    "reference": _Provider((), _load_reference, ""),
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
    if asked not in _PROVIDERS:
        raise BackendError(f"{VARIABLE}={asked}: unknown, accepted are auto, {', '.join(_PROVIDERS)}")
    if asked in able:
        return Backend(asked, f"{VARIABLE}={asked}", able)
    if not _loaded(asked):
        raise BackendError(f"{VARIABLE}={asked}: {_why_not(asked, op, kind)}")
    return Backend("reference", _why_not(asked, op, kind), able)


def _why_not(name: str, op: str, kind: str) -> str:
    provider = _PROVIDERS[name]
    if _serves(provider, kind) and not _loaded(name):
        return f"{name} is not built ({_load(name)[1]}); build it with: {provider.build}"
    return f"{name} has no {op} on {kind}"


def _serves(provider: _Provider, kind: str) -> bool:
    return not provider.devices or kind in provider.devices


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
