"""What followed each short run of tokens so far: the memory of the drafters that copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specengine.errors import InputError
from specengine.targets import common_prefix
from specengine.tree import TokenTree

Suffix = tuple[int, ...]
Followers = dict[int, int]


@dataclass
class Suffixes:
    """Counts of the tokens that followed each run of `shortest` to `longest` tokens of one sequence."""

    shortest: int
    longest: int
    tokens: list[int] = field(default_factory=list, init=False)
    _counts: dict[Suffix, Followers] = field(default_factory=dict, init=False)

    def become(self, tokens: list[int]) -> None:
        """Hold this sequence; what is held already is kept where `tokens` goes on from it."""
        if common_prefix(self.tokens, tokens) < len(self.tokens):
            self.clear()
        self.extend(tokens[len(self.tokens) :])

    def clear(self) -> None:
        self.tokens, self._counts = [], {}

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            history = self.tokens
            for length in range(self.shortest, min(self.longest, len(history)) + 1):
                followers = self._counts.setdefault(tuple(history[-length:]), {})
                followers[token] = followers.get(token, 0) + 1
            history.append(token)

    def matches(self, context: Sequence[int]) -> Iterator[tuple[int, Followers]]:
        """Length and followers of each suffix of `context` that was seen before, the longest first."""
        for length in range(min(self.longest, len(context)), self.shortest - 1, -1):
            followers = self._counts.get(tuple(context[-length:]))
            if followers:
                yield length, followers

    def contexts(self, tree: TokenTree, nodes: Tensor) -> list[list[int]]:
        """The last `longest` tokens before the tree, and those from its root to each of `nodes` (int64 [rows])."""
        tail = self.tokens[-self.longest :]
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        found = []
        for node in nodes.tolist():
            path: list[int] = []
            while node >= 0:
                path.append(tokens[node])
                node = parents[node]
            found.append([*tail, *reversed(path)])
        return found


def require_lengths(draft: str, shortest: int, longest: int) -> None:
    """Raise InputError unless these can be the lengths of suffixes."""
    if not 1 <= shortest <= longest:
        raise InputError(
            f"draft {draft}.shortest, longest: got {shortest}, {longest}, accepted 1 <= shortest <= longest"
        )
