"""A draft that also copies: its distributions mixed with what followed the same tokens before."""

import importlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specengine import ops
from specengine.drafters import NO_HINTS, Drafter, Hints, Recycler, Traits, Wrapped, another
from specengine.models import common_prefix
from specengine.ops import Nodes
from specengine.ops.select import COPIED, FREE, RECYCLED, Drafted, Step, mix_copies
from specengine.ops.tree import Arrays, Beside, Free, TokenTree, path_of
from specengine.records import Cycle

# By tokens of a match: share of positions where the token after the match was the one that followed it before; of 0.7M
# tokens that the embedded model wrote. They stand until a text has shown its own.
PRIOR_HITS = (0.17, 0.45, 0.53, 0.65, 0.7, 0.74, 0.78, 0.93)
PRIOR_WEIGHT = 8.0  # matches that the prior counts for
CEILING = 0.98  # of the probability that a match can take
FOLLOWERS = 8  # of a match, the commonest, that are copied


def learn(
    table: "SuccessorTable",
    cycle: Cycle,
    copies: "Copies | None" = None,
    committed: Sequence[int] = (),
) -> None:
    """Take in all nodes' successors; of a token that occurs twice those on the accepted path, else the last.

    copies: are told that `committed` follows their text.
    """
    if (best := cycle.successors) is not None:
        tokens, shares = best.tokens, best.logits.softmax(1)  # NaN in a row without any
        if tokens.device.type != "cpu":  # one transfer for both
            tokens, bits = torch.cat([tokens, shares.view(torch.int32).long()]).cpu().chunk(2)
            shares = bits.int().view(torch.float32)
        table.learn(cycle.tree.tokens.cpu(), cycle.path, tokens, shares, copies, committed)


class Lookup(Wrapped):
    """Mixes the distributions of `drafter` with the continuations of the longest suffix that occurred before.

    Where the last m tokens stood in the text before, p becomes (1 - w) p + w q: q are the shares of the tokens that
    followed, and w is how often matches of this length have been right in this generation so far. In the same way, with
    weights of its own, the text that the caller expects the answer to be like is mixed in on top. Tokens outside the
    draft's vocabulary get columns of their own. The distributions stay normalised, so every policy works on them as on
    the draft's own; where nothing matches they are the draft's own. Of a draft that proposes only some tokens, or none
    at a node, the same holds: its rows are log-probabilities, whose sum may be less than one.

    `recycling` adds a source to a draft with passes: `free` proposes its successors where copies leave probability.

    The idea of copying is prompt lookup decoding (Saxena 2023); the mixture is that of pointer networks (Merity et
    al. 2017) with counted instead of learnt weights.
    """

    def __init__(self, drafter: Drafter, recycling: Recycler | None = None) -> None:
        super().__init__(drafter)
        self.recycling = recycling
        self.name = f"{drafter.name} with lookup" + (
            " and recycling" if recycling is not None else ""
        )
        self._sources = [drafter] if recycling is None else [drafter, recycling]
        self._traits = drafter.traits._replace(
            successors=max(source.traits.successors for source in self._sources), copies=True
        )
        self._copies: Copies = backend().Copies(PRIOR_HITS, PRIOR_WEIGHT, CEILING, FOLLOWERS)
        source = drafter if isinstance(drafter, Recycler) else recycling
        self.about = drafter.about._replace(lookup=False, passes=source is not drafter)  # type: ignore[misc]
        self.free = Beside(self._copies, source and source.table)  # type: ignore[assignment, method-assign]
        self._token_ids: Tensor | None = None  # those of the columns that `_copies` knows

    def __copy__(self) -> "Lookup":
        return Lookup(another(self.inner), self.recycling and cast(Any, another(self.recycling)))

    @property
    def traits(self) -> Traits:
        return self._traits._replace(sharpness=self.inner.traits.sharpness)

    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS
    ) -> None:
        self.inner.begin(prompt, features, hints)
        if self.recycling is not None:
            self.recycling.begin(prompt)
        self._copies.begin(prompt, hints.expected, hints.memory)

    def accept(self, cycle: Cycle) -> None:
        self.inner.accept(cycle)
        committed = [int(cycle.tree.tokens[0]), *cycle.tokens[:-1]]
        if self.recycling is None or cycle.successors is None:
            self._copies.observe(committed)
        else:  # one call for both
            learn(self.recycling.table, cycle, self._copies, committed)

    def reset(self) -> None:
        for source in self._sources:
            source.reset()
        self._copies.clear()

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        """Return the step with copies mixed into its rows, logits as logits and log-probabilities as those."""
        if step.token_ids is not self._token_ids:
            self._copies.columns(None if step.token_ids is None else step.token_ids.cpu())
            self._token_ids = step.token_ids
        mixed = object.__new__(Mixed)
        vars(mixed).update(
            normalized=step.normalized,
            hidden=step.hidden,
            conditioned=step.conditioned,
            unmixed=Drafted(step.logits, step.token_ids, step.normalized, step.marks, self._copies),
            _of=(tree.arrays, frontier),
        )
        # C++ would mix float32
        return mixed if step.logits.dtype is not torch.float16 else replace(mixed)


