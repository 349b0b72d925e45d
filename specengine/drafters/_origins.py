"""Sources of the nodes of a tree, for traces."""

from __future__ import annotations

import math

from specengine.drafters import Drafter, Wrapped
from specengine.ops import Nodes
from specengine.ops.select import COPIED, RECYCLED, Step
from specengine.ops.tree import Free, TokenTree


class Origins(Wrapped):
    """A drafter that notes the source of each node if it is `wanted`: draft, copies, recycled tokens, grammar.

    Synchronises with a device in each pass.
    """

    _passed: set[int]  # nodes that were drafted from
    _marks: dict[tuple[int, int], int]  # by parent and token
    _free: dict[tuple[int, int], int]

    def __init__(self) -> None:
        self.wanted = False
        self._forget()

    def around(self, drafter: Drafter) -> Origins:
        """Return this, to grow trees from instead of `drafter`."""
        super().__init__(drafter)
        self._forget()
        return self

    def of(self, tree: TokenTree) -> list[str | None]:
        """Return the source of each node of the last tree, None for the root and nodes grown without this drafter.

        Below a node that was not drafted from, the distribution is that of the node of its depth that was (`ddtree`).
        """
        parents, depths = tree.parents.tolist(), tree.depths.tolist()
        by_depth = {depths[node]: node for node in self._passed if node < len(depths)}
        lenders = [by_depth.get(depths[parent], parent) if parent not in self._passed else parent for parent in parents]
        found = list(map(self._origin, parents, lenders, tree.tokens.tolist()))
        self._forget()
        return found

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        found = self.inner.free(tree, nodes, most, least)
        self._free = {}  # what a rule has only looked at
        for parent, token, mark in zip(*found[:2], found.marks, strict=True) if found is not None else ():
            self._free[parent, token] = mark
        return found

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        ids = frontier.alive().tolist()
        self._passed.update(ids)
        self._free = {}
        if step.marks is not None:
            raised = (step.marks[: len(ids)] > 0) & (step.logits[: len(ids)] > -math.inf)
            rows, columns = raised.nonzero(as_tuple=True)
            tokens, marks = step.tokens_of(columns).tolist(), step.marks[rows, columns].tolist()
            for row, token, mark in zip(rows.tolist(), tokens, marks, strict=True):
                self._marks[ids[row], token] = mark
        return step

    def _forget(self) -> None:
        self._passed, self._marks, self._free = set(), {}, {}

    def _origin(self, parent: int, lender: int, token: int) -> str | None:
        if parent < 0:
            return None
        mark = self._free.get((parent, token)) or self._marks.get((parent, token)) or self._marks.get((lender, token))
        if mark is None:
            return self.inner.about.origin if lender in self._passed else None
        return "copied" if mark & COPIED else "recycled" if mark & RECYCLED else "forced"
