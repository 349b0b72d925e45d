"""The index of earlier texts against a search of all of them, its bounds, and drafts that copy from it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.drafters import Hints
from specengine.drafters.lookup import CEILING, Lookup, backend
from specengine.drafters.recycling import Recycling
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.examples import examples
from tests.toy import Tables, ToyDrafter

pytestmark = pytest.mark.skipif(
    ops.backends()["mix_rows"].name != "cpp", reason="the extension specengine._ops is not built"
)
RUNS, DEPTH, PLACES, FEW = (64, 16, 6, 3), 256, 16, 4  # as in csrc/spec/memory.hpp
SMALLEST, PER_TEXT = 1024, 64
SMALL = 31_000  # bytes, of a ring of SMALLEST tokens


class Reference:
    """What the index holds and says, slowly: a list of texts, each of which is searched from its end."""

    def __init__(self, capacity: int = SMALLEST) -> None:
        self.capacity = capacity
        self.texts: list[
            list[int] | None
        ] = []  # the oldest first; None: one that another began with
        self.lengths: list[int] = []

    def add(self, tokens: Sequence[int]) -> bool:
        text = list(tokens)[-(self.capacity // 4) :]
        if len(text) <= RUNS[-1]:
            return False
        if text in self.texts:
            raise NotImplementedError  # it would become a used one
        self.texts = [
            None if known is not None and text[: len(known)] == known else known
            for known in self.texts
        ]
        while (
            sum(self.lengths) + len(self.lengths) + len(text) + 1 > self.capacity
            or len(self.texts) >= self.capacity // PER_TEXT
        ):
            del self.texts[0], self.lengths[0]
        self.texts.append(text)
        self.lengths.append(len(text))
        return True

    def recall(self, context: Sequence[int]) -> list[tuple[int, dict[int, int]]]:
        found: list[tuple[int, int, int]] = []  # lengths, numbers of texts and places in them
        texts = list(enumerate(self.texts))[::-1]
        for run in RUNS if len(context) >= RUNS[-1] else ():
            if len(found) >= FEW:
                break
            for number, text in texts:
                for place in range(len(text or ()) - 1, run - 1, -1):
                    length = matched(text or [], place, context)
                    entry = length, number, place
                    if length >= run and len(found) < PLACES and entry not in found:
                        found.append(entry)
        groups: dict[int, Counter[int]] = {}
        for length, number, place in sorted(found, key=lambda entry: -entry[0]):
            groups.setdefault(length, Counter())[(self.texts[number] or [])[place]] += 1
        return [(length, dict(followers)) for length, followers in groups.items()]


def matched(text: Sequence[int], place: int, context: Sequence[int]) -> int:
    """Return how many tokens before the place are the context's last ones."""
    length, most = 0, min(place, len(context), DEPTH)
    while length < most and text[place - 1 - length] == context[-1 - length]:
        length += 1
    return length


TEXT = st.lists(st.integers(0, 2), max_size=90)


