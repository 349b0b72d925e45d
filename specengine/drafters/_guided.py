"""Drafting inside a grammar: forced tokens cost no draft pass, and forbidden ones are not proposed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from specengine.drafters import Drafter, Wrapped
from specengine.ops import Nodes
from specengine.ops.select import FREE, Step, ids_with
from specengine.ops.tree import Free, TokenTree

if TYPE_CHECKING:
    from specengine.request.grammars import Constraint


class Guided(Wrapped):
    """A drafter for constrained answers: `drafter`, corrected along each node's path.

    written: the tokens generated so far, the tree's root among them unless it is the prompt's last; it grows outside.
    Tokens that the grammar forces have probability 1, in a draft pass and, as `free`, without one.
    """

    def __init__(self, drafter: Drafter, constraint: Constraint, written: list[int]) -> None:
        super().__init__(drafter)
        self.constraint, self.written = constraint, written

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        """Return forced continuations of these nodes, and behind them and other nodes the drafter's own free ones."""
        size, made, ends = len(tree), Free([], [], [], [], []), []
        scores, parents, tokens = (
            values[:size].tolist() for values in (tree.path_log_probs, tree.parents, tree.tokens)
        )
        children = set(zip(parents, tokens, strict=True))
        for node in sorted(nodes.alive().tolist(), key=lambda node: -scores[node]):
            end = node
            if scores[node] >= least:
                for token in self.constraint.forced(self._path(tree, node))[: most - len(made.tokens)]:
                    if (end, token) in children:
                        break
                    _append(made, end, token, 0.0, FREE, 0)
                    end = size + len(made.tokens) - 1
            ends.append(end)
        grown = _grafted(tree, made)
        left = most - len(made.tokens)
        below = torch.tensor(sorted(ends), dtype=torch.int64, device=tree.device)
        found = self.inner.free(grown, Nodes.of(below), left, least) if left else None
        if found is not None:
            self._add_allowed(made, found, grown)
        return made if made.tokens else None

    def _add_allowed(self, made: Free, found: Free, tree: TokenTree) -> None:
        """Append the continuations that the grammar allows on their own path."""
        size, first = len(tree), len(tree) - len(made.tokens)
        places: dict[int, int | None] = {}
        paths: dict[int, list[int]] = {}
        for entry, (parent, token) in enumerate(zip(found.parents, found.tokens, strict=True)):
            place = parent if parent < size else places[parent]
            path = paths.get(parent) or self._path(tree, parent) if parent < size else paths.get(parent, [])
            allowed = place is not None and self.constraint.allows(path, token)
            places[size + entry] = first + len(made.tokens) if allowed else None
            if allowed:
                assert place is not None
                paths[size + entry] = [*path, token]
                _append(made, place, token, found.log_probs[entry], found.marks[entry], found.ranks[entry])

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        paths = [self._path(tree, node) for node in frontier.alive().tolist()]
        forced = [found[0] if (found := self.constraint.forced(path)) else None for path in paths]
        ids = None if step.token_ids is None else step.token_ids.cpu().numpy()
        width, rows = step.logits.shape[1], step.logits.shape[0]
        known = set(range(width)) if ids is None else set(ids.tolist())
        new = sorted({token for token in forced if token is not None and token not in known})
        columns = np.concatenate([np.arange(width) if ids is None else ids, np.array(new, np.int64)])
        kept = np.ones((rows, len(columns)), bool)
        kept[:, width:] = False
        for row, (path, token) in enumerate(zip(paths, forced, strict=True)):
            kept[row] = self.constraint.allowed(path)[columns] if token is None else columns == token
            kept[row, width:] &= token is not None
        logits = torch.nn.functional.pad(step.logits.float(), (0, len(new)), value=-float("inf"))
        logits = logits.masked_fill(torch.from_numpy(~kept).to(logits.device), -float("inf"))
        marks = step.marks if step.marks is None else torch.nn.functional.pad(step.marks, (0, len(new)))
        sure = [row for row, token in enumerate(forced) if token is not None]
        if sure:
            marks = torch.zeros_like(logits, dtype=torch.uint8) if marks is None else marks.clone()
            marks[sure] = FREE
            logits[sure] = torch.where(torch.from_numpy(kept[sure]).to(logits.device), 0.0, -float("inf"))
        return Step(logits, ids_with(step, new) if new else step.token_ids, step.normalized, step.hidden, marks)

    def _path(self, tree: TokenTree, node: int) -> list[int]:
        return [*self.written, *tree.path_tokens(node)]


def _append(made: Free, parent: int, token: int, log_prob: float, mark: int, rank: int) -> None:
    made.parents.append(parent)
    made.tokens.append(token)
    made.log_probs.append(log_prob)
    made.marks.append(mark)
    made.ranks.append(rank)


def _grafted(tree: TokenTree, made: Free) -> TokenTree:
    if not made.tokens:
        return tree
    grown = tree.to(tree.device)
    grown.graft(made.parents, made.tokens, made.log_probs)
    return grown
