"""The growth loop: drafter and policy make a tree."""

from __future__ import annotations

import time

import torch

from specengine.cycle import Seconds
from specengine.drafters import Drafter
from specengine.policies import TreePolicy
from specengine.tree import TokenTree


def draft_tree(
    token: int, drafter: Drafter | None, policy: TreePolicy | None, seconds: Seconds, device: torch.device
) -> tuple[TokenTree, int]:
    """The tree under `token` that the target verifies, and how many draft nodes were proposed for it.

    Without a drafter the tree is its root alone: plain decoding. Adds the time spent to `seconds`.
    """
    if drafter is None or policy is None:
        return TokenTree.root(token, device=device), 0
    tree = TokenTree.root(token, policy.capacity, device)
    frontier = torch.zeros(1, dtype=torch.int64, device=device)
    clock = time.perf_counter()
    while len(frontier):
        step = drafter.step(tree, frontier)
        tree.passes += 1
        drafted = time.perf_counter()
        frontier = policy.grow(tree, frontier, step)
        seconds.draft += drafted - clock
        clock = time.perf_counter()
        seconds.policy += clock - drafted
    kept = tree.subtree(policy.keep(tree))
    seconds.policy += time.perf_counter() - clock
    return kept, tree.size - 1
