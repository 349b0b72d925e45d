"""What followed each short run of tokens so far: the memory of the drafters that copy."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from specengine.errors import InputError
from specengine.models import common_prefix
from specengine.ops.tree import TokenTree

MOST_FOLLOWERS = 8  # of a match, the commonest ones

# The last token, and what stands before it: the continuations of a text share it.
Context = tuple[int, "Context"] | None


class Followers(dict[int, int]):
    """How often each token followed a run of tokens."""

    __slots__ = ("_likeliest", "total")

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.total = 0
        for token in tokens:
            self.count(token)

    def count(self, token: int) -> None:
        self[token] = self.get(token, 0) + 1
        self.total += 1
        self._likeliest: list[tuple[int, float]] | None = None

    def likeliest(self) -> list[tuple[int, float]]:
        """The MOST_FOLLOWERS commonest tokens, each with its share of all that followed."""
        if self._likeliest is None:
            commonest = heapq.nlargest(MOST_FOLLOWERS, self.items(), key=itemgetter(1))
            self._likeliest = [(token, count / self.total) for token, count in commonest]
        return self._likeliest


@dataclass(slots=True)
class _Run:
    """A run of tokens that was seen more than once: its followers, and the runs that are a token longer, by their first
    token; of one that was seen once only the place of what followed it."""

    followers: Followers = field(default_factory=Followers)
    longer: dict[int, _Run | int] = field(default_factory=dict)


@dataclass
class Suffixes:
    """Counts of the tokens that followed each run of `shortest` to `longest` tokens of one sequence."""

    shortest: int
    longest: int
    tokens: list[int] = field(default_factory=list, init=False)
    _runs: dict[int, _Run | int] = field(default_factory=dict, init=False)

    def become(self, tokens: list[int]) -> None:
        """Hold this sequence; what is held already is kept where `tokens` goes on from it."""
        if common_prefix(self.tokens, tokens) < len(self.tokens):
            self.restart()
        self.extend(tokens[len(self.tokens) :])

    def restart(self, before: Sequence[int] = ()) -> None:
        """Forget everything; what comes next stands behind these tokens, whose own followers do not count."""
        self.tokens, self._runs = list(before), {}

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._note(len(self.tokens) - 1)

    def matches(self, context: Context) -> list[tuple[int, Followers]]:
        """Length and followers of each suffix of `context` that was seen before, the longest first."""
        return [match for match in self._matches(context) if match[0] >= self.shortest][::-1]

    def likeliest(self, context: Context) -> tuple[int, list[tuple[int, float]]] | None:
        """Length of the first of `matches`, and the likeliest of its followers with their shares."""
        # Much of a cycle's time on the host: so no generator, and nothing is made for a run that was seen once.
        runs, length, longest, found = self._runs, 0, self.longest, None
        while context is not None and length < longest:
            run = runs.get(context[0])
            if run is None:
                break
            length, context = length + 1, context[1]
            if isinstance(run, int):
                length += self._agreement(run - length, context, longest - length)
                return (length, [(self.tokens[run], 1.0)]) if length >= self.shortest else None
            found, runs = run, run.longer
        return None if found is None or length < self.shortest else (length, found.followers.likeliest())

    def context(self) -> Context:
        """The last `longest` tokens."""
        return extended(None, self.tokens[-self.longest :])

    def _note(self, place: int) -> None:
        """Count the token at `place` behind the runs before it."""
        tokens, runs = self.tokens, self._runs
        for first in range(place - 1, max(place - self.longest, 0) - 1, -1):
            run = runs.get(tokens[first])
            if run is None:
                runs[tokens[first]] = place
                return
            if isinstance(run, int):
                run = runs[tokens[first]] = self._seen_once(run, place - first)
            run.followers.count(tokens[place])
            runs = run.longer

    def _seen_once(self, place: int, length: int) -> _Run:
        """The run of so many tokens before `place`."""
        run = _Run()
        run.followers.count(self.tokens[place])
        if length < min(self.longest, place):
            run.longer[self.tokens[place - length - 1]] = place
        return run

    def _matches(self, context: Context) -> Iterator[tuple[int, Followers]]:
        """As `matches`, of any length, the shortest first."""
        runs = self._runs
        for length in range(1, self.longest + 1):
            if context is None or (run := runs.get(context[0])) is None:
                return
            context = context[1]
            if isinstance(run, int):
                followers = Followers(self.tokens[run])
                yield length, followers
                for longer in range(self._agreement(run - length, context, self.longest - length)):
                    yield length + longer + 1, followers
                return
            yield length, run.followers
            runs = run.longer

    def _agreement(self, end: int, context: Context, most: int) -> int:
        """How many tokens before `end`, at most so many, are the last ones of `context`."""
        tokens, place, lowest = self.tokens, end, max(end - most, 0)
        while place > lowest and context is not None and context[0] == tokens[place - 1]:
            place, context = place - 1, context[1]
        return end - place


def predicted(text: Suffixes, tokens: Sequence[int]) -> Suffixes:
    """The memory of `tokens` alone, of which the first comes behind `text`."""
    found = Suffixes(text.shortest, text.longest)
    if tokens:
        found.restart([*text.tokens[-text.longest :], tokens[0]])
        found.extend(tokens[1:])
    return found


def extended(context: Context, tokens: Iterable[int]) -> Context:
    """`context` with these tokens behind it."""
    for token in tokens:
        context = token, context
    return context


def contexts(before: Context, tokens: list[int], parents: list[int]) -> list[Context]:
    """What stands before the children of each node of a tree: `before`, and the tokens from the root on."""
    found: list[Context] = [(tokens[0], before)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((token, found[parent]))
    return found


def contexts_of(before: Context, tree: TokenTree, nodes: list[int]) -> list[Context]:
    """As `contexts`, of some nodes."""
    last = max(nodes, default=0) + 1
    found = contexts(before, tree.tokens[:last].tolist(), tree.parents[:last].tolist())
    return [found[node] for node in nodes]


def require_lengths(draft: str, shortest: int, longest: int) -> None:
    """Raise InputError unless these can be the lengths of suffixes."""
    if not 1 <= shortest <= longest:
        raise InputError(
            f"draft {draft}.shortest, longest: got {shortest}, {longest}, accepted 1 <= shortest <= longest"
        )
