"""A draft that also copies: its distributions mixed with what followed the same words before."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import itemgetter
from sys import float_info
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specengine import ops
from specengine.drafters import NO_HINTS, Drafter, Hints, Traits, Wrapped
from specengine.errors import InputError
from specengine.models import common_prefix
from specengine.ops import Nodes
from specengine.ops.select import COPIED, FREE, RECYCLED, Step
from specengine.ops.tree import Free, TokenTree
from specengine.records import Cycle

Context = tuple[int, "Context"] | None
# Plain tuples, as this runs on the host in every cycle.
Proposal = tuple[float, int, int]  # probability, token and mark
Leaf = tuple[int, Context, float, Collection[int]]  # node, its context, path log-probability, tokens of its children
Propose = Callable[[Context, float], list[Proposal]]
_COPIED, _RECYCLED, _BOTH = FREE | COPIED, FREE | RECYCLED, FREE | COPIED | RECYCLED


class Recycler(Protocol):
    """What recycles the target's own say: the tokens that it gave last after a token, with their probabilities."""

    @property
    def traits(self) -> Traits: ...

    def row(self, token: int) -> Mapping[int, float]: ...

    def begin(self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS) -> None: ...

    def accept(self, cycle: Cycle) -> None: ...

    def reset(self) -> None: ...


class Lookup(Wrapped):
    """`drafter`, whose distributions are mixed with the continuations of the longest suffix seen before.

    Where the last m tokens stood in the text before, p becomes (1 - w) p + w q: q are the shares of the tokens that
    followed, and w is how often matches of this length have been right in this generation so far. In the same way, with
    weights of its own, the text that the caller expects the answer to be like is mixed in on top. Tokens outside the
    draft's vocabulary get columns of their own. The distributions stay normalised, so every policy works on them as on
    the draft's own; where nothing matches they are the draft's own. Of a draft that proposes only some tokens, or none
    at a node, the same holds: its rows are log-probabilities, whose sum may be less than one.

    `recycling` is a source beside a draft with passes: `free` proposes what it knows where copies leave something.

    The idea of copying is prompt lookup decoding (Saxena 2023); the mixture is that of pointer networks (Merity et
    al. 2017) with counted instead of learnt weights.
    """

    def __init__(self, drafter: Drafter, recycling: Recycler | None = None) -> None:
        super().__init__(drafter)
        self.about = drafter.about._replace(lookup=False)  # type: ignore[misc]
        self.recycling = recycling
        self.name = f"{drafter.name} with lookup" + (" and recycling" if recycling is not None else "")
        successors = 0 if recycling is None else recycling.traits.successors
        traits = drafter.traits
        self._traits = traits._replace(successors=max(traits.successors, successors), copies=True)
        self._copies = ComposedCopies()
        self._columns = Columns()

    @property
    def traits(self) -> Traits:
        return self._traits

    def begin(self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS) -> None:
        self.inner.begin(prompt, features, hints)
        if self.recycling is not None:
            self.recycling.begin(prompt)
        self._copies.begin(prompt, hints.expected)

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        size, ids = len(tree), nodes.alive().tolist()
        tokens, parents = tree.tokens[:size].tolist(), tree.parents[:size].tolist()
        scores, before = tree.path_log_probs[:size].tolist(), contexts(self._copies.context(), tokens, parents)
        taken: dict[int, set[int]] = {node: set() for node in ids}
        for token, parent in zip(tokens, parents, strict=True):
            if parent in taken:
                taken[parent].add(token)
        leaves: list[Leaf] = [(node, before[node], scores[node], taken[node]) for node in ids]
        return best_first(leaves, size, most, least, self._proposals)

    def accept(self, cycle: Cycle) -> None:
        for source in self._sources:
            source.accept(cycle)
        self._copies.observe([int(cycle.tree.tokens[0]), *cycle.tokens[:-1]])

    def reset(self) -> None:
        for source in self._sources:
            source.reset()
        self._copies.clear()

    @property
    def _sources(self) -> list[Drafter | Recycler]:
        return [self.inner] if self.recycling is None else [self.inner, self.recycling]

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        before = contexts_of(self._copies.context(), tree, frontier.alive().tolist())
        mixtures = [self._copies.after(context) for context in before]
        if all(mixture is None for mixture in mixtures):
            return step
        return mixed(step, mixtures, self._columns.of(step))

    def _proposals(self, context: Context, least: float) -> list[Proposal]:
        """What is copied after `context`, over what is recycled, of this probability or more; the likeliest first."""
        assert context is not None
        mixture = self._copies.after(context)
        recycled: Mapping[int, float] = {} if self.recycling is None else self.recycling.row(context[0])
        left, copied = (1.0, {}) if mixture is None else mixture
        found = [
            (total, token, _RECYCLED)
            for token, probability in recycled.items()
            if (total := left * probability) >= least and token not in copied
        ]
        for token, probability in copied.items():
            both = token in recycled
            if (total := probability + left * recycled[token] if both else probability) >= least:
                found.append((total, token, _BOTH if both else _COPIED))
        if len(found) > 1:
            found.sort(reverse=True)
        return found