class Mixed(Step):
    """A step with copies, `unmixed`, that are mixed into its rows when they are read, unless an op does so.

    Made by `Lookup.changed`, which sets what it consists of.
    """

    _of: tuple[Arrays, Nodes]  # arrays of the tree, and the frontier

    def __new__(cls, *parts: Any, **named: Any) -> Step:  # type: ignore[misc]  # for dataclasses.replace
        return Step(*parts, **named)

    @property
    def logits(self) -> Tensor:
        """Mix, and become a step like others."""
        assert self.unmixed is not None
        mixed = self.unmixed.mixed(*self._of)
        self.__class__ = Step  # type: ignore[assignment]
        vars(self).update(
            logits=mixed.logits, token_ids=mixed.token_ids, marks=mixed.marks, unmixed=None
        )
        return mixed.logits

    token_ids = property(lambda self: (self.logits, self.token_ids)[1])
    marks = property(lambda self: (self.logits, self.marks)[1])


def backend() -> Any:
    """Return the module whose Suffixes, SuccessorTable and Copies a drafter takes.

    That is the extension built from csrc/ where the CPU's ops run on it, and else this module. The results are the same
    bits; the classes below are what csrc/spec/copies.hpp means.
    """
    compiled = ops.backends()["mix_rows"].name == "cpp"
    return importlib.import_module("specengine._ops") if compiled else sys.modules[__name__]


class Suffixes:
    """Counts of the tokens that followed each run of `shortest` to `longest` tokens of one sequence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.restart([])

    @property
    def tail(self) -> list[int]:
        """The last `longest` tokens."""
        return self._tokens[-self.longest :]

    def become(self, tokens: list[int]) -> None:
        """Hold this sequence; counts are kept where `tokens` continues the one that is held."""
        if common_prefix(self._tokens, tokens) < len(self._tokens):
            self.restart([])
        self.extend(tokens[len(self._tokens) :])

    def restart(self, before: Sequence[int]) -> None:
        """Forget everything. The next token stands after `before`, whose own followers do not count."""
        self._tokens = list(before)
        self._followers = defaultdict[tuple[int, ...], Counter[int]](Counter)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for length in range(1, min(self.longest, len(self._tokens)) + 1):
                self._followers[tuple(self._tokens[-length:])][token] += 1
            self._tokens.append(token)

    def matches(self, context: Sequence[int]) -> list[tuple[int, dict[int, int]]]:
        """Return length and followers of each suffix of `context` that occurred before, the longest first.

        Followers have their counts, in the order of their first occurrence.
        """
        runs = (
            (length, self._followers.get(tuple(context[-length:])))
            for length in range(min(self.longest, len(context)), self.shortest - 1, -1)
        )
        return [(length, followers) for length, followers in runs if followers]


class SuccessorTable:
    """The target's likeliest successors of each token with their probabilities, as they were seen last."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, float]] = {}

    def learn(
        self,
        tokens: Tensor,
        path: Sequence[int],
        successors: Tensor,
        probabilities: Tensor,
        copies: "Copies | None" = None,
        committed: Sequence[int] = (),
    ) -> None:
        """Take in the rows of all nodes, then those of `path`, where their probabilities are above 0.

        tokens: int64 [nodes]; successors, probabilities: int64 and float32 [nodes or more, count]; copies: are told
        that `committed` follows their text.
        """
        carried, likeliest, shares = tokens.tolist(), successors.tolist(), probabilities.tolist()
        for node in (*range(len(carried)), *path):
            if row := {
                token: share
                for token, share in zip(likeliest[node], shares[node], strict=True)
                if share > 0
            }:
                self._rows[carried[node]] = row
        if copies is not None:
            copies.observe(committed)

    def row(self, token: int) -> dict[int, float]:
        """Return the successors of a token, the likeliest first; none of a token that was never seen."""
        return dict(self._rows.get(token, {}))

    def clear(self) -> None:
        self._rows.clear()


# a distribution mixed with copies: the share that is left of it, and the probability that each token gains
Mixture = tuple[float, dict[int, float]]


