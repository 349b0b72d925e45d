"""A draft that also copies: its distributions, its columns, what it learns of itself, and that answers stay exact."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from bench.short_models import first_layers
from specengine import policies
from specengine.drafters import Hints
from specengine.drafters.lookup import CEILING, PRIOR_HITS, PRIOR_WEIGHT, Lookup
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.ops import Nodes
from specengine.ops.select import COPIED, Step
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.examples import examples
from tests.toy import Tables, ToyDrafter, ToyTarget, nodes_of, policy_for, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def path_tree(root: int, path: Sequence[int]) -> TokenTree:
    tree = TokenTree.root(root, len(path) + 1)
    for node, token in enumerate(path):
        tree.add(torch.tensor([node]), torch.tensor([token]), torch.zeros(1))
    return tree


def distribution(step: Step, row: int = 0) -> dict[int, float]:
    tokens = range(step.logits.shape[1]) if step.token_ids is None else step.token_ids.tolist()
    values = step.logits[row].double()
    probabilities = values.exp() if step.normalized else values.softmax(-1)
    return dict(zip(tokens, probabilities.tolist(), strict=True))


def longest_match(
    text: Sequence[int], context: Sequence[int], first: int = 0
) -> tuple[int, list[int]]:
    """Length of the longest suffix of `context` in `text`, at most as long as the prior, and what followed it; of
    what stands from `first` on."""
    for length in range(min(len(PRIOR_HITS), len(context)), 0, -1):
        suffix, places = list(context[-length:]), range(max(length, first), len(text))
        followed = [text[place] for place in places if list(text[place - length : place]) == suffix]
        if followed:
            return length, followed
    return 0, []


@examples(250)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.lists(st.integers(0, 6), max_size=4),
    st.lists(st.integers(0, 6), max_size=12),
    st.data(),
)
def test_the_mixture_is_that_of_the_definition(
    text: list[int], path: list[int], predicted: list[int], data: st.DataObject
) -> None:
    columns = data.draw(st.sampled_from([None, (2, 0, 5), (3, 1, 2, 0)]))
    tables = Tables(7, seed=3, exact=0.4)
    normalized = data.draw(st.booleans())
    draft = Lookup(ToyDrafter(tables, columns=columns, normalized=normalized))
    root = data.draw(st.integers(0, 3))
    draft.begin(text, hints=Hints([root, *predicted] if predicted else []))
    tree = path_tree(root, path)
    step = draft.step(tree, nodes_of([len(path)]))
    found = distribution(step)

    context = [*text, root, *path]
    known = range(7) if columns is None else columns
    own = tables.probabilities(context)[list(known)]
    if not normalized:
        if own.sum() == 0:
            return  # logits of -inf alone
        own = own / own.sum()
    expected, copied = dict(zip(known, own, strict=True)), set[int]()
    for source, first in ((text, 0), ([*text, root, *predicted], len(text) + 1)):
        length, followed = longest_match(source, context, first)
        if followed:
            weight = PRIOR_HITS[length - 1]
            expected = {token: (1 - weight) * p for token, p in expected.items()}
            for token in followed:
                expected[token] = expected.get(token, 0.0) + weight / len(followed)
            copied |= set(followed)
    assert found == pytest.approx(expected, abs=1e-6)
    assert step.normalized is normalized
    if copied:
        assert step.marks is not None
        ids = list(known) if step.token_ids is None else step.token_ids.tolist()
        assert {
            ids[column]: COPIED for column in step.marks[0].nonzero()[:, 0].tolist()
        } == dict.fromkeys(copied, 1)
        row = step.row(torch.tensor([0]))
        assert row.marks is not None
        assert torch.equal(row.marks, step.marks)
    else:
        assert step.marks is None


def test_rows_are_mixed_apart() -> None:
    draft = Lookup(ToyDrafter(Tables(8, seed=1), columns=[0, 1, 2, 3]))
    draft.begin([1, 2, 6, 1, 3, 7, 5])
    tree = path_tree(1, [2])
    # behind (1): 2 and 3 were seen; behind (1, 2): 6, without a column
    step = draft.step(tree, nodes_of([0, 1]))
    assert step.token_ids is not None
    assert step.token_ids.tolist() == [0, 1, 2, 3, 6]
    first, second = distribution(step, 0), distribution(step, 1)
    assert first[6] < 1e-8
    assert second[6] == pytest.approx(PRIOR_HITS[1], rel=1e-5)
    assert first[2] > PRIOR_HITS[0] / 2
    assert first[3] > PRIOR_HITS[0] / 2


def test_a_row_that_proposes_nothing_is_what_is_copied() -> None:
    class Nothing(ToyDrafter):
        def step(self, tree: TokenTree, frontier: Nodes) -> Step:
            return Step(
                torch.full((len(frontier.ids), 1), -torch.inf), torch.tensor([0]), normalized=True
            )

    draft = Lookup(Nothing(Tables(8)))
    draft.begin([1, 2, 6, 1, 2, 7, 5])
    # (1, 2) was seen, (2, 3) and (3) were not
    step = draft.step(path_tree(1, [2, 3]), nodes_of([1, 2]))
    assert distribution(step, 0) == pytest.approx(
        {0: 0.0, 6: PRIOR_HITS[1] / 2, 7: PRIOR_HITS[1] / 2}
    )
    assert distribution(step, 1) == {0: 0.0, 6: 0.0, 7: 0.0}
    tree = path_tree(1, [2, 3])
    grown = TokenTree.root(1, 8)
    grown.graft([0, 1], [2, 3], [0.0, 0.0])
    assert torch.equal(tree.ancestors, grown.ancestors[:3])
    assert step.add_best_children(grown, nodes_of([1, 2]), 4).alive().tolist() == [3, 4]


def test_a_prediction_has_hits_of_its_own_and_is_forgotten() -> None:
    draft = Lookup(ToyDrafter(Tables(8, seed=1)))
    draft.begin([7, 0], hints=Hints([1, 2, 3, 4, 5, 6]))
    before = distribution(draft.root(path_tree(1, [])))[2]
    assert before > PRIOR_HITS[2]  # (7, 0, 1) stands before the prediction
    draft.accept(committed(root=1, tokens=[3, 5]))  # where 2 was predicted behind three tokens
    step, at = path_tree(5, [2, 3, 4]), nodes_of([3])
    weight = PRIOR_WEIGHT * PRIOR_HITS[2] / (PRIOR_WEIGHT + 1)
    own = distribution(draft.inner.step(step, at))[5]
    assert distribution(draft.step(step, at))[5] == pytest.approx(
        (1 - weight) * own + weight, abs=1e-6
    )
    draft.begin([7, 0])
    assert draft.root(path_tree(1, [])).marks is None


def test_where_nothing_matches_the_draft_has_its_say() -> None:
    class Fixed(ToyDrafter):
        def step(self, tree: TokenTree, frontier: Nodes) -> Step:
            return given_step

    draft = Lookup(Fixed(Tables(8)))
    draft.begin([1, 2, 3])
    # what a draft gives that proposes nothing
    nothing = Step(torch.full((1, 1), -torch.inf), normalized=True)
    for given_step in (Step(torch.zeros(1, 8)), nothing):
        found = draft.root(path_tree(7, []))
        assert found.logits is given_step.logits
        assert (found.token_ids, found.marks, found.normalized) == (
            None,
            None,
            given_step.normalized,
        )


def test_the_draft_s_own_logits_are_left_as_they_are() -> None:
    class Keeps(ToyDrafter):
        def step(self, tree: TokenTree, frontier: Nodes) -> Step:
            return Step(logits)

    logits = torch.zeros(1, 8)
    draft = Lookup(Keeps(Tables(8)))
    draft.begin([1, 2, 3])
    assert draft.root(path_tree(1, [])).logits[0].argmax() == 2
    assert torch.equal(logits, torch.zeros(1, 8))


def committed(root: int, tokens: list[int]) -> Cycle:
    return Cycle(TokenTree.root(root), [0], tokens, Seconds())


def test_it_counts_how_often_a_match_was_right() -> None:
    draft = Lookup(ToyDrafter(Tables(8, seed=1)))
    draft.begin([1, 2, 1, 2, 1, 3])  # behind (1): 2 twice, 3 once
    # behind (3) nothing was seen; (1) is right by 2 of 3
    draft.accept(committed(root=1, tokens=[2, 5]))
    weight = (PRIOR_WEIGHT * PRIOR_HITS[0] + 2 / 3) / (PRIOR_WEIGHT + 1)
    found = distribution(draft.step(path_tree(5, [3]), nodes_of([1])))  # behind (3): 1
    own = distribution(ToyDrafterAt(draft).step())
    assert found[1] == pytest.approx((1 - weight) * own[1] + weight, abs=1e-6)
    draft.begin([1, 2, 1, 2, 1, 3, 1, 2, 5])  # another generation begins with the prior
    assert distribution(draft.root(path_tree(3, [])))[1] > PRIOR_HITS[0]


class ToyDrafterAt:
    """The draft inside `draft`, asked where the test above asks."""

    def __init__(self, draft: Lookup) -> None:
        self.draft = draft.inner

    def step(self) -> Step:
        return self.draft.step(path_tree(5, [3]), nodes_of([1]))


def test_a_match_that_was_always_right_still_leaves_the_draft_a_share() -> None:
    draft = Lookup(ToyDrafter(Tables(4, seed=1)))
    draft.begin([1] * 4)
    for _ in range(600):
        draft.accept(committed(root=1, tokens=[1]))
    found = distribution(draft.root(path_tree(1, [])))
    assert CEILING <= found[1] < 1.0
    assert min(found.values()) > 0


@examples(60)
@given(
    st.sampled_from([name for name in policies.names() if name != "plain"]),
    st.sampled_from(["copies", "recycled", "both"]),
    st.integers(0, 50),
    st.booleans(),
)
def test_answers_are_those_of_plain_decoding(
    name: str, sources: str, seed: int, sampled: bool
) -> None:
    tables = Tables(6, seed=seed, concentration=0.2)
    policy = policy_for(name, seed)
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "do_sample": sampled,
        **({"seed": seed} if sampled else {}),
    }
    plain = Engine(ToyTarget(tables), None, None)
    toy = ToyDrafter(Tables(6, seed=seed + 1), columns=[0, 2, 4])
    draft = (
        Lookup(Recycling())
        if sources == "recycled"
        else Lookup(toy, Recycling() if sources == "both" else None)
    )
    ours = Engine(ToyTarget(tables), draft, policy)
    prompt = [1, 2, 3, 1, 2, 3, 0, 1]
    assert ours.generate(prompt, **options).token_ids == plain.generate(prompt, **options).token_ids


def test_a_text_that_repeats_itself_is_copied() -> None:
    model = tiny()
    prompt = [5, 6, 7, 8, 9, 10] * 6
    bare = Engine.from_pretrained(model, first_layers(model, 1), "eagle", lookup=False)
    copying = Engine.from_pretrained(model, first_layers(model, 1), "eagle")
    before, after = (
        engine.generate(prompt, max_new_tokens=96, do_sample=False) for engine in (bare, copying)
    )
    assert before.token_ids == after.token_ids
    assert after.stats.draft.endswith("with lookup and recycling")
    assert not before.stats.draft.endswith("with lookup and recycling")
    assert after.stats.mean_acceptance_length > before.stats.mean_acceptance_length


def test_it_copies_over_a_captured_target_too() -> None:
    model = tiny()
    prompt = [5, 6, 7, 8, 9, 10] * 6
    expected = (
        Engine.from_pretrained(model, policy="plain").generate(prompt, max_new_tokens=40).token_ids
    )
    copying = Engine.from_pretrained(
        model, first_layers(model, 1), "eagle", graphs=True, lookup=True
    )
    assert copying.generate(prompt, max_new_tokens=40).token_ids == expected
    assert isinstance(copying.drafter, Lookup)
    assert copying.warmup(128).captured == ("verify",)


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_a_draft_without_distributions_cannot_be_mixed(draft: str) -> None:
    with pytest.raises(InputError, match="lookup: draft"):
        Engine.from_pretrained(tiny(), draft, lookup=True)


def test_a_draft_that_is_given_is_taken_as_it_is() -> None:
    given_draft = ToyDrafter(Tables(8))
    assert Engine.from_pretrained(tiny(), given_draft, "eagle").drafter is given_draft
    wrapped = Engine.from_pretrained(tiny(), given_draft, "eagle", lookup=True).drafter
    assert isinstance(wrapped, Lookup)
    assert wrapped.inner is given_draft
    assert isinstance(Engine.from_pretrained(tiny(), "ngram").drafter, NGram)
