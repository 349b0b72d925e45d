"""The memory of what followed each run of tokens, against searching the sequence."""

from collections import Counter
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.drafters.lookup import MOST_FOLLOWERS, Suffixes, contexts, contexts_of, extended, predicted
from tests.toy import random_tree

TOKENS = st.lists(st.integers(0, 2), max_size=40)
LENGTHS = st.tuples(st.integers(1, 3), st.integers(0, 5))


def searched(tokens: Sequence[int], context: Sequence[int], memory: Suffixes, first: int = 0) -> list:
    """Length and followers of each suffix, the longest first, of what stands from `first` on."""
    found = []
    for length in range(min(memory.longest, len(context)), memory.shortest - 1, -1):
        places = range(max(length, first), len(tokens))
        suffix = list(context[-length:])
        followers = Counter(tokens[place] for place in places if list(tokens[place - length : place]) == suffix)
        if followers:
            found.append((length, dict(followers)))
    return found


@settings(deadline=None, max_examples=300)
@given(TOKENS, TOKENS, LENGTHS, st.integers(0, 9))
def test_matches_are_those_of_a_search(tokens: list[int], context: list[int], lengths: tuple, first: int) -> None:
    memory = Suffixes(lengths[0], sum(lengths))
    memory.restart(tokens[:first])
    memory.extend(tokens[first:])
    found, expected = memory.matches(extended(None, context)), searched(tokens, context, memory, first)
    assert found == expected
    assert [followers.total for _, followers in found] == [sum(followers.values()) for _, followers in expected]
    likeliest = memory.likeliest(extended(None, context))
    if not expected:
        assert likeliest is None
        return
    assert likeliest is not None
    length, followers = expected[0]
    assert likeliest == (length, [(token, count / sum(followers.values())) for token, count in likeliest_of(followers)])


def likeliest_of(followers: dict[int, int]) -> list[tuple[int, int]]:
    return sorted(followers.items(), key=lambda item: -item[1])[:MOST_FOLLOWERS]


def test_the_commonest_followers_stay_known_as_counts_grow() -> None:
    memory = Suffixes(1, 1)
    for token in range(1, 12):
        memory.extend([0, token])
    match = memory.likeliest(extended(None, [0]))
    assert match is not None
    assert match[1] == [(token, 1 / 11) for token in range(1, 1 + MOST_FOLLOWERS)]
    memory.extend([0, 11])
    match = memory.likeliest(extended(None, [0]))
    assert match is not None
    assert match[1][0] == (11, 2 / 12)


@settings(deadline=None)
@given(TOKENS, st.lists(st.integers(0, 2), min_size=1, max_size=20), TOKENS)
def test_a_prediction_begins_behind_the_text(text: list[int], expected: list[int], context: list[int]) -> None:
    seen = Suffixes(1, 4)
    seen.become(text)
    found = predicted(seen, expected).matches(extended(None, context))
    assert found == searched([*text, *expected], context, seen, len(text) + 1)
    assert predicted(seen, []).matches(extended(None, context)) == []


def test_contexts_end_at_the_node() -> None:
    tree = random_tree(3, 20, 5, root=4)
    before = extended(None, [7, 8])
    nodes = [0, 11, 4, 19]
    found = contexts_of(before, tree, nodes)
    assert found == [extended(before, [4, *tree.path_tokens(node)]) for node in nodes]
    every = contexts(before, tree.tokens.tolist(), tree.parents.tolist())
    assert [every[node] for node in nodes] == found
    assert contexts_of(before, tree, []) == []
    assert torch.equal(tree.tokens[:1], torch.tensor([4]))