@dataclass
class _Source:
    """A text to copy from. hits, tries: by length of a match, how often it was right, and how often it was there."""

    text: Suffixes
    hits: list[float] = field(default_factory=list)
    tries: list[float] = field(default_factory=list)

    def judge(self, context: Sequence[int], token: int) -> None:
        """Learn from `token` having come after `context`."""
        for length, followers in self.text.matches(context)[:1]:
            self.tries[length - 1] += 1
            self.hits[length - 1] += followers.get(token, 0) / sum(followers.values())


@dataclass
class _Parent:
    """A node to propose below. context: the tokens up to it; taken: tokens of its children."""

    node: int
    context: list[int]
    score: float  # path log-probability
    taken: set[int] = field(default_factory=set)
    # probability, token and mark
    proposals: list[tuple[float, int, int]] = field(default_factory=list)


class Copies:
    """The copies of two texts: of prompt and answer, and of the text that the caller expects the answer to be like.

    Where both match, those of the expected text are mixed in last, so they weigh most. The weight of a match of m
    tokens is the share of the tokens so far that a match of m tokens had foretold.

    hits: by length of a match, how often it is right before anything was seen, which counts as `weight` matches;
    ceiling: of the weight; followers: of a match, the commonest that are copied.
    """

    def __init__(
        self, hits: Sequence[float], weight: float, ceiling: float, followers: int
    ) -> None:
        self._prior, self._weight, self._ceiling, self._most = (
            list(hits),
            weight,
            ceiling,
            followers,
        )
        self._written, self._expected = (_Source(Suffixes(1, len(hits))) for _ in range(2))
        self._columns: dict[int, int] | None = None
        self.clear()

    def begin(self, prompt: list[int], expected: Sequence[int], memory: None = None) -> None:
        """Copy from `prompt` and the tokens after it, and from `expected` as if it followed.

        `prompt` is without its last token, which is the first of `expected` unless that is empty; memory: of earlier
        texts, which csrc/ alone has.
        """
        self._written.text.become(prompt)
        self._expected.text.restart([*self._written.text.tail, expected[0]] if expected else [])
        self._expected.text.extend(expected[1:])
        for source in (self._written, self._expected):
            source.hits = [self._weight * share for share in self._prior]
            source.tries = [self._weight] * len(self._prior)

    def clear(self) -> None:
        self._written.text.restart([])
        self.begin([], [])

    def observe(self, tokens: Sequence[int]) -> None:
        """Continue the text with these tokens, and learn which matches were right."""
        for token in tokens:
            for source in (self._written, self._expected):
                source.judge(self._written.text.tail, token)
            self._written.text.extend([token])

    def columns(self, token_ids: Tensor | None) -> None:
        """Take the target ids of the columns of the rows to come; without them a token is its own column."""
        ids = None if token_ids is None else token_ids.tolist()
        self._columns = None if ids is None else {token: column for column, token in enumerate(ids)}

    def plan(
        self, tree: tuple[Tensor, Tensor], nodes: Tensor, live: Tensor, width: int
    ) -> tuple[list[float], list[int], list[float], list[int]] | None:
        """Return the copies for the rows of these nodes as `ops.mix_rows` takes them; None where nothing is copied.

        tree: its tokens and parents. nodes: int64 [width]; those from `live`, int32 [1], on are padding.
        They are the share that is left of each row, the places and their gains, and the tokens of the columns to add.
        """
        columns = range(width) if self._columns is None else self._columns
        mixtures = [self._after(context) for context in self._contexts(*tree, nodes[: int(live)])]
        new = dict.fromkeys(
            token for _, copied in mixtures for token in copied if token not in columns
        )
        place_of = {token: column for column, token in enumerate(new, width)}
        places = [
            row * (width + len(new)) + (place_of[token] if token in place_of else columns[token])
            for row, (_, copied) in enumerate(mixtures)
            for token in copied
        ]
        gains = [probability for _, copied in mixtures for probability in copied.values()]
        return (
            ([uncopied for uncopied, _ in mixtures], places, gains, list(new)) if places else None
        )

    def mix(
        self,
        logits: Tensor,
        tree: tuple[Tensor, Tensor],
        nodes: Tensor,
        live: Tensor,
        normalized: bool,
    ) -> tuple[Tensor, Tensor, list[int]] | None:
        return mix_copies(self, logits, tree, nodes, live, normalized)

    def free(
        self,
        tree: tuple[Tensor, Tensor, Tensor, Tensor],
        nodes: Tensor,
        live: Tensor,
        most: int,
        least: float,
        table: SuccessorTable | None,
    ) -> tuple[list[int], list[int], list[float], list[int], list[int]] | None:
        """Return the `most` likeliest continuations below the nodes whose path log-probability is `least` or more.

        tree: its tokens, parents, path log-probabilities and size; nodes, live: as in `plan`. The results are the parts
        of a `Free`; None: there is no such continuation. Of paths that are equally likely those of an earlier parent
        come first.
        """
        tokens, parents, scores, size = tree
        below, children = nodes[: int(live)], dict[int, set[int]]()
        for token, parent in zip(
            tokens[: int(size)].tolist(), parents[: int(size)].tolist(), strict=True
        ):
            children.setdefault(parent, set()).add(token)
        leaves = zip(
            below.tolist(),
            self._contexts(tokens, parents, below),
            scores[below].tolist(),
            strict=True,
        )
        entries = [_Parent(*leaf, children.get(leaf[0], set())) for leaf in leaves]
        free = Free([], [], [], [], [])
        # Cost (the path log-probability, negated), place of the parent, and rank, of a parent's best continuation left;
        # rank -1: its continuations are not known yet, as that takes time and many are not needed.
        waiting = [
            (-entry.score, place, -1) for place, entry in enumerate(entries) if entry.score >= least
        ]
        heapify(waiting)
        while waiting and len(free.tokens) < most:
            cost, place, rank = heappop(waiting)
            parent = entries[place]
            if rank < 0:
                lowest = math.exp(least - parent.score) or sys.float_info.min
                parent.proposals = [
                    proposal
                    for proposal in self._proposals(parent.context, lowest, table)
                    if proposal[1] not in parent.taken
                ]
            else:
                _, token, mark = parent.proposals[rank]
                free.append(parent.node, token, -cost - parent.score, mark, rank)
                heappush(waiting, (cost, len(entries), -1))
                entries.append(
                    _Parent(int(size) + len(free.tokens) - 1, [*parent.context, token], -cost)
                )
            if rank + 1 < len(parent.proposals):
                heappush(
                    waiting,
                    (-parent.score - math.log(parent.proposals[rank + 1][0]), place, rank + 1),
                )
        return free if free.tokens else None

    def _contexts(self, tokens: Tensor, parents: Tensor, nodes: Tensor) -> list[list[int]]:
        return contexts(self._written.text.tail, tokens.tolist(), parents.tolist(), nodes.tolist())

    def _after(self, context: Sequence[int]) -> Mixture:
        """Return the copies after `context`."""
        uncopied, before = 1.0, dict[int, float]()
        for source in (self._written, self._expected):
            for length, followers in source.text.matches(context)[:1]:
                weight = min(source.hits[length - 1] / source.tries[length - 1], self._ceiling)
                total, commonest = (
                    sum(followers.values()),
                    sorted(followers.items(), key=lambda pair: -pair[1]),
                )
                copied = {
                    token: weight * (count / total) for token, count in commonest[: self._most]
                }
                for token, probability in before.items():
                    copied[token] = copied.get(token, 0.0) + (1 - weight) * probability
                uncopied, before = uncopied * (1 - weight), copied
        return uncopied, before

    def _proposals(
        self, context: Sequence[int], least: float, table: SuccessorTable | None
    ) -> list[tuple[float, int, int]]:
        """Return probability, token and mark of the copies after `context`, over what is recycled there.

        Those of the probability `least` or more, the likeliest first.
        """
        uncopied, copied = self._after(context)
        recycled: Mapping[int, float] = {} if table is None else table.row(context[-1])
        totals = {
            token: copied.get(token, 0.0) + uncopied * share for token, share in recycled.items()
        }
        return sorted(
            (
                (total, token, FREE | COPIED * (token in copied) | RECYCLED * (token in recycled))
                for token, total in (copied | totals).items()
                if total >= least
            ),
            reverse=True,
        )


def contexts(
    before: list[int], tokens: list[int], parents: list[int], nodes: Sequence[int]
) -> list[list[int]]:
    """Return the tokens up to each of these nodes: `before`, and those of its path from the root on."""
    return [[*before, *(tokens[above] for above in path_of(parents, node))] for node in nodes]


def sparse_step(rows: Sequence[Mapping[int, float]], dtype: Any, device: torch.device) -> Step:
    """Return the step of nodes whose proposed tokens have these probabilities; dtype: numpy's, of their logarithms."""
    columns = {
        token: column
        for column, token in enumerate(dict.fromkeys(token for row in rows for token in row))
    }
    # small arrays fill faster than tensors
    shares = np.zeros((len(rows), max(1, len(columns))), dtype)
    for values, row in zip(shares, rows, strict=True):
        values[[columns[token] for token in row]] = list(row.values())
    return Step(
        torch.from_numpy(shares).log_().to(device, torch.float32),
        torch.tensor(list(columns) or [0], device=device, dtype=torch.int64),
        normalized=True,
    )
