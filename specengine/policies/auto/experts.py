"""Experts that the nodes of a tree add to a forward of a mixture of experts: counted by their relation, predicted."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

from specengine.costs import PassCosts, interpolated
from specengine.ops.tree import TokenTree
from specengine.ops.worth import RELATIONS, relation_of

WIDER_ROWS = 4.0  # that a wider count stands for in a narrower one
COUNTED_ROWS = 1000.0  # that a count remembers


class ExpertReads:
    """Predict how many experts each node of a tree adds to those that the nodes before it use.

    each, existing: experts that a row uses, and that there are, over all layers.

    Where a share of all experts is read already, so large a share of a row's is not new if its experts are independent
    of them: that is what it begins with, and n rows read all * (1 - (1 - each / all)^n). Texts are not like that: a
    token uses some of its parent's experts, and alternatives at one place some of each other's. So it counts how many
    experts were new, over how many would have been: for first and for later siblings, and for each relation to the
    nodes before (ops.worth.relation_of). The narrower count is trusted as it grows.
    """

    def __init__(self, each: int, existing: int) -> None:
        self.each, self.existing = each, existing
        self.extra = 0.0  # seconds of experts that the last tree read and its price had not
        self._expected: list[float] = []  # experts that prices take each node to add
        self._counts = [_Count() for _ in range(RELATIONS)]

    def learn(self, parents: Sequence[int], depths: Sequence[int], added: Sequence[int]) -> None:
        """Count a verified tree: of each node its parent, its depth, and the experts that it added; the root first."""
        read = added[0]
        for relation, new in zip(relations(parents, depths), added[1:], strict=True):
            self._counts[relation].add(new, self.each * (1 - read / self.existing))
            read += new

    def ratios(self) -> list[float]:
        """Return how many experts were new over how many would have been, by relation."""
        kinds = [_Count.sum(self._counts[kind::2]).ratio(1.0) for kind in range(2)]
        return [count.ratio(kinds[relation % 2]) for relation, count in enumerate(self._counts)]

    def least(self, nodes: int) -> list[float]:
        """Return how many experts each node adds, the root first, if all are of the relation that adds least."""
        return self._added([min(self.ratios())] * (nodes - 1))

    def difference(self, costs: PassCosts, nodes: int) -> Tensor:
        """Return by nodes the cost of reading as many experts as trees do here, less that in the measured costs.

        Each node counts as one of the relation that adds the fewest: such a node is mostly there to be drafted.
        """
        self._expected = self.least(nodes)
        read, measured = torch.tensor(
            [
                [0.0, *itertools.accumulate(self._expected)],
                [0.0, *(interpolated(costs.experts, n) for n in range(1, nodes + 1))],
            ],
            dtype=torch.float32,
            device="cpu",
        ).unbind()
        return costs.expert * (read - measured)

    def prices(self, seconds: float) -> list[float]:
        """Return what a row's experts cost and how many are new, as Throughput has it; seconds: of one expert."""
        return [seconds * self.each, self.each / self.existing, *self.ratios()]

    def observe(self, tree: TokenTree, added: Sequence[int], seconds: float) -> float:
        """Count a verified tree; return, and keep as `extra`, what it took beyond its price; seconds: of one expert."""
        self.learn(tree.parents.tolist(), tree.depths.tolist(), added)
        self.extra = seconds * (sum(added) - sum(self._expected[: len(added)]))
        return self.extra

    def _added(self, ratios: Iterable[float]) -> list[float]:
        added, read = [float(self.each)], float(self.each)
        for ratio in ratios:
            added.append(self.each * min(1.0, ratio * (1 - read / self.existing)))
            read += added[-1]
        return added


class _Count:
    """Sums over rows: new experts, how many of independent rows would have been, and the rows."""

    def __init__(self, new: float = 0.0, independent: float = 0.0, rows: float = 0.0) -> None:
        self.new, self.independent, self.rows = new, independent, rows

    @classmethod
    def sum(cls, counts: Iterable[Self]) -> Self:
        parts = ((count.new, count.independent, count.rows) for count in counts)
        return cls(*map(sum, zip(*parts, strict=True)))

    def add(self, new: float, independent: float) -> None:
        decay = min(1.0, COUNTED_ROWS / (self.rows + 1))
        self.new, self.independent = decay * self.new + new, decay * self.independent + independent
        self.rows = decay * self.rows + 1

    def ratio(self, wider: float) -> float:
        """Return new over independent experts; `wider`, that of a wider count, stands for WIDER_ROWS rows."""
        beside = WIDER_ROWS * (self.independent / self.rows if self.independent else 1.0)
        return (self.new + beside * wider) / (self.independent + beside)


def relations(parents: Sequence[int], depths: Sequence[int]) -> list[int]:
    """Return the relation of each node below the root to the nodes before it."""
    first = {parent: node for node, parent in reversed([*enumerate(parents)][1:])}
    return [
        relation_of(depths[node], first[parents[node]] < node) for node in range(1, len(parents))
    ]
