"""The growth loop: drafter and policy make a tree."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from specengine.cycle import Seconds
from specengine.drafters import Drafter
from specengine.ops import Nodes
from specengine.policies import TreePolicy
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
