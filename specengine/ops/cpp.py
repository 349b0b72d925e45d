"""The ops of csrc/ for CPU tensors: outputs allocated here, addresses handed to the extension specengine._expander.

Importing this raises ImportError where the extension is not built, or was built from other sources. A count is read
there, through its address, and loops end at it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops import attention, mixing
from specengine.ops._registry import by_meaning
from specengine.ops.attention import Paths
from specengine.ops.choose import Walked
from specengine.ops.networks import LOWEST, Window
from specengine.ops.queue import Drawn, Queues, Search
from specengine.ops.select import HAS_NAN, Candidates
from specengine.ops.tree import NOT_THERE, WORD_BITS, WRONG_PARENTS, WRONG_SUBTREE, Arrays, Nodes
from specengine.ops.worth import MEMORY, Counts, Ledger, Notes, Prices

_expander: Any = importlib.import_module("specengine._expander")
INTERFACE = 9  # as in csrc/expander.cpp

if getattr(_expander, "INTERFACE", 1) != INTERFACE:
    raise ImportError("specengine._expander was built from other sources")

_WHOLE = torch.int64
# their new_empty takes two thirds of what torch.empty of a given dtype does, whatever the process's defaults are
_INDEX = torch.empty(0, dtype=_WHOLE, device="cpu")
_REAL = torch.empty(0, dtype=torch.float32, device="cpu")


def implementations() -> dict[str, Callable[..., Any]]:
    """What `ops` finds here."""
    return {
        "ancestor_words": ancestor_words,
        "append_nodes": append_nodes,
        "append_children": append_children,
        "subtree": subtree,
        "tree_mask": tree_mask,
        "select_best": select_best,
        "top_children": top_children,
        "best_candidates": best_candidates,
        "top_entropy": top_entropy,
        "mix_rows": mix_rows,
        "mlp": mlp,
        "classify_paths": classify_paths,
        "classify_row": classify_row,
        "beam_observation": beam_observation,
        "best_action": best_action,
        "chances": chances,
        "hang_likely": hang_likely,
        "count_outcomes": count_outcomes,
        "select_worth": select_worth,
        "settle": settle,
        "next_pass": next_pass,
        "step_queues": step_queues,
        "keyed_gumbel_argmax": keyed_gumbel_argmax,
        "couple": couple,
        "walk": walk,
        "compact_kv": compact_kv,
        "strict_cached_attention": strict_cached_attention,
    }


def _at(number: Tensor | None) -> int:
    """The address of a number that may be left out."""
    return 0 if number is None else number.data_ptr()


def ancestor_words(parents: Tensor) -> Tensor:
    n, parents = parents.shape[0], parents.contiguous()
    out = _INDEX.new_empty(n, -(-n // WORD_BITS))
    if not _expander.ancestor_words(parents.data_ptr(), n, out.data_ptr()):
        raise InputError(WRONG_PARENTS)
    return out


def append_nodes(
    tree: Arrays, size: Tensor, parents: Tensor, tokens: Tensor, log_probs: Tensor, count: Tensor, overflow: Tensor
) -> Tensor:
    parents, tokens, log_probs = parents.contiguous(), tokens.contiguous(), log_probs.contiguous()
    ids = torch.empty_like(parents)
    if not _expander.append_nodes(
        [array.data_ptr() for array in tree],
        *tree[-1].shape,
        size.data_ptr(),
        count.data_ptr(),
        parents.shape[0],
        parents.data_ptr(),
        tokens.data_ptr(),
        log_probs.data_ptr(),
        overflow.data_ptr(),
        ids.data_ptr(),
    ):
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
    nodes, tokens, log_probs = frontier.ids.contiguous(), tokens.contiguous(), log_probs.contiguous()
    chosen = None if chosen is None else chosen.contiguous()
    made = Nodes(_INDEX.new_empty(most), torch.empty_like(size))
    if not _expander.append_children(
        [array.data_ptr() for array in tree],
        *tree[-1].shape,
        size.data_ptr(),
        nodes.data_ptr(),
        frontier.live.data_ptr(),
        *tokens.shape,
        tokens.data_ptr(),
        log_probs.data_ptr(),
        _at(chosen),
        most,
        _at(limit),
        overflow.data_ptr(),
        made.ids.data_ptr(),
        made.live.data_ptr(),
    ):
        raise InputError(NOT_THERE)
    return made


def subtree(parents: Tensor, ancestors: Tensor, nodes: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    size, room, parents, nodes = parents.shape[0], nodes.shape[0], parents.contiguous(), nodes.contiguous()
    new_parents = _INDEX.new_empty(room)
    words = _INDEX.new_empty(room, -(-room // WORD_BITS))
    given = parents.data_ptr(), size, nodes.data_ptr(), live.data_ptr(), room
    if not _expander.subtree(*given, new_parents.data_ptr(), words.data_ptr()):
        raise InputError(WRONG_SUBTREE)
    return new_parents, words


def tree_mask(ancestors: Tensor, columns: int) -> Tensor:
    (n, words), ancestors = ancestors.shape, ancestors.contiguous()
    out = torch.empty(n, columns, dtype=torch.bool, device="cpu")
    _expander.tree_mask(ancestors.data_ptr(), n, words, columns, out.data_ptr())
    return out


def select_best(scores: Tensor, live: Tensor, most: int, limit: Tensor | None) -> Nodes:
    scores = scores.contiguous()
    found = Nodes(_INDEX.new_empty(most), torch.empty_like(live))
    given = scores.data_ptr(), scores.shape[0], live.data_ptr(), most, _at(limit)
    if not _expander.select_best(*given, found.ids.data_ptr(), found.live.data_ptr()):
        raise InputError("scores: " + HAS_NAN)
    return found


def top_children(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    logits = _with_dense_rows(logits)
    rows = logits.shape[0]
    log_probs, best = _REAL.new_empty(rows, k), _INDEX.new_empty(rows, k)
    _expander.top_children(*_matrix(logits), k, normalized, log_probs.data_ptr(), best.data_ptr())
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
    logits, scores = _with_dense_rows(logits), scores.contiguous()
    rows, columns = _INDEX.new_empty(most), _INDEX.new_empty(most)
    log_probs, paths, count = _REAL.new_empty(most), _REAL.new_empty(most), torch.empty_like(live)
    _expander.best_candidates(
        *_matrix(logits),
        scores.data_ptr(),
        live.data_ptr(),
        most,
        _at(limit),
        _at(log_gate),
        _at(bound),
        normalized,
        rows.data_ptr(),
        columns.data_ptr(),
        log_probs.data_ptr(),
        paths.data_ptr(),
        count.data_ptr(),
    )
    return Candidates(rows, columns, log_probs, paths, count)


def top_entropy(logits: Tensor, top: int, normalized: bool) -> Tensor:
    logits = _with_dense_rows(logits)
    out = _REAL.new_empty(logits.shape[0])
    _expander.top_entropy(*_matrix(logits), top, normalized, out.data_ptr())
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
    options = more, normalized, mixing.FAINT, left, places, probabilities
    if not _expander.mix_rows(*_matrix(logits), *options, mixed.data_ptr(), raised.data_ptr()):
        raise InputError(mixing.OUTSIDE)
    return mixed, raised


def mlp(features: Tensor, net: Sequence[Tensor]) -> Tensor:
    features, (hidden, inputs) = features.contiguous(), net[0].shape
    out = _REAL.new_empty(features.shape[:-1])
    parts = [part.data_ptr() for part in net]
    _expander.mlp(parts, inputs, hidden, features.data_ptr(), out.numel(), out.data_ptr())
    return out


def classify_paths(path_log_probs: Tensor, entropies: Tensor, depth: Tensor, net: Sequence[Tensor]) -> Tensor:
    paths, entropies, (rows, children) = path_log_probs.contiguous(), entropies.contiguous(), path_log_probs.shape
    out, addresses = torch.empty_like(paths), [part.data_ptr() for part in net]
    given = paths.data_ptr(), entropies.data_ptr(), depth.data_ptr(), rows, children
    _expander.classify_paths(addresses, net[0].shape[0], *given, out.data_ptr())
    return out


def classify_row(logits: Tensor, top: int, depth: Tensor, net: Sequence[Tensor], normalized: bool) -> Tensor:
    logits = _with_dense_rows(logits)
    address, bfloat16, _, columns, _ = _matrix(logits)
    parts, (hidden, inputs) = [part.data_ptr() for part in net], net[0].shape
    given = address, bfloat16, columns, min(top, columns), normalized, depth.data_ptr()
    out = _REAL.new_empty(1)
    _expander.classify_row(parts, inputs, hidden, *given, out.data_ptr())
    return out


def _with_dense_rows(logits: Tensor) -> Tensor:
    if logits.dtype is torch.float16:
        return logits.float().contiguous()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _matrix(logits: Tensor) -> tuple[int, bool, int, int, int]:
    """Address, whether bfloat16 (else float32), rows, columns, row stride in elements."""
    rows, columns = logits.shape
    return logits.data_ptr(), logits.dtype is torch.bfloat16, rows, columns, logits.stride(0)


def step_queues(
    queues: Queues,
    found: Candidates,
    frontier: Nodes,
    depths: Tensor,
    token_ids: Tensor | None,
    passes: Tensor,
    search: Search,
) -> Drawn:
    budget, (rows, columns, edges, scores, live) = queues.scores.shape[0], found
    rows, columns, edges, scores = rows.contiguous(), columns.contiguous(), edges.contiguous(), scores.contiguous()
    nodes, depths = frontier.ids.contiguous(), depths.contiguous()
    token_ids = None if token_ids is None else token_ids.contiguous()
    parents, tokens, log_probs = _INDEX.new_empty(budget), _INDEX.new_empty(budget), _REAL.new_empty(budget)
    drawn, expand = torch.empty_like(passes), torch.empty_like(passes)
    places = _INDEX.new_empty(min(search.batch, budget))
    if not _expander.step_queues(
        [part.data_ptr() for part in queues],
        budget,
        rows.data_ptr(),
        columns.data_ptr(),
        edges.data_ptr(),
        scores.data_ptr(),
        live.data_ptr(),
        scores.shape[0],
        nodes.data_ptr(),
        frontier.live.data_ptr(),
        depths.data_ptr(),
        _at(token_ids),
        passes.data_ptr(),
        *search,
        parents.data_ptr(),
        tokens.data_ptr(),
        log_probs.data_ptr(),
        drawn.data_ptr(),
        places.data_ptr(),
        expand.data_ptr(),
    ):
        raise InputError("scores: " + HAS_NAN)
    return Drawn(parents, tokens, log_probs, drawn, Nodes(places, expand))


def beam_observation(
    scores: Tensor, depths: Tensor, live: Tensor, expansions: Tensor, context: Tensor, window: Window
) -> Tensor:
    scores, depths = scores.contiguous(), depths.contiguous()
    out = _REAL.new_empty(window.room + 2 * window.repeats)
    shape = [window.width, window.last, window.room, window.repeats]
    floats = [window.pad, window.pad if window.pad < 0 else LOWEST, *window.units]
    numbers = live.data_ptr(), expansions.data_ptr(), context.data_ptr()
    _expander.beam_observation(shape, floats, scores.data_ptr(), depths.data_ptr(), *numbers, out.data_ptr())
    return out


def best_action(observation: Tensor, layers: Sequence[Tensor], activation: str) -> Tensor:
    sizes = [layers[0].shape[1], *(weight.shape[0] for weight in layers[::2])]
    observation, out = observation.contiguous(), _INDEX.new_empty(1)
    addresses = [part.data_ptr() for part in layers]
    _expander.best_action(sizes, addresses, activation == "tanh", observation.data_ptr(), out.data_ptr())
    return out


def chances(stated: Tensor, cells: Tensor, table: Tensor) -> Tensor:
    stated, cells, table = stated.contiguous(), cells.contiguous(), table.contiguous()
    out = torch.empty_like(stated)
    given = stated.data_ptr(), cells.data_ptr(), len(cells), table.data_ptr(), table.shape[1]
    _expander.chances(*given, out.data_ptr())
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
    nodes, tokens, stated = frontier.ids.contiguous(), tokens.contiguous(), stated.contiguous()
    sources = None if sources is None else sources.contiguous()
    made = Nodes(_INDEX.new_empty(most), torch.empty_like(size))
    if not _expander.hang_likely(
        [array.data_ptr() for array in tree],
        *tree[-1].shape,
        size.data_ptr(),
        overflow.data_ptr(),
        nodes.data_ptr(),
        frontier.live.data_ptr(),
        *tokens.shape,
        tokens.data_ptr(),
        stated.data_ptr(),
        _at(sources),
        [part.data_ptr() for part in counts],
        [part.data_ptr() for part in notes],
        least,
        most,
        made.ids.data_ptr(),
        made.live.data_ptr(),
    ):
        raise InputError(NOT_THERE)
    return made


def count_outcomes(tree: Arrays, size: Tensor, path: Nodes, chosen: Tensor, counts: Counts, notes: Notes) -> None:
    nodes, chosen = path.ids.contiguous(), chosen.contiguous()
    _expander.count_outcomes(
        [array.data_ptr() for array in tree],
        *tree[-1].shape,
        size.data_ptr(),
        nodes.data_ptr(),
        path.live.data_ptr(),
        nodes.shape[0],
        chosen.data_ptr(),
        [part.data_ptr() for part in counts],
        [part.data_ptr() for part in notes],
    )


def settle(ledger: Ledger, committed: Tensor) -> None:
    parts = ledger.verify, ledger.draft, ledger.prices.verify, ledger.prices.draft, ledger.earned, ledger.spent
    numbers = ledger.verified.data_ptr(), ledger.beside.data_ptr(), committed.data_ptr()
    sizes = len(ledger.verify), len(ledger.draft), MEMORY
    _expander.settle([part.data_ptr() for part in parts], *numbers, *sizes)


def select_worth(paths: Tensor, size: Tensor, price: Tensor, most: int) -> Nodes:
    paths, price = paths.contiguous(), price.contiguous()
    found = Nodes(_INDEX.new_empty(most), torch.empty_like(size))
    considered = min(most, len(price) - 1, len(paths))
    given = paths.data_ptr(), size.data_ptr(), len(paths), price.data_ptr(), considered, most
    if not _expander.select_worth(*given, found.ids.data_ptr(), found.live.data_ptr()):
        raise InputError("scores: " + HAS_NAN)
    return found


def next_pass(
    paths: Tensor, edges: Tensor, waiting: Tensor, size: Tensor, profile: Tensor, prices: Prices, rounds: int
) -> Nodes:
    paths, edges, waiting, profile = (part.contiguous() for part in (paths, edges, waiting, profile))
    verify, draft, widths = (part.contiguous() for part in prices)
    most = draft.shape[0] - 1
    found = Nodes(_INDEX.new_empty(most), torch.empty_like(size))
    _expander.next_pass(
        paths.data_ptr(),
        edges.data_ptr(),
        waiting.data_ptr(),
        size.data_ptr(),
        paths.shape[0],
        profile.data_ptr(),
        *profile.shape,
        [verify.data_ptr(), draft.data_ptr(), widths.data_ptr()],
        [verify.shape[0] - 1, most, widths.shape[0]],
        rounds,
        found.ids.data_ptr(),
        found.live.data_ptr(),
    )
    return found


def strict_cached_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, prefix: Tensor, live: Tensor, scale: float
) -> Tensor:
    if query.dtype is torch.float16:
        whole = strict_cached_attention(query.float(), key.float(), value.float(), paths, prefix, live, scale)
        return whole.to(torch.float16)
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    query, nodes, counts = query.contiguous(), paths.nodes.contiguous(), paths.counts.contiguous()
    (heads, rows, size), out = query.shape, torch.empty_like(query)
    _expander.strict_cached_attention(
        query.dtype is torch.bfloat16,
        [key.shape[0], heads // key.shape[0], rows, size, *key.stride()[:2], *value.stride()[:2]],
        scale,
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        nodes.shape[1],
        nodes.data_ptr(),
        counts.data_ptr(),
        prefix.data_ptr(),
        live.data_ptr(),
        out.data_ptr(),
    )
    return out


def keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    scores = scores.contiguous()
    return _expander.keyed_gumbel_argmax(scores.data_ptr(), scores.shape[0], seed, position)


def couple(logits: Tensor, token_ids: Tensor | None, positions: Tensor, seed: Tensor, scale: Tensor) -> Tensor:
    logits = logits.float()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = _REAL.new_empty(logits.shape)
    kept = positions.contiguous(), None if token_ids is None else token_ids.contiguous()
    given = logits.data_ptr(), *logits.shape, logits.stride(0), _at(kept[1]), kept[0].data_ptr()
    _expander.couple(*given, seed.data_ptr(), scale.data_ptr(), out.data_ptr())
    return out


def walk(tokens: Tensor, parents: Tensor, chosen: Tensor, size: Tensor) -> Walked:
    tokens, parents, chosen = tokens.contiguous(), parents.contiguous(), chosen.contiguous()
    found = Walked(torch.empty_like(tokens), torch.empty_like(size), _INDEX.new_empty(1))
    given = tokens.data_ptr(), parents.data_ptr(), chosen.data_ptr(), size.data_ptr(), tokens.shape[0]
    _expander.walk(*given, *(part.data_ptr() for part in found))
    return found


def compact_kv(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    if not slab.is_contiguous():
        by_meaning(attention.compact_kv, slab, path, count, prefix)
        return
    layers, two, heads, capacity, size = slab.shape
    path, row_bytes = path.contiguous(), size * slab.element_size()
    planes = slab.data_ptr(), layers * two * heads, capacity, row_bytes
    if not _expander.compact_rows(*planes, path.data_ptr(), path.shape[0], count.data_ptr(), prefix.data_ptr()):
        raise InputError(attention.WRONG_PATH)