# Share of positions at which a match of so many tokens was followed by the token that followed it before; of 0.7M
# tokens that the embedded model wrote. They stand until a text has shown its own.
PRIOR_HITS = (0.17, 0.45, 0.53, 0.65, 0.7, 0.74, 0.78, 0.93)
PRIOR_WEIGHT = 8.0  # matches that the prior counts for
MOST = 0.98  # of the probability that a match can take
LONGEST = len(PRIOR_HITS)


class Mixture(NamedTuple):
    """A distribution mixed with copies: the share that is left of it, and the probability that each token gains."""

    left: float
    copied: dict[int, float]


class Copies:
    """The continuations of the longest suffix that stands in a text, weighted by how often such matches were right.

    The weight of a match of m tokens is the share of the tokens so far that one of m tokens had foretold.
    """

    def __init__(self) -> None:
        self.text = Suffixes(1, LONGEST)
        self.forget_hits()

    def forget_hits(self) -> None:
        self._hits = [PRIOR_WEIGHT * share for share in PRIOR_HITS]
        self._tries = [PRIOR_WEIGHT] * LONGEST

    def judge(self, context: Context, token: int) -> None:
        """Learn from `token` having come after `context`."""
        match = next(iter(self.text.matches(context)), None)
        if match is not None:
            length, followers = match
            self._tries[length - 1] += 1
            self._hits[length - 1] += followers.get(token, 0) / followers.total

    def mixed_into(self, mixture: Mixture | None, context: Context) -> Mixture | None:
        """The mixture with the continuations of `context` on top; None: nothing is copied so far."""
        match = self.text.likeliest(context)
        if match is None:
            return mixture
        length, followers = match
        weight = min(self._hits[length - 1] / self._tries[length - 1], MOST)
        copied = {token: weight * share for token, share in followers}
        if mixture is None:
            return Mixture(1 - weight, copied)
        for token, probability in mixture.copied.items():
            copied[token] = copied.get(token, 0.0) + (1 - weight) * probability
        return Mixture(mixture.left * (1 - weight), copied)


class ComposedCopies:
    """The copies of several texts: of prompt and answer, and of a text that the caller expects the answer to be like.

    Where both match, those of the expected text are mixed in last, so they weigh most.
    """

    def __init__(self) -> None:
        self._written, self._expected = Copies(), Copies()

    def begin(self, prompt: list[int], expected: Sequence[int]) -> None:
        """Copy from `prompt` and what follows it, and from `expected` as if it followed.

        `prompt` is without its last token, which is the first of `expected` unless that is empty.
        """
        self._written.text.become(prompt)
        self._expected.text = predicted(self._written.text, expected)
        for copies in (self._written, self._expected):
            copies.forget_hits()

    def clear(self) -> None:
        self._written.text.restart()
        self.begin([], [])

    def context(self) -> Context:
        """The end of the text so far."""
        return self._written.text.context()

    def observe(self, tokens: Sequence[int]) -> None:
        """The text went on with these tokens."""
        for token in tokens:
            context = self.context()
            for copies in (self._written, self._expected):
                copies.judge(context, token)
            self._written.text.extend([token])

    def after(self, context: Context) -> Mixture | None:
        """What is copied after `context`; None where nothing matches."""
        return self._expected.mixed_into(self._written.mixed_into(None, context), context)


