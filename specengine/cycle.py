"""A cycle: a tree is grown, verified, walked down and committed; and the driver that does so eagerly.

Its parts are written once. The eager driver calls them in a loop, the captured one (captured.py) replays them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specengine import contracts, ops
from specengine.drafters import Drafter, Step
from specengine.models import Target
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy
from specengine.records import Seconds
from specengine.request.sampling import Sampler


class Draft(NamedTuple):
    """What one cycle proposes."""

    tree: TokenTree  # what the target verifies
    grown: TokenTree  # all that was drafted
    kept: Tensor | None = None  # int64 [tree.size], the nodes of `grown` that make up `tree`; None: all of them

    @property
    def drafted(self) -> int:
        """Draft nodes proposed, the root excluded."""
        return len(self.grown) - 1


def first(drafter: Drafter, policy: TreePolicy, tree: TokenTree, seconds: Seconds) -> Nodes:
    """Of a tree that is its root alone: whom to draft from, the root, or nobody."""
    began = time.perf_counter()
    frontier = policy.first(tree, drafter)
    if not isinstance(frontier, Nodes):
        raise contracts.no_nodes(policy, "first", frontier)
    seconds.policy += time.perf_counter() - began
    return frontier


def root(drafter: Drafter, policy: TreePolicy, tree: TokenTree, frontier: Nodes, seconds: Seconds) -> Nodes:
    """The first draft pass, and the first level; whom to draft from next."""
    return _grown(policy, tree, frontier, lambda _: drafter.root(tree), seconds)


def level(drafter: Drafter, policy: TreePolicy, tree: TokenTree, frontier: Nodes, seconds: Seconds) -> Nodes:
    """One draft pass from the frontier, and the next level; nothing, on a device, where the frontier is empty."""
    if ops.is_free(frontier.live):
        frontier = Nodes(frontier.alive(), frontier.live)
        if not len(frontier.ids):
            return frontier
    return _grown(policy, tree, frontier, lambda nodes: drafter.step(tree, nodes), seconds)


def _grown(
    policy: TreePolicy, tree: TokenTree, frontier: Nodes, step: Callable[[Nodes], Step], seconds: Seconds
) -> Nodes:
    began = time.perf_counter()
    found = step(frontier)
    drafted = time.perf_counter()
    tree.passes += frontier.live > 0
    grown = policy.grow(tree, frontier, found)
    if not isinstance(grown, Nodes):
        raise contracts.no_nodes(policy, "grow", grown)
    seconds.draft += drafted - began
    seconds.policy += time.perf_counter() - drafted
    return grown


def keep(policy: TreePolicy, grown: TokenTree, seconds: Seconds) -> Draft:
    """What of a grown tree, where the host reads it without waiting or waits, the target verifies."""
    clock = time.perf_counter()
    kept = policy.keep(grown)
    if not isinstance(kept, Nodes):
        raise contracts.no_nodes(policy, "keep", kept)
    kept = Nodes(kept.alive(), kept.live)
    verified = grown.subtree(kept)
    seconds.policy += time.perf_counter() - clock
    return Draft(verified, grown.trimmed(), kept.ids)


def draft_tree(
    token: int, drafter: Drafter | None, policy: TreePolicy | None, seconds: Seconds, device: torch.device
) -> Draft:
    """The tree under `token` that the target verifies, and the one that it was taken from.

    Without a drafter, or while the policy rests, it is its root alone: plain decoding. Adds the time spent to
    `seconds`.
    """
    if drafter is None or policy is None or policy.rests:
        alone = TokenTree.root(token, device=device)
        return Draft(alone, alone)
    tree = TokenTree.root(token, policy.capacity, device)
    frontier = first(drafter, policy, tree, seconds)
    if drafted := int(frontier.live):
        frontier = root(drafter, policy, tree, frontier, seconds)
    while width := int(frontier.live):
        drafted += width
        if drafted > tree.capacity:
            raise contracts.endless(policy)
        frontier = level(drafter, policy, tree, frontier, seconds)
    began = time.perf_counter()
    policy.last(tree, drafter)
    seconds.policy += time.perf_counter() - began
    return keep(policy, tree, seconds)


class EagerDriver:
    """Cycles of these parts, called as they are."""

    def __init__(self, target: Target, drafter: Drafter | None, policy: TreePolicy | None) -> None:
        contracts.require_parts(drafter, policy)
        self.target, self.drafter, self.policy = target, drafter, policy
        self.device = target.device if drafter is None else drafter.device
        self.budget = 1 if policy is None else min(policy.budget, policy.capacity)
        self.longest = 1 if policy is None else longest_path(policy)
        self.unread = self.longest + (0 if policy is None else policy.patience)  # tokens between draft passes
        self._inspected = False  # whether a tree has been looked at closely

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens and the trees behind them."""
        self.target.reserve(tokens, self.budget)
        if self.drafter is not None and self.policy is not None:
            self.drafter.reserve(tokens, self.policy.capacity, self.unread)

    def draft(self, token: int, seconds: Seconds, guided: Drafter | None = None) -> Draft:
        """As `draft_tree`; guided: from whom trees grow instead of its own drafter."""
        source = guided or self.drafter
        if not self._inspected and source is not None and self.policy is not None and not self.policy.rests:
            return self._inspect(token, seconds, source, self.policy)
        return draft_tree(token, source, self.policy, seconds, self.device)

    def _inspect(self, token: int, seconds: Seconds, source: Drafter, policy: TreePolicy) -> Draft:
        """As `draft`, and raise PolicyError or DrafterError for what either part breaks of its promises."""
        looked_at = cast(Drafter, contracts.Inspected(source, policy, self.target.vocab_size))
        draft = draft_tree(token, looked_at, policy, seconds, self.device)
        contracts.require_kept(policy, draft.kept, draft.grown)
        self._inspected = len(draft.grown) > 1
        return draft

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        """As `Target.verify`."""
        return self.target.verify(tree)

    def prepare(self, sampler: Sampler) -> None:
        """A generation begins, whose prompt the target and the draft have taken in."""


def longest_path(policy: TreePolicy) -> int:
    """Nodes from the root to a leaf of its trees, at most."""
    try:
        return min(policy.passes + 1, policy.capacity)
    except NotImplementedError:
        return policy.capacity


def walk(
    tree: TokenTree,
    choose: Callable[[int], int | None],
    commit: Callable[[int], bool],
) -> tuple[list[int], list[int]]:
    """Accepted node ids (root first) and committed tokens (those of the path below the root, then one more).

    choose  the target's token after a node, given the tokens committed so far; None where its logits are not finite
    commit  takes a chosen token, in order; True ends the walk, and the token is the last one committed

    At each node the target chooses once. While a child carries the chosen token, the walk moves there; the first
    token that no child carries is the bonus token. Lossless for any tree where the noise of a choice is a function of
    its position, fixed before the first tree; for trees that do not depend on the noise no lossless rule accepts more.
    A node below the root whose logits are not finite is not entered:
    its token becomes the last one.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    if len(child) < len(tokens):
        raise contracts.twins(tokens, parents)
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
