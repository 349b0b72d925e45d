"""Predict how many experts a tree's rows read, from what was counted in earlier trees."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.ops.worth import RELATIONS, relation_of

ROWS = 8.0  # that an estimate counts for
WINDOW = 2000.0  # rows that a bucket remembers
BUCKETS = 8  # of the number of rows before: 1, 2 to 3, 4 to 7 and so on


class ExpertReads:
    """Predicts how many experts each node of a tree adds to those that the nodes before it use.

    each, all: experts that a row uses, and that there are, over all layers.

    Of the experts that a row uses, (1 - each / all)^n are new after n rows whose experts are independent. That is what
    it begins with. Texts are not like that: a token uses some of its parent's experts, and alternatives at one place
    some of each other's. So it counts, by a node's relation to those before it (ops.worth.relation_of) and by their
    number, how many experts were new, against how many would have been.
    """

    def __init__(self, each: int, all_: int) -> None:
        self.each, self.all = each, all_
        self._counted = [[0.0] * BUCKETS for _ in range(RELATIONS)]
        self._independent = [[0.0] * BUCKETS for _ in range(RELATIONS)]
        self._rows = [[0.0] * BUCKETS for _ in range(RELATIONS)]

    def independent(self, before: int) -> float:
        """Return how many experts a row adds to those of so many rows, if all are independent."""
        return self.each * (1 - self.each / self.all) ** before

    def learn(self, parents: Sequence[int], depths: Sequence[int], added: Sequence[int]) -> None:
        """Count a verified tree: of each node its parent, its depth, and the experts that it added; the root first."""
        for node, relation in enumerate(relations(parents, depths), 1):
            at = _bucket(node)
            self._counted[relation][at] += added[node]
            self._independent[relation][at] += self.independent(node)
            self._rows[relation][at] += 1
            if self._rows[relation][at] > WINDOW:
                for sums in (self._counted, self._independent, self._rows):
                    sums[relation][at] *= 0.5

    def table(self, nodes: int) -> list[list[float]]:
        """Return how many experts a node adds, by its relation and the number of nodes before it, below `nodes`."""
        return [[self.each, *(self._new(relation, n) for n in range(1, nodes))] for relation in range(RELATIONS)]

    def mean(self, nodes: int) -> list[float]:
        """Return the same whatever the relation, as often as each of them was met."""
        return [self.each, *(min(self.each, self.independent(n) * self._ratio(_bucket(n))) for n in range(1, nodes))]

    def predict(self, parents: Sequence[int], depths: Sequence[int]) -> list[float]:
        """Return how many experts each node of a tree adds, the root first."""
        return [self.each, *(self._new(of, node) for node, of in enumerate(relations(parents, depths), 1))]

    def _new(self, relation: int, before: int) -> float:
        at, independent = _bucket(before), self.independent(before)
        beside = ROWS * independent
        counted = self._counted[relation][at] + beside * self._ratio(at)
        return min(self.each, independent * counted / (self._independent[relation][at] + beside)) if beside else 0.0

    def _ratio(self, at: int) -> float:
        """Return how many experts were new after so many rows, over how many would have been."""
        beside = ROWS * self.independent(1 << at)
        counted, independent = (sum(row[at] for row in sums) for sums in (self._counted, self._independent))
        return (counted + beside) / (independent + beside) if beside else 1.0


def relations(parents: Sequence[int], depths: Sequence[int]) -> list[int]:
    """Return the relation of each node below the root to the nodes before it."""
    seen, found = set[int](), list[int]()
    for parent, depth in zip(parents[1:], depths[1:], strict=True):
        found.append(relation_of(depth, parent in seen))
        seen.add(parent)
    return found


def _bucket(before: int) -> int:
    return min(before.bit_length() - 1, BUCKETS - 1)
