"""Drafting by n-gram lookup: what followed the same words earlier in the prompt and the output."""

from collections import defaultdict
from dataclasses import dataclass, field
from operator import itemgetter
from typing import ClassVar

import numpy as np
from torch import Tensor

from specengine.drafters import NO_HINTS, About, Drafter, Hints, Traits
from specengine.drafters.lookup import Suffixes, backend, contexts, sparse_step
from specengine.errors import require
from specengine.ops import Nodes, Step, TokenTree
from specengine.records import Cycle


@dataclass
class NGram(Drafter):
    """Drafts trees of the continuations of the longest suffixes that occurred before.

    The longest suffix of `longest` to `shortest` tokens that occurred earlier decides: a continuation seen c times
    among n has probability c / (n + 1). The remaining 1 / (n + 1) goes to the next shorter suffix, in the same
    way; the remainder after the shortest belongs to tokens that never occurred (escape method A of prediction by
    partial matching, Cleary and Witten 1984). Of suffixes of one length, that in a text that the caller expects the
    answer to be like decides before that in prompt and answer.
    """

    longest: int = 5
    shortest: int = 2

    name = "ngram"
    about: ClassVar[About] = About(lookup=False, origin="copied")  # it copies already

    _seen: Suffixes = field(init=False, repr=False, compare=False)
    _predicted: Suffixes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(
            "draft ngram.shortest, longest",
            f"{self.shortest}, {self.longest}",
            "1 <= shortest <= longest",
            1 <= self.shortest <= self.longest,
        )
        self._seen, self._predicted = (
            backend().Suffixes(self.shortest, self.longest) for _ in range(2)
        )

    @property
    def traits(self) -> Traits:
        return Traits(copies=True)

    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS
    ) -> None:
        self._seen.become(prompt)
        self._predicted.restart([*self._seen.tail, hints.expected[0]] if hints.expected else [])
        self._predicted.extend(hints.expected[1:])

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        below = contexts(
            self._seen.tail,
            tree.tokens.tolist(),
            tree.parents.tolist(),
            frontier.alive().tolist(),
        )
        return sparse_step([*map(self._continuations, below)], np.float64, tree.device)

    def accept(self, cycle: Cycle) -> None:
        # The cycle's root was committed before it; its last token is the next root.
        self._seen.extend([int(cycle.tree.tokens[0]), *cycle.tokens[:-1]])

    def reset(self) -> None:
        self._seen.restart([])
        self._predicted.restart([])

    def _continuations(self, context: list[int]) -> dict[int, float]:
        """Return the probability of each token that followed a suffix of `context` before."""
        probabilities: dict[int, float] = defaultdict(float)
        escaped = 1.0
        matches = [*self._predicted.matches(context), *self._seen.matches(context)]
        for _, followers in sorted(matches, key=itemgetter(0), reverse=True):
            total = sum(followers.values()) + 1
            for token, count in followers.items():
                probabilities[token] += escaped * count / total
            escaped /= total
        return probabilities
