"""The ops of csrc/ for CPU tensors: outputs allocated here, tensors handed to the extension specengine._expander.

It takes the tensors themselves, of inputs with strides a copy, and checks their dtypes, sizes and devices, and what of
their values becomes an index: ValueError, which names the argument, instead of a wrong address. A count is read there,
and loops end at it.

Importing this raises ImportError where the extension is not built, or was built from other sources.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops import attention, mixing
from specengine.ops._registry import OPS, by_meaning
from specengine.ops.attention import Paths
from specengine.ops.choose import Walked
from specengine.ops.networks import LOWEST, Window
from specengine.ops.numbers import HAS_NAN, WORD_BITS, Arrays, Nodes
from specengine.ops.queue import Drawn, Queues, Search
from specengine.ops.select import Candidates
from specengine.ops.tree import NOT_THERE, WRONG_PARENTS, WRONG_SUBTREE
from specengine.ops.worth import MEMORY, Counts, Ledger, Notes, Prices

_expander: Any = importlib.import_module("specengine._expander")
INTERFACE = 12  # as in csrc/expander.cpp

if getattr(_expander, "INTERFACE", 1) != INTERFACE:
    raise ImportError("specengine._expander was built from other sources")

_WHOLE = torch.int64
# their new_empty takes two thirds of what torch.empty of a given dtype does, whatever the process's defaults are
_INDEX = torch.empty(0, dtype=_WHOLE, device="cpu")
_REAL = torch.empty(0, dtype=torch.float32, device="cpu")


def implementations() -> dict[str, Callable[..., Any]]:
    """Return the functions below that are named as an op."""
    return {name: globals()[name] for name in OPS if name in globals()}


def ancestor_words(parents: Tensor) -> Tensor:
    n = parents.shape[0]
    out = _INDEX.new_empty(n, -(-n // WORD_BITS))
    if not _expander.ancestor_words(parents, out):
        raise InputError(WRONG_PARENTS)
    return out


def append_nodes(
    tree: Arrays, size: Tensor, parents: Tensor, tokens: Tensor, log_probs: Tensor, count: Tensor, overflow: Tensor
) -> Tensor:
    ids = torch.empty_like(parents)
    if not _expander.append_nodes(tree, size, count, parents, tokens, log_probs, overflow, ids):
        raise InputError(NOT_THERE)
    return ids


def append_children(
    tree: Arrays,
    size: Tensor,
    frontier: Nodes,
    tokens: Tensor,
    log_probs: Tensor,
    overflow: Tensor,
    chosen: Tensor | None,
    most: int,
    limit: Tensor | None,
) -> Nodes:
    made = Nodes(_INDEX.new_empty(most), torch.empty_like(size))
    given = frontier.ids, frontier.live, tokens, log_probs, chosen, limit
    if not _expander.append_children(tree, size, *given, overflow, made.ids, made.live):
        raise InputError(NOT_THERE)
    return made


def subtree(parents: Tensor, ancestors: Tensor, nodes: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    room = nodes.shape[0]
    new_parents = _INDEX.new_empty(room)
    words = _INDEX.new_empty(room, -(-room // WORD_BITS))
    if not _expander.subtree(parents, nodes, live, new_parents, words):
        raise InputError(WRONG_SUBTREE)
    return new_parents, words


def tree_mask(ancestors: Tensor, columns: int) -> Tensor:
    out = torch.empty(ancestors.shape[0], columns, dtype=torch.bool, device="cpu")
    _expander.tree_mask(ancestors, out)
    return out


def select_best(scores: Tensor, live: Tensor, most: int, limit: Tensor | None) -> Nodes:
    found = Nodes(_INDEX.new_empty(most), torch.empty_like(live))
    if not _expander.select_best(scores, live, limit, found.ids, found.live):
        raise InputError("scores: " + HAS_NAN)
    return found


def top_children(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    logits = _with_dense_rows(logits)
    rows = logits.shape[0]
    log_probs, best = _REAL.new_empty(rows, k), _INDEX.new_empty(rows, k)
    _expander.top_children(logits, normalized, log_probs, best)
    return log_probs, best


def best_candidates(
    logits: Tensor,
    scores: Tensor,
    live: Tensor,
    most: int,
    limit: Tensor | None,
    log_gate: Tensor | None,
    bound: Tensor | None,
    normalized: bool,
) -> Candidates:
    logits = _with_dense_rows(logits)
    rows, columns = _INDEX.new_empty(most), _INDEX.new_empty(most)
    log_probs, paths, count = _REAL.new_empty(most), _REAL.new_empty(most), torch.empty_like(live)
    given = logits, scores, live, limit, log_gate, bound, normalized
    _expander.best_candidates(*given, rows, columns, log_probs, paths, count)
    return Candidates(rows, columns, log_probs, paths, count)


def top_entropy(logits: Tensor, top: int, normalized: bool) -> Tensor:
    logits = _with_dense_rows(logits)
    out = _REAL.new_empty(logits.shape[0])
    _expander.top_entropy(logits, top, normalized, out)
    return out


def mix_rows(
    logits: Tensor,
    more: int,
    left: Sequence[float],
    places: Sequence[int],
    probabilities: Sequence[float],
    normalized: bool,
) -> tuple[Tensor, Tensor]:
    if logits.dtype is torch.float16:
        return by_meaning(mixing.mix_rows, logits, more, left, places, probabilities, normalized)
    logits = _with_dense_rows(logits)
    mixed = logits.new_empty(logits.shape[0], logits.shape[1] + more)
    raised = mixed.new_zeros(mixed.shape, dtype=torch.uint8)
    if not _expander.mix_rows(logits, normalized, mixing.FAINT, left, places, probabilities, mixed, raised):
        raise InputError(mixing.OUTSIDE)
    return mixed, raised


def mlp(features: Tensor, net: Sequence[Tensor]) -> Tensor:
    out = _REAL.new_empty(features.shape[:-1])
    _expander.mlp(net, features, out)
    return out


def classify_paths(path_log_probs: Tensor, entropies: Tensor, depth: Tensor, net: Sequence[Tensor]) -> Tensor:
    paths = path_log_probs.contiguous()
    out = torch.empty_like(paths)
    _expander.classify_paths(net, paths, entropies, depth, out)
    return out


def classify_row(logits: Tensor, top: int, depth: Tensor, net: Sequence[Tensor], normalized: bool) -> Tensor:
    logits = _with_dense_rows(logits)
    out = _REAL.new_empty(1)
    _expander.classify_row(net, logits, top, normalized, depth, out)
    return out


def _with_dense_rows(logits: Tensor) -> Tensor:
    if logits.dtype is torch.float16:
        return logits.float().contiguous()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def step_queues(
    queues: Queues,
    found: Candidates,
    frontier: Nodes,
    depths: Tensor,
    token_ids: Tensor | None,
    passes: Tensor,
    search: Search,
) -> Drawn:
    budget = queues.scores.shape[0]
    parents, tokens, log_probs = _INDEX.new_empty(budget), _INDEX.new_empty(budget), _REAL.new_empty(budget)
    drawn, expand = torch.empty_like(passes), torch.empty_like(passes)
    places = _INDEX.new_empty(min(search.batch, budget))
    given = *found, *frontier, depths, token_ids, passes
    out = parents, tokens, log_probs, drawn, places, expand
    if not _expander.step_queues(queues, *given, *search, *out):
        raise InputError("scores: " + HAS_NAN)
    return Drawn(parents, tokens, log_probs, drawn, Nodes(places, expand))


def beam_observation(
    scores: Tensor, depths: Tensor, live: Tensor, expansions: Tensor, context: Tensor, window: Window
) -> Tensor:
    out = _REAL.new_empty(window.room + 2 * window.repeats)
    shape = [window.width, window.last, window.room, window.repeats]
    floats = [window.pad, window.pad if window.pad < 0 else LOWEST, *window.units]
    _expander.beam_observation(shape, floats, scores, depths, live, expansions, context, out)
    return out


def best_action(observation: Tensor, layers: Sequence[Tensor], activation: str) -> Tensor:
    out = _INDEX.new_empty(1)
    _expander.best_action(layers, activation == "tanh", observation, out)
    return out


def chances(stated: Tensor, cells: Tensor, table: Tensor) -> Tensor:
    stated = stated.contiguous()
    out = torch.empty_like(stated)
    _expander.chances(stated, cells, table, out)
    return out


def hang_likely(
    tree: Arrays,
    size: Tensor,
    overflow: Tensor,
    frontier: Nodes,
    tokens: Tensor,
    stated: Tensor,
    sources: Tensor | None,
    counts: Counts,
    notes: Notes,
    least: float,
    most: int,
) -> Nodes:
    made = Nodes(_INDEX.new_empty(most), torch.empty_like(size))
    given = frontier.ids, frontier.live, tokens, stated, sources, counts, notes, least
    if not _expander.hang_likely(tree, size, overflow, *given, made.ids, made.live):
        raise InputError(NOT_THERE)
    return made


def count_outcomes(tree: Arrays, size: Tensor, path: Nodes, chosen: Tensor, counts: Counts, notes: Notes) -> None:
    _expander.count_outcomes(tree, size, path.ids, path.live, chosen, counts, notes)


def settle(ledger: Ledger, committed: Tensor) -> None:
    parts = ledger.verify, ledger.draft, ledger.prices.verify, ledger.prices.draft, ledger.earned, ledger.spent
    _expander.settle(parts, ledger.verified, ledger.beside, committed, MEMORY)


def select_worth(paths: Tensor, size: Tensor, price: Tensor, most: int) -> Nodes:
    found = Nodes(_INDEX.new_empty(most), torch.empty_like(size))
    if not _expander.select_worth(paths, size, price, found.ids, found.live):
        raise InputError("scores: " + HAS_NAN)
    return found


def next_pass(
    paths: Tensor, edges: Tensor, waiting: Tensor, size: Tensor, profile: Tensor, prices: Prices, rounds: int
) -> Nodes:
    found = Nodes(_INDEX.new_empty(prices.draft.shape[0] - 1), torch.empty_like(size))
    _expander.next_pass(paths, edges, waiting, size, profile, prices, rounds, found.ids, found.live)
    return found


def strict_cached_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, prefix: Tensor, live: Tensor, scale: float
) -> Tensor:
    if query.dtype is torch.float16:
        whole = strict_cached_attention(query.float(), key.float(), value.float(), paths, prefix, live, scale)
        return whole.to(torch.float16)
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    query = query.contiguous()
    out = torch.empty_like(query)
    _expander.strict_cached_attention(query, key, value, *paths, prefix, live, scale, out)
    return out


def keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    return _expander.keyed_gumbel_argmax(scores, seed, position)


def couple(logits: Tensor, token_ids: Tensor | None, positions: Tensor, seed: Tensor, scale: Tensor) -> Tensor:
    logits = logits.float()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = _REAL.new_empty(logits.shape)
    _expander.couple(logits, token_ids, positions, seed, scale, out)
    return out


def walk(tokens: Tensor, parents: Tensor, chosen: Tensor, size: Tensor) -> Walked:
    found = Walked(torch.empty_like(tokens), torch.empty_like(size), _INDEX.new_empty(1))
    _expander.walk(tokens, parents, chosen, size, *found)
    return found


def compact_kv(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    if not slab.is_contiguous():
        by_meaning(attention.compact_kv, slab, path, count, prefix)
        return
    if not _expander.compact_rows(slab, path, count, prefix):
        raise InputError(attention.WRONG_PATH)
