"""Drafting by n-gram lookup: what followed the same words earlier in the prompt and the output."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.cycle import Cycle
from specengine.drafters import Drafter, Step
from specengine.errors import InputError
from specengine.targets import common_prefix
from specengine.tree import TokenTree

Suffix = tuple[int, ...]


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
    default_policy: ClassVar[tuple[str, dict[str, Any]]] = ("eagle", {"width": 4, "expansions": 9, "budget": 12})

    _tokens: list[int] = field(default_factory=list, init=False, repr=False)
    _counts: dict[Suffix, dict[int, int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise InputError(
                f"draft ngram.shortest, longest: got {self.shortest}, {self.longest}, accepted 1 <= shortest <= longest"
            )

    def begin(self, prompt: list[int], features: Tensor | None = None) -> None:
        if common_prefix(self._tokens, prompt) < len(self._tokens):
            self.reset()
        self._extend(prompt[len(self._tokens) :])

    def step(self, tree: TokenTree, nodes: Tensor) -> Step:
        history = self._tokens[-self.longest :]
        root = int(tree.tokens[0])
        rows = [self._continuations([*history, root, *tree.path_tokens(node)]) for node in nodes.tolist()]
        columns = {token: column for column, token in enumerate(dict.fromkeys(token for row in rows for token in row))}
        log_probs = torch.full((len(rows), max(1, len(columns))), float("-inf"))
        for index, row in enumerate(rows):
            for token, probability in row.items():
                log_probs[index, columns[token]] = math.log(probability)
        token_ids = torch.tensor(list(columns) or [0], device=tree.device)
        return Step(log_probs.to(tree.device), token_ids, normalized=True)

    def observe(self, cycle: Cycle) -> None:
        # The cycle's root was committed before it; its last token is the next root.
        self._extend([int(cycle.tree.tokens[0]), *cycle.tokens[:-1]])

    def reset(self) -> None:
        self._tokens, self._counts = [], {}

    def _extend(self, tokens: list[int]) -> None:
        for token in tokens:
            history = self._tokens
            for length in range(self.shortest, min(self.longest, len(history)) + 1):
                followers = self._counts.setdefault(tuple(history[-length:]), {})
                followers[token] = followers.get(token, 0) + 1
            history.append(token)

    def _continuations(self, context: list[int]) -> dict[int, float]:
        """Probability of each token that followed a suffix of `context` before."""
        probabilities: dict[int, float] = defaultdict(float)
        left = 1.0
        for length in range(min(self.longest, len(context)), self.shortest - 1, -1):
            followers = self._counts.get(tuple(context[-length:]))
            if followers:
                total = sum(followers.values()) + 1
                for token, count in followers.items():
                    probabilities[token] += left * count / total
                left /= total
        return probabilities
