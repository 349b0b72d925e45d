"""Drafting by n-gram lookup: what followed the same words earlier in the prompt and the output."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.drafters import Drafter, Step
from specengine.drafters._suffixes import Suffixes, require_lengths
from specengine.ops import Nodes
from specengine.records import Cycle
from specengine.tree import TokenTree


@dataclass
class NGram(Drafter):
    """A tree of the continuations of the longest suffixes that occurred before.

    The longest suffix of `longest` to `shortest` tokens that occurred earlier decides: a continuation seen c times
    among n has probability c / (n + 1). The remaining 1 / (n + 1) goes to the next shorter suffix, in the same
    way; what is left after the shortest belongs to tokens never seen here (escape method A of prediction by
    partial matching, Cleary and Witten 1984).
    """

    longest: int = 5
    shortest: int = 2

    name = "ngram"
    lookup: ClassVar[bool | None] = False  # it copies already
    default_policy: ClassVar[tuple[str, dict[str, Any]]] = ("eagle", {"width": 4, "expansions": 9, "budget": 12})

    _seen: Suffixes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_lengths("ngram", self.shortest, self.longest)
        self._seen = Suffixes(self.shortest, self.longest)

    def begin(self, prompt: list[int], features: Tensor | None = None) -> None:
        self._seen.become(prompt)

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        rows = [self._continuations(context) for context in self._seen.contexts(tree, frontier.alive())]
        columns = {token: column for column, token in enumerate(dict.fromkeys(token for row in rows for token in row))}
        log_probs = torch.full((len(rows), max(1, len(columns))), float("-inf"))
        for index, row in enumerate(rows):
            for token, probability in row.items():
                log_probs[index, columns[token]] = math.log(probability)
        token_ids = torch.tensor(list(columns) or [0], device=tree.device)
        return Step(log_probs.to(tree.device), token_ids, normalized=True)

    def observe(self, cycle: Cycle) -> None:
        # The cycle's root was committed before it; its last token is the next root.
        self._seen.extend([int(cycle.tree.tokens[0]), *cycle.tokens[:-1]])

    def reset(self) -> None:
        self._seen.clear()

    def _continuations(self, context: list[int]) -> dict[int, float]:
        """Probability of each token that followed a suffix of `context` before."""
        probabilities: dict[int, float] = defaultdict(float)
        left = 1.0
        for _, followers in self._seen.matches(context):
            total = sum(followers.values()) + 1
            for token, count in followers.items():
                probabilities[token] += left * count / total
            left /= total
        return probabilities
