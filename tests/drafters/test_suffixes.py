"""The memory of what followed each run of tokens, against searching the sequence; and csrc/ against Python."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from specengine import ops
from specengine.drafters import lookup
from specengine.drafters.lookup import CEILING, FOLLOWERS, PRIOR_HITS, PRIOR_WEIGHT, contexts
from tests.examples import examples
from tests.toy import random_tree

COMPILED = ops.backends()["mix_rows"].name == "cpp"
needs_csrc = pytest.mark.skipif(not COMPILED, reason="the extension specengine._ops is not built")
each_backend = pytest.mark.parametrize(
    "module", [lookup, *([lookup.backend()] if COMPILED else [])]
)
TOKENS = st.lists(st.integers(0, 2), max_size=40)
LENGTHS = st.tuples(st.integers(1, 3), st.integers(0, 5))


def searched(
    tokens: Sequence[int], context: Sequence[int], shortest: int, longest: int, first: int = 0
) -> list[tuple[int, dict[int, int]]]:
    """Length and followers of each suffix, the longest first, of what stands from `first` on."""
    found = []
    for length in range(min(longest, len(context)), shortest - 1, -1):
        places = range(max(length, first), len(tokens))
        suffix = list(context[-length:])
        followers = Counter(
            tokens[place] for place in places if list(tokens[place - length : place]) == suffix
        )
        if followers:
            found.append((length, dict(followers)))
    return found


@each_backend
@examples(200)
@given(TOKENS, TOKENS, LENGTHS, st.integers(0, 9))
def test_matches_are_those_of_a_search(
    module: Any, tokens: list[int], context: list[int], lengths: tuple[int, int], first: int
) -> None:
    memory = module.Suffixes(lengths[0], sum(lengths))
    memory.restart(tokens[:first])
    memory.extend(tokens[first:])
    expected = searched(tokens, context, lengths[0], sum(lengths), first)
    matches = memory.matches(context)
    assert matches == expected
    orders = [
        (list(followers), list(other))
        for (_, followers), (_, other) in zip(matches, expected, strict=True)
    ]
    assert all(order == other for order, other in orders)  # of first occurrences
    assert memory.tail == tokens[-sum(lengths) :]


@each_backend
@settings(deadline=None)
@given(TOKENS, st.lists(TOKENS, max_size=3), LENGTHS, TOKENS)
def test_a_sequence_becomes_another(
    module: Any,
    tokens: list[int],
    others: list[list[int]],
    lengths: tuple[int, int],
    context: list[int],
) -> None:
    memory = module.Suffixes(lengths[0], sum(lengths))
    for other in (tokens, [*tokens, 1, 2], *others):
        memory.become(other)
        assert memory.matches(context) == searched(other, context, lengths[0], sum(lengths))


@each_backend
def test_a_run_has_many_followers(module: Any) -> None:
    memory = module.Suffixes(1, 2)
    for token in [*range(1, 60), *range(30, 40)]:
        memory.extend([0, token])
    ((length, followers),) = memory.matches([0])
    assert (length, followers) == (1, {token: 1 + (30 <= token < 40) for token in range(1, 60)})
    assert list(followers) == list(range(1, 60))


@each_backend
@pytest.mark.parametrize("longest", [0, -1])
def test_lengths_are_checked_where_they_become_sizes(module: Any, longest: int) -> None:
    if module is not lookup:
        with pytest.raises(ValueError, match="longest: got"):
            module.Suffixes(1, longest)


def test_contexts_end_at_the_node() -> None:
    tree = random_tree(3, 20, 5, root=4)
    nodes = [0, 11, 4, 19]
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    assert contexts([7, 8], tokens, parents, nodes) == [
        [7, 8, 4, *tree.path_tokens(node)] for node in nodes
    ]
    assert contexts([7, 8], tokens, parents, []) == []


# --------------------------------------------------------------------------------------------- csrc/ against Python


def both() -> list[Any]:
    """Copies as Python and as csrc/ have them."""
    return [
        module.Copies(PRIOR_HITS, PRIOR_WEIGHT, CEILING, FOLLOWERS)
        for module in (lookup, lookup.backend())
    ]


@st.composite
def trees(draw: st.DrawFn, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Tokens, parents, path log-probabilities with ties, and some nodes, of a tree with room behind its nodes."""
    size = draw(st.integers(1, 9))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    tokens = [draw(st.integers(0, vocabulary)) for _ in range(size)]
    scores = [-draw(st.sampled_from([0.0, 0.1, 0.5, 0.5, 2.0, float("inf")])) for _ in range(size)]
    nodes = draw(st.lists(st.integers(0, size - 1), max_size=5))
    room = [0] * draw(st.integers(0, 2))
    live = torch.tensor([len(nodes)], dtype=torch.int32)
    whole = [torch.tensor([*values, *room], dtype=torch.int64) for values in (tokens, parents)]
    return (
        *whole,
        torch.tensor([*scores, *room], dtype=torch.float32),
        torch.tensor([size], dtype=torch.int32),
        torch.tensor([*nodes, *room], dtype=torch.int64),
        live,
    )


