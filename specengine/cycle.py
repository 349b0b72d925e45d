"""A cycle driven eagerly: drafter and policy make a tree, the target's own choices are followed down."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specengine.drafters import Drafter
from specengine.ops import Nodes
from specengine.policies import TreePolicy
from specengine.records import Seconds
from specengine.tree import TokenTree


class Draft(NamedTuple):
    """What one cycle proposes."""

    tree: TokenTree  # what the target verifies
    grown: TokenTree  # all that was drafted
    kept: Tensor | None = None  # int64 [tree.size], the nodes of `grown` that make up `tree`; None: all of them

    @property
    def drafted(self) -> int:
        """Draft nodes proposed, the root excluded."""
        return len(self.grown) - 1


def draft_tree(
    token: int, drafter: Drafter | None, policy: TreePolicy | None, seconds: Seconds, device: torch.device
) -> Draft:
    """The tree under `token` that the target verifies, and the one that it was taken from.

    Without a drafter the tree is its root alone: plain decoding. Adds the time spent to `seconds`.
    """
    if drafter is None or policy is None:
        root = TokenTree.root(token, device=device)
        return Draft(root, root)
    tree = TokenTree.root(token, policy.capacity, device)
    frontier = Nodes(torch.zeros(1, dtype=torch.int64, device=device), torch.ones_like(tree.size))
    clock = time.perf_counter()
    while alive := int(frontier.live):
        frontier = Nodes(frontier.ids[:alive], frontier.live)
        step = drafter.step(tree, frontier.ids)
        tree.passes += 1
        drafted = time.perf_counter()
        frontier = policy.grow(tree, frontier, step)
        seconds.draft += drafted - clock
        clock = time.perf_counter()
        seconds.policy += clock - drafted
    kept = policy.keep(tree)
    kept = Nodes(kept.alive(), kept.live)
    verified = tree.subtree(kept)
    seconds.policy += time.perf_counter() - clock
    return Draft(verified, tree.trimmed(), kept.ids)


def walk(
    tree: TokenTree,
    choose: Callable[[int], int | None],
    commit: Callable[[int], bool],
) -> tuple[list[int], list[int]]:
    """Accepted node ids (root first) and committed tokens (those of the path below the root, then one more).

    choose  the target's token after a node, given the tokens committed so far; None where its logits are not finite
    commit  takes a chosen token, in order; True ends the walk, and the token is the last one committed

    At each node the target chooses once. While a child carries the chosen token, the walk moves there; the first
    token that no child carries is the bonus token. Lossless for any tree that does not depend on the noise of the
    choices, and no lossless rule accepts more. A node below the root whose logits are not finite is not entered:
    its token becomes the last one.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = [0]
    committed: list[int] = []
    token = choose(0)
    while token is not None:
        committed.append(token)
        if commit(token):
            break
        node = child.get((path[-1], token))
        if node is None:
            break
        token = choose(node)
        if token is not None:
            path.append(node)
    return path, committed
