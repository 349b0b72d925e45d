"""Drafting by token recycling: after each token, what the target thought likely there when it saw that token last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specengine.drafters import NO_HINTS, About, Drafter, Hints, Traits
from specengine.errors import InputError
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.records import Cycle

MOST = 64  # successors: more than any tree has room for


@dataclass
class Recycling(Drafter):
    """A tree of the target's own likeliest successors of each token, rejected tokens included, as seen last.

    Every verification gives the target's distribution after each node of the tree; the `successors` best of it, 1 to
    64, with the probabilities that they have among themselves, are kept by the node's token and proposed where that
    token stands next. It needs no training and fits any model. What it knows stays from answer to answer, through
    `reset` too, and takes at most some kilobyte for each token of the vocabulary; `forget` drops it.

    After Luo et al. 2024, Turning Trash into Treasure (arXiv 2408.08696), which draws trees of one fixed shape.
    """

    successors: int = 8

    name = "recycling"
    about: ClassVar[About] = About(lookup=True, origin="recycled")

    _rows: dict[int, dict[int, float]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.successors <= MOST:
            raise InputError(f"draft recycling.successors: got {self.successors}, accepted 1 to {MOST}")

    @property
    def traits(self) -> Traits:
        return Traits(successors=self.successors)

    def begin(self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS) -> None:
        """Do nothing: prompts are taken in without logits."""

    def row(self, token: int) -> dict[int, float]:
        """The successors of a token and their probabilities, likeliest first; empty for one never seen. Not a copy."""
        return self._rows.get(token, {})

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        rows = [self.row(token) for token in tree.tokens[frontier.alive()].tolist()]
        columns = {token: column for column, token in enumerate(dict.fromkeys(token for row in rows for token in row))}
        shares = np.zeros((len(rows), max(1, len(columns))), np.float32)  # small arrays fill faster than tensors
        for values, row in zip(shares, rows, strict=True):
            values[[columns[token] for token in row]] = list(row.values())
        token_ids = torch.tensor(list(columns) or [0], device=tree.device, dtype=torch.int64)
        return Step(torch.from_numpy(shares).log_().to(tree.device), token_ids, normalized=True)

    def accept(self, cycle: Cycle) -> None:
        """Take in all nodes' successors; of a token that occurs twice those on the accepted path, else the last."""
        if cycle.successors is None:
            return
        probabilities = cycle.successors.logits.softmax(1).tolist()  # of a row without any: NaN
        found, tokens = cycle.successors.tokens.tolist(), cycle.tree.tokens.tolist()
        for node in (*range(len(tokens)), *cycle.path):
            row = {token: share for token, share in zip(found[node], probabilities[node], strict=True) if share > 0}
            if row:
                self._rows[tokens[node]] = row

    def reset(self) -> None:
        """Nothing: what it knows is of the model, not of a text."""

    def forget(self) -> None:
        """Drop all that was seen."""
        self._rows.clear()