def rows_of(tokens: Sequence[int], count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct successors of each token, with probabilities of which some are 0 or NaN."""
    generator = torch.Generator().manual_seed(seed)
    successors = torch.stack([torch.randperm(12, generator=generator)[:count] for _ in tokens])
    logits = torch.randn(len(tokens), count, generator=generator).round()
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
    return successors, logits.softmax(1)


@needs_csrc
@examples(300)
@given(st.data(), st.sampled_from([1, 3, 10, 40]))
def test_copies_are_the_same_bits(data: st.DataObject, vocabulary: int) -> None:
    """Of a text that grows, is expected, begins anew: rows of steps, and nodes without a pass."""
    token = st.integers(0, vocabulary)
    texts, pair = st.lists(token, max_size=60), both()
    tables = [module.SuccessorTable() for module in (lookup, lookup.backend())]
    for _ in range(data.draw(st.integers(1, 3))):
        prompt = data.draw(texts)
        expected = data.draw(st.just([]) | st.lists(token, min_size=1, max_size=40))
        ids = data.draw(st.none() | st.lists(st.integers(0, vocabulary + 2), max_size=8))
        width = data.draw(st.integers(0, vocabulary + 3)) if ids is None else len(ids)
        taught = data.draw(st.lists(token, min_size=1, max_size=8))
        rows = rows_of(taught, data.draw(st.integers(1, 6)), data.draw(st.integers(0, 99)))
        path = data.draw(st.lists(st.integers(0, len(taught) - 1), max_size=3))
        for copies, table in zip(pair, tables, strict=True):
            copies.begin(prompt, expected)
            copies.columns(None if ids is None else torch.tensor(ids, dtype=torch.int64))
            table.learn(torch.tensor(taught), path, *rows)
        told = data.draw(st.lists(token, max_size=6))
        for copies, table in zip(pair, tables, strict=True):
            table.learn(torch.tensor(taught), path, *rows, copies, told)
        for _ in range(data.draw(st.integers(1, 3))):
            committed = data.draw(st.lists(token, max_size=6))
            tokens, parents, scores, size, nodes, live = data.draw(trees(vocabulary))
            most, least = (
                data.draw(st.integers(-1, 20)),
                data.draw(st.floats(-4, 0) | st.just(-float("inf"))),
            )
            given_tables = tables if data.draw(st.booleans()) else [None, None]
            plans, free, mixtures = [], [], []
            logits = torch.randn(len(nodes), width)
            normalized = data.draw(st.booleans())
            for copies, table in zip(pair, given_tables, strict=True):
                copies.observe(committed)
                plans.append(copies.plan((tokens, parents), nodes, live, width))
                mixtures.append(copies.mix(logits, (tokens, parents), nodes, live, normalized))
                free.append(
                    copies.free((tokens, parents, scores, size), nodes, live, most, least, table)
                )
            assert plans[0] == plans[1]
            assert (mixtures[0] is None) == (mixtures[1] is None) == (plans[0] is None)
            for ours, theirs in zip(*(mixture or () for mixture in mixtures), strict=True):
                assert (
                    torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
                )
            assert free[0] == free[1]
    for known in range(vocabulary + 1):
        before, after = (list(table.row(known).items()) for table in tables)
        assert before == after
    for copies in pair:
        copies.clear()
    at_root = torch.tensor([0]), torch.tensor([1], dtype=torch.int32)
    assert [
        copies.plan((torch.tensor([0]), torch.tensor([-1])), *at_root, 5) for copies in pair
    ] == [None, None]


@needs_csrc
def test_long_texts_have_the_same_copies() -> None:
    generator = torch.Generator().manual_seed(0)
    text = (torch.rand(4000, generator=generator) ** 3 * 90).long().tolist()
    pair = both()
    at_root = torch.tensor([0]), torch.tensor([1], dtype=torch.int32)
    for copies in pair:
        copies.begin(text[:2000], text[1000:1500])
    copied = 0
    for place in range(2000, 4000, 5):
        tree = torch.tensor(text[place : place + 1]), torch.tensor([-1])
        plans = [copies.plan(tree, *at_root, 50) for copies in pair]
        assert plans[0] == plans[1]
        copied += plans[0] is not None
        for copies in pair:
            copies.observe(text[place : place + 5])
    assert copied > 300


@needs_csrc
def test_drafts_do_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ops.VARIABLE, "reference")
    assert lookup.backend() is lookup
    monkeypatch.delenv(ops.VARIABLE)
    assert lookup.backend().__name__ == "specengine._ops"