@examples(150)
@given(st.lists(TEXT, max_size=40), st.data())
def test_it_recalls_what_a_search_of_all_texts_finds(
    texts: list[list[int]], data: st.DataObject
) -> None:
    index, reference = backend().TextMemory(SMALL), Reference()
    for text in texts:
        if text[-SMALLEST // 4 :] in reference.texts:
            continue
        assert index.add(text) == reference.add(text)
        assert index.texts() == [known for known in reference.texts if known is not None]
    contexts = [data.draw(TEXT), *(text[: data.draw(st.integers(0, len(text)))] for text in texts)]
    for context in contexts:
        assert index.recall(context) == reference.recall(context)


def test_long_contexts_and_many_places() -> None:
    chance = random.Random(0)
    index, reference = backend().TextMemory(1 << 20), Reference(1 << 15)
    same = [chance.randrange(3) for _ in range(300)]
    for number in range(45):
        text = [*(chance.randrange(50) for _ in range(number)), *same[number:], number % 3, 7, 8]
        assert index.add(text)
        assert reference.add(text)
    for end in range(5, 303, 7):
        for start in (0, end // 2):
            context = [*same, 1, 7, 8][start:end]
            assert index.recall(context) == reference.recall(context)


def test_what_it_holds_stays_within_its_bytes() -> None:
    """Ten thousand texts: of one token each after the bound, of thousands, and those that begin with each other."""
    chance = random.Random(1)
    for limit in (SMALL, 1 << 18, 3 << 18):
        index = backend().TextMemory(limit)
        sizes = set()
        for number in range(10_000 if limit > SMALL else 2000):
            index.add([chance.randrange(1000) for _ in range(chance.choice([5, 40, 90]))])
            if number % 100 == 0:
                index.add(list(range(number, number + 5000)))
            if number > 3000:
                sizes.add(index.bytes)
        assert index.bytes <= limit
        assert len(sizes) <= 1
        assert sum(map(len, index.texts())) * 4 <= limit


def test_a_used_text_outlives_those_that_were_not() -> None:
    chance = random.Random(2)

    def text() -> list[int]:
        return [chance.randrange(10_000) for _ in range(60)]

    index = backend().TextMemory(SMALL)
    used, unused = text(), text()
    index.add(used)
    index.add(unused)
    assert not index.add(used)  # which is a use
    for _ in range(15):
        index.add(text())
    assert index.recall(used[:30]) == [(30, {used[30]: 1})]
    assert index.recall(unused[:30]) == []
    for _ in range(40):
        index.add(text())
    assert index.recall(used[:30]) == []


def test_a_conversation_is_kept_once() -> None:
    index = backend().TextMemory(1 << 20)
    conversation = list(range(40))
    for turn in range(1, 12):
        conversation += [turn, *range(100 * turn, 100 * turn + 30)]
        index.add(conversation)
    assert index.texts() == [conversation]


def test_a_lower_limit_keeps_the_newest() -> None:
    index = backend().TextMemory(1 << 20)
    texts = [[number * 1000 + place for place in range(100)] for number in range(60)]
    for text in texts:
        index.add(text)
    assert index.texts() == texts
    index.limit(SMALL)
    assert index.texts() == texts[-10:]
    index.limit(1 << 20)
    for text in texts[:50]:
        assert index.add(text)
    assert index.texts() == [*texts[-10:], *texts[:50]]


@pytest.mark.parametrize("token", [-1, 1 << 31])
def test_tokens_are_those_of_a_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match="tokens: got"):
        backend().TextMemory(SMALL).add([1, 2, 3, 4, token])


# ---- drafts that copy from it


def committed(root: int, tokens: list[int]) -> Cycle:
    return Cycle(TokenTree.root(root), [0], tokens, Seconds())


def chance_of(draft: Any, root: int, token: int) -> float:
    step = draft.root(TokenTree.root(root, 2))
    values = step.logits[0].double()
    shares = values.exp() if step.normalized else values.softmax(-1)
    ids = list(range(len(values))) if step.token_ids is None else step.token_ids.tolist()
    return float(shares[ids.index(token)]) if token in ids else 0.0


def test_a_draft_copies_where_an_earlier_text_knows_more() -> None:
    index = backend().TextMemory(SMALL)
    index.add([9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9])
    draft = Lookup(ToyDrafter(Tables(12, seed=1)))
    draft.begin([9, 8, 7, 6], hints=Hints(memory=index))
    own = chance_of(draft.inner, 5, 4)
    assert chance_of(draft, 5, 4) > own + 0.2
    draft.begin([9, 8, 7, 6], hints=Hints())
    assert chance_of(draft, 5, 4) == pytest.approx(own)
    # prompt and answer have a match of the same length: theirs counts
    draft.begin([8, 7, 6, 5, 10, 11, 8, 7, 6], hints=Hints(memory=index))
    assert chance_of(draft, 5, 10) > chance_of(draft, 5, 4) + 0.2


def test_continuations_without_a_pass_follow_an_earlier_text() -> None:
    index = backend().TextMemory(SMALL)
    text = list(range(50, 90))
    index.add(text)
    draft = Lookup(Recycling())
    draft.begin(text[:20], hints=Hints(memory=index))
    tree = TokenTree.root(text[20], 1)
    free = draft.free(tree, tree.root_alone(), 12, -9.0)
    assert free is not None
    assert free.tokens == text[21:33]
    assert free.parents == [0, *range(1, 12)]


def test_it_learns_how_often_matches_are_right() -> None:
    right, wrong = backend().TextMemory(SMALL), backend().TextMemory(SMALL)
    for index, next_token in ((right, 7), (wrong, 8)):
        index.add([1, 2, 3, 4, 5, 6, 7])
        draft = Lookup(ToyDrafter(Tables(70, seed=1)))
        for _ in range(60):
            draft.begin([60, 1, 2, 3, 4, 5], hints=Hints(memory=index))
            draft.accept(committed(6, [next_token, 9]))
    chances = []
    for index in (right, wrong):
        draft.begin([61, 1, 2, 3, 4, 5], hints=Hints(memory=index))
        chances.append(chance_of(draft, 6, 7))
    assert CEILING >= chances[0] > 0.7
    assert chances[1] < 0.3


def test_rows_and_free_nodes_name_the_same_tokens() -> None:
    index = backend().TextMemory(SMALL)
    for number, follower in enumerate((40, 41, 40)):
        index.add([60 + number, 1, 2, 3, 4, follower, 5])
    draft = Lookup(Recycling())
    draft.begin([1, 2, 3], hints=Hints(memory=index))
    tree = TokenTree.root(4, 1)
    free = draft.free(tree, tree.root_alone(), 2, -9.0)
    assert free is not None
    assert set(free.tokens) == {40, 41}
    step = draft.step(tree, tree.root_alone())
    best = step.logits[0].topk(2)
    assert step.tokens_of(best.indices).tolist() == free.tokens
    assert torch.allclose(best.values, torch.tensor(free.log_probs), atol=1e-5)