Places = Mapping[int, int] | range  # the column of each target id that a step has one for


class Columns:
    """Finds the columns of tokens; remembers the draft's vocabulary, which is that of most steps."""

    def __init__(self) -> None:
        self._ids: Tensor | None = None
        self._places: dict[int, int] = {}

    def of(self, step: Step) -> Places:
        if step.token_ids is None:
            return range(step.logits.shape[1])
        if step.token_ids is not self._ids:
            self._ids = step.token_ids
            self._places = {token: column for column, token in enumerate(self._ids.tolist())}
        return self._places


def mixed(step: Step, mixtures: Sequence[Mixture | None], columns: Places) -> Step:
    """`step` with a mixture in each row that has one: p becomes what is left of p, and what is copied is added.

    mixtures: of the rows that are not padding. Tokens without a column are given one behind the others. Logits stay
    logits, and log-probabilities stay that.
    """
    width = step.logits.shape[1]
    copied = [mixture.copied if mixture is not None else {} for mixture in mixtures]
    new = {token: 0 for row in copied for token in row if token not in columns}
    new = {token: column for column, token in enumerate(new, width)}
    places = [
        row * (width + len(new)) + (columns[token] if token in columns else new[token])
        for row, tokens in enumerate(copied)
        for token in tokens
    ]
    gains = [probability for row in copied for probability in row.values()]
    left = [1.0 if mixture is None else mixture.left for mixture in mixtures]
    left += [1.0] * (step.logits.shape[0] - len(left))
    # what has gained is marked with 1, which is COPIED
    logits, marks = ops.mix_rows(step.logits, len(new), left, places, gains, step.normalized)
    return Step(logits, _ids_with(step, list(new)), step.normalized, step.hidden, marks)


def _ids_with(step: Step, new: list[int]) -> Tensor | None:
    """The target's ids of the step's columns and of new ones behind them."""
    if not new:
        return step.token_ids
    device = step.logits.device if step.token_ids is None else step.token_ids.device
    ids = step.token_ids
    if ids is None:
        ids = torch.arange(step.logits.shape[1], device=device, dtype=torch.int64)
    return torch.cat([ids, torch.tensor(new, device=device, dtype=torch.int64)])


def best_first(leaves: list[Leaf], first: int, most: int, least: float, propose: Propose) -> Free | None:
    """The `most` likeliest continuations below the leaves whose path log-probability is `least` or more.

    first: the id of the first of them; propose: the continuations of a context that have this probability or more, the
    likeliest first. Of paths that are equally likely those of an earlier parent come first.
    """
    free, parents = Free([], [], [], [], []), list(leaves)
    # Cost (the path log-probability, negated), place of the parent, and rank, of each parent's best continuation left;
    # rank -1 of a parent whose continuations nobody has asked for yet: asking takes the time, and many are not needed.
    waiting = [(-leaf[2], place, -1) for place, leaf in enumerate(parents) if leaf[2] >= least]
    proposals: dict[int, list[Proposal]] = {}
    heapify(waiting)
    while waiting and len(free.tokens) < most:
        cost, place, rank = heappop(waiting)
        node, context, score, taken = parents[place]
        if rank < 0:
            found = propose(context, math.exp(least - score) or float_info.min)
            proposals[place] = found = [p for p in found if p[1] not in taken] if taken else found
        else:
            found = proposals[place]
            _, token, mark = found[rank]
            free.parents.append(node)
            free.tokens.append(token)
            free.log_probs.append(-cost - score)
            free.marks.append(mark)
            free.ranks.append(rank)
            heappush(waiting, (cost, len(parents), -1))
            parents.append((first + len(free.tokens) - 1, (token, context), -cost, ()))
        if rank + 1 < len(found):
            heappush(waiting, (-score - math.log(found[rank + 1][0]), place, rank + 1))
    return free if free.tokens else None


MOST_FOLLOWERS = 8  # of a match, the commonest ones

# The last token, and what stands before it: the continuations of a text share it.


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
