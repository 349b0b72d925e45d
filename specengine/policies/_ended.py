"""Growth on the device that a rule of the policy ends: a module of policies, none itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specengine import ops
from specengine.device_tree import DeviceTree
from specengine.policies._levels import BeamLevels, Levels, Scored, target_ids

if TYPE_CHECKING:
    from specengine.policies._chain import StoppedChain
    from specengine.policies.dynatree import DynaTree
    from specengine.policies.opt_tree import OptTree
    from specengine.policies.specdecpp import Specdecpp


class StoppedBeamLevels(BeamLevels):
    """EAGLE-2's beam, up to the level of which `stops`, bool [1], says that it is not drafted from any more."""

    ends_early = True

    def __init__(self, width: int, passes: int, stops: Callable[[Scored], Tensor]) -> None:
        super().__init__(width, passes)
        self._stops = stops

    def goes_on(self, scored: Scored) -> Tensor:
        return super().goes_on(scored) & ~self._stops(scored)


class AcceptedLevels(BeamLevels):
    """SpecDec++: the beam, up to where its head doubts that a path was accepted so far."""

    ends_early = True

    def __init__(self, policy: Specdecpp) -> None:
        super().__init__(policy.width, policy.expansions + 1)
        self._policy = policy
        self._reached: Tensor | None = None  # by node, and a spare one: product of acceptances from the root

    def goes_on(self, scored: Scored) -> Tensor:
        tree, (nodes, _, _, live), passes = scored.tree, scored.frontier, scored.passes
        if self._reached is None:
            self._reached = torch.ones(tree.capacity + 1, device=nodes.device)
        acceptance = self._policy.acceptance(None if self.states is None else self.states(nodes))
        above = self._reached.index_select(0, tree.parents.index_select(0, nodes).clamp(min=0))
        reached = (above * acceptance).masked_fill(passes == 1, 1.0)  # the root is certain
        padding = torch.arange(len(nodes), device=nodes.device) >= live
        self._reached.index_copy_(0, nodes.masked_fill(padding, tree.capacity), reached)
        doubtful = self._policy.is_doubtful(reached.masked_fill(padding, 0.0))
        asked = passes > max(self._policy.minimum, 1)
        return super().goes_on(scored) & ~(asked & doubtful)


class StoppedChainLevels(Levels):
    """A chain that ends before the first token of which the policy is not sure, but never before the first of all."""

    width, ends_early = 1, True

    def __init__(self, policy: StoppedChain) -> None:
        self.passes = policy.length
        self._policy = policy

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        log_probs, columns = ops.top_children(logits, 1)
        edge, column = log_probs[:, 0], columns[:, 0]
        sure = self._policy.is_sure(edge.double(), frontier.scores.double())
        count = frontier.live * ((edge > -math.inf) & (sure | (level == 1)))
        expand = ops.Found(torch.zeros_like(column), count * (sure & (level < self.passes)))
        return tree.add(frontier.nodes, target_ids(column, ids), edge, count, expand)


class BranchedLevels(Levels):
    """DynaTree without its history: as many children as a node is unsure of, from where a path is probable enough."""

    ends_early = True

    def __init__(self, policy: DynaTree) -> None:
        # Paths of one length exclude each other, so their probabilities sum to one, or more by what rounding adds.
        probable = math.inf if not policy.lowest else 1.001 / policy.lowest
        self.width = int(min(policy.nodes, policy.branch_max**policy.max_depth, probable))
        self.passes = policy.max_depth + 1
        self._policy = policy

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        policy = self._policy
        log_probs, columns = ops.top_children(logits, policy.branch_max)
        rows, children = columns.shape
        paths = frontier.scores[:, None] + log_probs
        flags = policy.chosen(log_probs, paths, level == 1).reshape(-1)
        most = min(rows * children, policy.nodes)
        new = ops.select_nodes(_where(flags), frontier.live * children, most, policy.capacity - tree.size)
        row = new.indices // children
        tokens, edges, sums = (part.reshape(-1).index_select(0, new.indices) for part in (columns, log_probs, paths))
        expandable = policy.expandable(frontier.depths.index_select(0, row) + 1, sums)
        drafted = ops.select_nodes(_where(expandable), new.live, self.width)
        expand = ops.Found(drafted.indices, drafted.live * (tree.size + new.live < policy.capacity))
        parents = frontier.nodes.index_select(0, row)
        return tree.add(parents, target_ids(tokens, ids), edges, new.live, expand)


class OptimalLevels(Levels):
    """OPT-Tree: the best of each layer, until a layer adds too little to the value of the best of all."""

    ends_early = True

    def __init__(self, policy: OptTree) -> None:
        self.width, self.passes = policy.nodes, policy.max_depth
        self._policy = policy
        self._known: tuple[Tensor, Tensor] | None = None  # of the tree so far: value, float64 [1]; passes, int32 [1]

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        if self._known is None:
            self._known = torch.zeros_like(level, dtype=torch.float64), torch.zeros_like(level)
        policy, (value, passes) = self._policy, self._known
        no_gate, limit = torch.full_like(frontier.scores[:1], -math.inf), torch.full_like(level, self.width)
        found = ops.select_candidates(logits, frontier.scores, self.width, limit, no_gate)
        parents = frontier.nodes.index_select(0, found.rows)
        all_of_it = ops.Found(torch.arange(self.width, device=logits.device), found.live)
        layer = tree.add(parents, target_ids(found.columns, ids), found.log_probs, found.live, all_of_it)
        before = value.masked_fill(level == 1 + policy.lag, -math.inf)
        value.copy_(self._expected(tree, level))
        passes.copy_(level)
        ends = ~policy.goes_on(level, value - before)
        nodes, depths, scores, live = layer
        return ops.Frontier(
            nodes.masked_fill(ends, 0), depths.masked_fill(ends, 0), scores.masked_fill(ends, -math.inf), live * ~ends
        )

    def finish(self, tree: DeviceTree) -> None:
        if self._policy.lag and self._known is not None:  # what is left out competes no more
            tree.path_log_probs.copy_(self._policy.counted(tree.path_log_probs, tree.depths, self._known[1]))

    def _expected(self, tree: DeviceTree, passes: Tensor) -> Tensor:
        scores = self._policy.counted(tree.path_log_probs, tree.depths, passes)
        kept = ops.select_nodes(scores, tree.size, self._policy.budget)
        padding = torch.arange(len(kept.indices), device=scores.device) >= kept.live
        return self._policy.expected(scores.index_select(0, kept.indices).masked_fill(padding, -math.inf))


def _where(flags: Tensor) -> Tensor:
    """Scores by which `select_nodes` takes the first entries that are flagged."""
    return torch.zeros_like(flags, dtype=torch.float32).masked_fill(~flags, -math.inf)
