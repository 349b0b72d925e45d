"""Continuations without a draft pass: against searching all of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, strategies as st

from specengine.drafters import Drafter, Hints, Traits
from specengine.drafters.lookup import PRIOR_HITS, Lookup, backend
from specengine.drafters.ngram import NGram
from specengine.models import Successors
from specengine.ops import Nodes
from specengine.ops.select import COPIED, FREE, RECYCLED, Step
from specengine.ops.tree import Free, TokenTree
from specengine.records import Cycle, Seconds
from tests.drafters.test_lookup import longest_match
from tests.examples import examples
from tests.toy import Tables, ToyDrafter, nodes_of, random_tree

VOCABULARY = 5


class Recycled:
    """A source of the successors that it was made with, and a note of what it was told."""

    traits = Traits(successors=3)

    def __init__(self, rows: dict[int, dict[int, float]] | None = None) -> None:
        self.table, self.told = backend().SuccessorTable(), list[str]()
        for token, row in (rows or {}).items():
            successors, shares = torch.tensor([list(row)]), torch.tensor([list(row.values())])
            self.table.learn(torch.tensor([token]), [], successors, shares)

    def begin(self, prompt: list[int], features: Any = None, hints: Any = None) -> None:
        self.told.append("begin")

    def reset(self) -> None:
        self.told.append("reset")


class Silent(Drafter):
    """Proposes nothing, so that what Lookup adds stands alone."""

    name = "silent"

    def begin(self, prompt: list[int], features: Any = None, hints: Any = None) -> None:
        pass

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        rows = len(frontier.alive())
        return Step(torch.full((rows, 1), -math.inf), torch.tensor([0]), normalized=True)

    def accept(self, cycle: Cycle) -> None:
        pass

    def reset(self) -> None:
        pass


class World(NamedTuple):
    """The input of a draft: prompt, root and predicted text, and the contents of its other source."""

    text: list[int]
    root: int
    predicted: list[int]
    rows: dict[int, dict[int, float]]

    def continuations(self, path: Sequence[int]) -> list[tuple[float, int, int]]:
        """Probability, token and mark of each continuation of the path, the likeliest first."""
        context = [*self.text, self.root, *path]
        found, copied = dict(self.rows.get(context[-1], {})), set[int]()
        recycled = set(found)
        for source, first in (
            (self.text, 0),
            ([*self.text, self.root, *self.predicted], len(self.text) + 1),
        ):
            length, followed = longest_match(source, context, first)
            weight = PRIOR_HITS[length - 1] if followed else 0.0
            found = {token: (1 - weight) * probability for token, probability in found.items()}
            for token in followed:
                found[token] = found.get(token, 0.0) + weight / len(followed)
            copied |= set(followed)
        marked = [
            (p, t, FREE + COPIED * (t in copied) + RECYCLED * (t in recycled))
            for t, p in found.items()
        ]
        return sorted(marked, reverse=True)

    def best(
        self, tree: TokenTree, nodes: list[int], least: float
    ) -> list[tuple[float, tuple[int, ...], int, int]]:
        """Score, tokens from the root, mark and rank of all that reach `least`, best first."""
        found, parents, waiting = [], tree.parents.tolist(), []
        for node in nodes:
            taken = {
                int(tree.tokens[child]) for child in range(len(tree)) if parents[child] == node
            }
            waiting.append((float(tree.path_log_probs[node]), tuple(tree.path_tokens(node)), taken))
        while waiting:
            score, path, taken = waiting.pop()
            proposals = [
                proposal for proposal in self.continuations(path) if proposal[1] not in taken
            ]
            for rank, (probability, token, mark) in enumerate(proposals):
                below = score + math.log(probability)
                if below >= least:
                    found.append((below, (*path, token), mark, rank))
                    waiting.append((below, (*path, token), set()))
        return sorted(found, reverse=True)


def paths_of(free: Free, tree: TokenTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(free.parents, free.tokens, strict=True):
        before = (
            paths[parent - len(tree)] if parent >= len(tree) else tuple(tree.path_tokens(parent))
        )
        paths.append((*before, token))
    return paths


# at most three in four, so that no chain of them goes on for ever
ROWS = st.dictionaries(
    st.integers(0, VOCABULARY - 1),
    st.dictionaries(st.integers(0, VOCABULARY), st.floats(0.01, 0.25), min_size=1, max_size=3),
)
TEXT = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)


@examples(150)
@given(TEXT, TEXT, ROWS, st.integers(0, 99), st.integers(1, 12), st.floats(-3.5, -0.5), st.data())
def test_they_are_the_best_of_all(
    text: list[int],
    predicted: list[int],
    rows: Any,
    seed: int,
    most: int,
    least: float,
    data: st.DataObject,
) -> None:
    *prompt, root = text
    draft, world = Lookup(Silent(), Recycled(rows)), World(prompt, root, predicted, rows)
    tree = random_tree(seed, 6, VOCABULARY, root)
    draft.begin(prompt, hints=Hints([root, *predicted]))
    nodes = data.draw(st.lists(st.integers(0, 5), unique=True, min_size=1))
    free = draft.free(tree, nodes_of(nodes), most, least)
    every = world.best(tree, nodes, least - 1e-4)
    expected = [entry for entry in every if entry[0] >= least][:most]
    # else either may be the last one
    assume(len(every) <= most or every[most - 1][0] - every[most][0] > 1e-4)
    assume(not any(abs(score - least) < 1e-4 for score, *_ in every))
    if not expected:
        assert free is None
        return
    assert free is not None
    scores = tree.path_log_probs.tolist()
    for parent, log_prob in zip(free.parents, free.log_probs, strict=True):
        scores.append(scores[parent] + log_prob)
    assert scores[6:] == pytest.approx([score for score, *_ in expected], abs=1e-4)
    got = dict(zip(paths_of(free, tree), free.marks, strict=True))
    assert got == {path: mark for _, path, mark, _ in expected}
    assert len(got) == len(free.tokens)  # siblings are distinct
    assert sorted(free.ranks) == sorted(rank for *_, rank in expected)
    grown = TokenTree(6 + most)
    grown.copy_(tree)
    added = grown.graft(free.parents, free.tokens, free.log_probs).alive().tolist()
    assert [tuple(grown.path_tokens(node)) for node in added] == list(got)


def test_a_known_text_goes_on() -> None:
    draft = Lookup(Silent())
    draft.begin([1, 2, 3, 4, 5, 9])
    tree = TokenTree.root(1, 8)
    tree.add(torch.tensor([0, 0]), torch.tensor([7, 2]), torch.tensor([-1.0, -0.1]))
    free = draft.free(tree, nodes_of([1, 2]), 3, -9.0)
    assert free is not None
    assert (free.parents, free.tokens) == ([2, 3, 4], [3, 4, 5])
    assert (free.marks, free.ranks) == ([FREE | COPIED] * 3, [0] * 3)
    # behind the root nothing is proposed that it has already
    assert draft.free(tree, nodes_of([0]), 3, -9.0) is None
    assert draft.free(tree, nodes_of([]), 3, -9.0) is None
    assert draft.free(tree, nodes_of([2]), 0, -9.0) is None
    assert draft.free(tree, nodes_of([2]), 3, -0.1) is None


def test_all_sources_learn() -> None:
    recycled = Recycled()
    draft = Lookup(ToyDrafter(Tables(4)), recycled)
    assert (draft.traits.successors, Lookup(Silent()).traits.successors) == (3, 0)
    assert draft.name == "toy with lookup and recycling"
    draft.begin([1, 2])
    successors = Successors(torch.tensor([[3, 0]]), torch.tensor([[0.0, -torch.inf]]))
    draft.accept(Cycle(TokenTree.root(1), [0], [2], Seconds(), successors=successors))
    assert recycled.table.row(1) == {3: 1.0}
    free = draft.free(TokenTree.root(2, 4), nodes_of([0]), 1, -9.0)
    assert free is not None
    assert free.tokens == [1], "what was committed is part of the text"
    draft.reset()
    assert recycled.told == ["begin", "reset"]


def test_a_draft_alone_has_none() -> None:
    for draft in (ToyDrafter(Tables(4)), NGram()):
        draft.begin([1, 1, 1])
        assert draft.free(TokenTree.root(1), nodes_of([0]), 8, -9.0) is None
