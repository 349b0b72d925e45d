"""Ops on the rows of a draft's passes: from tokens that wait and from the nodes of a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specengine.ops._meanings import own_bits, require
from specengine.ops._registry import native, op
from specengine.ops.tree import Arrays, Nodes


class PassRows(NamedTuple):
    """Rows of a draft pass, [n], over a cache.

    tokens, positions  int64 [n]
    words              int64 [n, w]: which slots behind the committed ones each row sees
    slot               int64 [1], of the first row
    sources, targets   int64 [n]: rows of a state buffer that states are read from and written to
    one                int64 [1], the only row whose result is wanted, or None for all; `targets` is of it alone then
    factors            float32 [n, 1] of the logits, or None
    """

    tokens: Tensor
    positions: Tensor
    words: Tensor
    slot: Tensor
    sources: Tensor
    targets: Tensor
    one: Tensor | None
    factors: Tensor | None


@op
def root_rows(
    root: Tensor, held: Tensor, taken: Tensor, filled: Tensor, causal: Tensor, width: int, factors: Tensor | None
) -> PassRows:
    """Return the rows of a first pass: the tokens that wait, with the root in place of the last one.

    root: int64 [m], its first entry; held: int64 [waiting + 1], those that wait from entry 1 on; taken, filled: int32
    [1], how many wait, at most `width`, and committed slots; causal: int64 [waiting, w], words of consecutive tokens;
    factors: float32 [depths], of the first the pass has one.
    """
    if run := native.root_rows[held.device]:
        return PassRows(*run(root, held, taken, filled, causal, width, factors))
    wanted = "root: int64 [m]; held: int64 [h]; taken: int32 [1]; filled: int32 [1]; causal: int64 [n, w]"
    require(f"{wanted}; factors: float32 [depths]", root, held, taken, filled, causal, factors)
    place = torch.arange(width, device=held.device, dtype=torch.int64)
    last = (taken.long() - 1).clamp(min=0)
    tokens = held[1 : width + 1].scatter(0, last, root[:1])
    first = None if factors is None else factors[:1, None]
    return PassRows(tokens, filled + place, causal[:width], filled.long(), place, torch.zeros_like(last), last, first)


@op
def level_rows(
    tree: Arrays,
    size: Tensor,
    frontier: Nodes,
    filled: Tensor,
    used: Tensor,
    seen: Tensor,
    factors: Tensor | None,
) -> PassRows:
    """Return the rows of a pass from some nodes of a tree, whose slots stand behind the `used` ones, which grow.

    filled, used: int32 [1], committed slots and those of this tree; seen: int64 [nodes + 1, ceil(nodes / 64)], by node
    which of the latter it sees, the last row being what padding writes to; factors: float32 [depths], of the nodes of a
    depth, the last one also below. The nodes are none of each other's parents.
    """
    if run := native.level_rows[size.device]:
        return PassRows(*run(tree, size, frontier, filled, used, seen, factors))
    wanted = "frontier: int64 [n]; live: int32 [1]; filled: int32 [1]; used: int32 [1]; seen: int64 [nodes, w]"
    require(f"{wanted}; factors: float32 [depths]", *frontier, filled, used, seen, factors)
    spare, place = seen.shape[0] - 1, torch.arange(frontier.ids.shape[0], device=size.device, dtype=torch.int64)
    padding = place >= frontier.live  # reads of the root, and writes where nothing is read
    nodes, into = frontier.ids.masked_fill(padding, 0), frontier.ids.masked_fill(padding, spare)
    parents, depths = tree[1].index_select(0, nodes).clamp(min=0), tree[2].index_select(0, nodes)
    own = own_bits(spare, size.device).index_select(0, (used + place).clamp(max=spare - 1))
    words = seen.index_select(0, parents) | own
    seen.index_copy_(0, into, words)
    slot = (filled + used).long()
    used += frontier.live
    if factors is not None:
        factors = factors.index_select(0, depths.clamp(max=factors.shape[0] - 1))[:, None]
    return PassRows(tree[0].index_select(0, nodes), depths + (filled - 1), words, slot, parents, into, None, factors)


@op
def queue_rows(
    held: Tensor, taken: Tensor, tokens: Tensor, path: Nodes, buffer: Tensor | None, features: Tensor | None
) -> None:
    """Queue the tokens of a path behind the `taken` ones that wait, which grow.

    held: int64 [waiting + 1]; tokens: int64 [n], of the path's nodes; buffer: [waiting, width], takes the rows of the
    path's nodes of `features`, [nodes, width] of the same dtype. Entries beyond the last one go there.
    """
    if run := native.queue_rows[held.device]:
        return run(held, taken, tokens, path, buffer, features)
    wanted = "held: int64 [h]; taken: int32 [1]; tokens: int64 [n]; path: int64 [n]; live: int32 [1]"
    require(wanted, held, taken, tokens, *path)
    place = torch.arange(path.ids.shape[0], device=held.device, dtype=torch.int64)
    places = (taken + place).clamp(max=held.shape[0] - 2)  # warm-ups of a capture accept one path several times
    held.index_copy_(0, places, tokens)  # the root, then those that the next pass runs
    if buffer is not None and features is not None:
        buffer.index_copy_(0, places, features.index_select(0, path.ids))
    taken += path.live
    return None
