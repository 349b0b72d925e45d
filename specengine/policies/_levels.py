"""How policies grow trees that stand on the device, a draft pass at a time: a module of policies, none itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from specengine import ops
from specengine.device_tree import DeviceTree


class Levels(ABC):
    """A policy's `grow` with fixed shapes and without the host: it can be captured, once for the root and once for all
    later passes.

    width       nodes drafted from in one pass, at most
    passes      draft passes per tree, at most
    ends_early  whether a tree may end before that: then its frontier is empty
    """

    width: int
    passes: int
    ends_early: bool

    @abstractmethod
    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        """Hang children under the frontier; whom to draft from next, `width` of them with padding.

        frontier: of as many nodes as logits, [rows, draft vocabulary], has rows; ids: int64 [draft vocabulary], the
        target's id of each column, or None where they are the columns; level: int32 [1], passes so far.
        """


class NoLevels(Levels):
    """A tree of its root alone."""

    width, passes, ends_early = 1, 0, False

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        return frontier


class BeamLevels(Levels):
    """EAGLE-2's beam: `width` children of each node, the best `width` of which are drafted from."""

    ends_early = False

    def __init__(self, width: int, passes: int) -> None:
        self.width, self.passes = width, passes

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        log_probs, columns = ops.top_children(logits, self.width)
        parents = frontier.nodes[:, None].expand_as(columns).reshape(-1)
        tokens, edges = _target_ids(columns.reshape(-1), ids), log_probs.reshape(-1)
        count = frontier.live * columns.shape[1]
        paths = (frontier.scores[:, None] + log_probs).reshape(-1)
        beam = ops.select_nodes(paths, count, self.width)
        drafted = beam.live * (level < self.passes)
        return tree.add(parents, tokens, edges, count, ops.Found(beam.indices, drafted))


class GatedLevels(Levels):
    """TALON: the layer's best within a factor of its largest path probability, until the budget is spent."""

    ends_early = True

    def __init__(self, budget: int, width: int, mu: float, robust_layers: int, max_depth: int | None) -> None:
        self.width = max(budget - 1, 1)
        self.passes = min(budget - 1, max_depth or budget)
        self._budget, self._layer, self._robust = budget, width, robust_layers
        self._gates = torch.tensor([math.log(mu), -math.inf])

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        if self._gates.device != logits.device:
            self._gates = self._gates.to(logits.device)
        robust = level <= self._robust
        room = self._budget - tree.size
        limit = torch.where(robust, room.clamp(max=self._layer), room)
        gate = self._gates.index_select(0, robust.long())
        found = ops.select_candidates(logits, frontier.scores, self.width, limit, gate)
        goes_on = (tree.size + found.live < self._budget) & (level < self.passes)
        nodes = torch.arange(self.width, device=logits.device)
        expand = ops.Found(nodes, found.live * goes_on)
        parents = frontier.nodes.index_select(0, found.rows)
        return tree.add(parents, _target_ids(found.columns, ids), found.log_probs, found.live, expand)


def _target_ids(columns: Tensor, ids: Tensor | None) -> Tensor:
    return columns if ids is None else ids.index_select(0, columns)
