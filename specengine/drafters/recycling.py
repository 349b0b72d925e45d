"""Drafting by token recycling: after each token, what the target thought likely there when it saw that token last."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from specengine.drafters import NO_HINTS, About, Hints, Recycler, Traits
from specengine.drafters.lookup import SuccessorTable, backend, learn, sparse_step
from specengine.errors import require
from specengine.ops import Nodes, Step, TokenTree
from specengine.records import Cycle

SUCCESSORS_LIMIT = 64  # more than any tree has room for


@dataclass
class Recycling(Recycler):
    """Drafts trees of the target's own likeliest successors of each token, rejected tokens included, as seen last.

    Every verification gives the target's distribution after each node of the tree. The `successors` best of it, 1 to
    64, with the probabilities that they have among themselves, are kept by the node's token and proposed where that
    token stands next. It needs no training and fits any model. The successors stay from answer to answer, through
    `reset` too, and take at most some kilobyte per token of the vocabulary; `forget` drops them.

    After Luo et al. 2024, Turning Trash into Treasure (arXiv 2408.08696), which draws trees of one fixed shape.
    """

    successors: int = 8

    name = "recycling"
    about: ClassVar[About] = About(lookup=True, origin="recycled")

    table: SuccessorTable = field(
        default_factory=lambda: backend().SuccessorTable(), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        require(
            "draft recycling.successors",
            self.successors,
            f"1 to {SUCCESSORS_LIMIT}",
            1 <= self.successors <= SUCCESSORS_LIMIT,
        )

    def __copy__(self) -> "Recycling":
        """Return a draft for another text, which learns the same successors."""
        draft = Recycling(self.successors)
        draft.table = self.table
        return draft

    @property
    def traits(self) -> Traits:
        return Traits(successors=self.successors)

    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS
    ) -> None:
        """Do nothing: prompts are taken in without logits."""

    def row(self, token: int) -> dict[int, float]:
        """Return the successors of a token with their probabilities, the likeliest first; none where it is new."""
        return self.table.row(token)

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        rows = [self.row(token) for token in tree.tokens[frontier.alive()].tolist()]
        return sparse_step(rows, np.float32, tree.device)

    def accept(self, cycle: Cycle) -> None:
        """Take in all nodes' successors; of a token that occurs twice those on the accepted path, else the last."""
        learn(self.table, cycle)

    def reset(self) -> None:
        """Do nothing: successors are the model's, not a text's."""

    def forget(self) -> None:
        """Drop all successors."""
        self.table.clear()
