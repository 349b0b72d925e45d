"""Token recycling: what it keeps of verified trees, what it proposes, and that answers stay those of plain decoding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specengine import Engine, drafters, policies
from specengine.drafters.lookup import Lookup
from specengine.drafters.recycling import Recycling
from specengine.errors import InputError
from specengine.models import Successors
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeTarget
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.examples import examples
from tests.models.native_engines import lm_of, needs_extension
from tests.toy import (
    POLICIES,
    VOCABULARY,
    Tables,
    ToyDrafter,
    ToyTarget,
    nodes_of,
    policy_for,
    tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [*range(40, 52)]
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "seed": 7},
)


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    """A tree whose first token is the root's, with `parents` for the others."""
    tree = TokenTree.root(tokens[0], len(tokens))
    for token, parent in zip(tokens[1:], parents, strict=True):
        tree.add(torch.tensor([parent]), torch.tensor([token]), torch.zeros(1))
    return tree


def seen(draft: Recycling, tree: TokenTree, logits: Tensor, path: list[int]) -> None:
    successors = Successors.of(logits, draft.traits.successors)
    draft.accept(Cycle(tree, path, [0] * len(path), Seconds(), successors=successors))


def likeliest(logits: Tensor, count: int) -> dict[int, float]:
    """Return the successors to keep from one row of logits."""
    values, tokens = logits.masked_fill(~logits.isfinite(), -math.inf).sort(
        descending=True, stable=True
    )
    kept = values[:count].softmax(0).tolist()
    return {token: share for token, share in zip(tokens.tolist(), kept, strict=False) if share > 0}


# ---------------------------------------------------------------------------------------------------- what is kept


@examples(60)
@given(st.data(), st.integers(1, 9), st.integers(1, 12))
def test_it_keeps_the_likeliest_successors_of_every_node(
    data: st.DataObject, count: int, nodes: int
) -> None:
    """Of a token that stands in several places those of the accepted path, deepest first, else of the last node."""
    tokens = data.draw(st.lists(st.integers(0, 4), min_size=nodes, max_size=nodes))
    parents = [data.draw(st.integers(0, node)) for node in range(nodes - 1)]
    path = [data.draw(st.integers(0, nodes - 1))]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    shares = st.sampled_from([-3.0, 0.0, 0.5, 2.0, -math.inf, math.nan])
    logits = torch.tensor(
        data.draw(
            st.lists(st.lists(shares, min_size=7, max_size=7), min_size=nodes, max_size=nodes)
        )
    )
    draft = Recycling(count)
    seen(draft, tree_of(tokens, parents), logits, path)
    rows = [likeliest(row, count) for row in logits]
    for token in range(5):
        places = [node for node in (*range(nodes), *path) if tokens[node] == token and rows[node]]
        assert draft.row(token) == pytest.approx(rows[places[-1]] if places else {})
        assert list(draft.row(token)) == list(rows[places[-1]] if places else {})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_kept(value: float) -> None:
    draft, tree = Recycling(3), tree_of([7, 8], [0])
    seen(draft, tree, torch.tensor([[1.0, value, 0.0, value, 1.0], [value] * 5]), [0, 1])
    assert set(draft.row(7)) <= {0, 2, 4}
    assert draft.row(8) == {}
    before = draft.row(7)
    seen(draft, tree, torch.full((2, 5), value), [0])
    assert draft.row(7) == before  # better an old row than none


def test_far_worse_tokens_have_no_probability_and_are_not_kept() -> None:
    draft = Recycling(3)
    seen(draft, TokenTree.root(1), torch.tensor([[1e4, 0.0, 1e4, -1e4]]), [0])
    assert draft.row(1) == {0: 0.5, 2: 0.5}


def test_it_outlives_a_reset_and_can_be_forgotten() -> None:
    draft = Recycling(2)
    seen(draft, TokenTree.root(1), torch.tensor([[0.0, 1.0, 2.0]]), [0])
    draft.reset()
    draft.begin([1, 2, 3])
    assert list(draft.row(1)) == [2, 1]
    draft.forget()
    assert draft.row(1) == {}


def test_cycles_without_successors_teach_nothing() -> None:
    draft = Recycling()
    draft.accept(Cycle(TokenTree.root(1), [0], [2], Seconds()))
    assert draft == Recycling()


# ---------------------------------------------------------------------------------------------------- what it proposes


def test_steps_are_the_rows_of_the_nodes_tokens() -> None:
    draft = Recycling(2)
    seen(
        draft,
        tree_of([5, 6], [0]),
        torch.tensor([[0.0, 1.0, 2.0, -9.0], [3.0, 1.0, -9.0, 3.0]]),
        [0],
    )
    step = draft.step(tree_of([6, 9, 5, 6], [0, 0, 2]), nodes_of([0, 1, 2, 3]))
    assert step.normalized
    assert step.token_ids is not None
    assert len(set(step.token_ids.tolist())) == len(step.token_ids)
    for token, values in zip((6, 9, 5, 6), step.logits.tolist(), strict=True):
        pairs = zip(step.token_ids.tolist(), values, strict=True)
        assert {
            other: math.exp(value) for other, value in pairs if value > -math.inf
        } == pytest.approx(draft.row(token))
    assert Recycling().step(TokenTree.root(3), nodes_of([0])).logits.tolist() == [[-math.inf]]


@pytest.mark.parametrize("count", [0, -1, 65])
def test_impossible_counts_are_refused(count: int) -> None:
    with pytest.raises(InputError, match=rf"recycling\.successors: got {count}, accepted 1 to 64"):
        Recycling(count)


def test_it_is_found_by_name() -> None:
    assert "recycling" in drafters.names()
    engine = Engine.from_pretrained(tiny(), "recycling", draft_options={"successors": "3"})
    draft = engine.drafter.inner if isinstance(engine.drafter, Lookup) else engine.drafter
    assert draft == Recycling(3)
    assert engine.drafter.traits.successors == 3
    with pytest.raises(
        InputError, match="draft recycling: unknown option 'longest', known are successors"
    ):
        Engine.from_pretrained(tiny(), "recycling", draft_options={"longest": 3})


# ---------------------------------------------------------------------------------------------------- in an engine


worlds = st.tuples(
    st.sampled_from([2, 6, 17]), st.sampled_from([0.05, 0.5]), st.sampled_from([0.0, 0.5])
)


@pytest.mark.sliced(3)
@pytest.mark.parametrize("policy", POLICIES)
@examples(6)
@given(world=worlds, seed=st.integers(0, 10_000))
def test_answers_equal_plain_decoding(
    policy: str, world: tuple[int, float, float], seed: int
) -> None:
    """Several answers of one engine, so that what one taught is proposed in the next."""
    vocabulary, concentration, exact = world
    target = ToyTarget(Tables(vocabulary, seed, concentration=concentration, exact=exact, order=2))
    plain, engine = (
        Engine(target, None, None),
        Engine(target, Recycling(4), policy_for(policy, seed)),
    )
    for options in WAYS:
        expected = plain.generate([0, 1], max_new_tokens=14, **options).token_ids
        assert engine.generate([0, 1], max_new_tokens=14, **options).token_ids == expected


def engine_of(backend: str, drafter: Recycling | None) -> Engine:
    target = (
        NativeTarget(lm_of("llama")) if backend == "native" else HuggingFaceTarget(tiny("llama"))
    )
    return Engine(
        target,
        drafter,
        policies.make("eagle", width=4, expansions=6, budget=16) if drafter else None,
    )


@pytest.mark.sliced(1)
@pytest.mark.parametrize("backend", ["huggingface", pytest.param("native", marks=needs_extension)])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_cycles_carry_the_targets_successors_of_each_node(
    backend: str, options: dict[str, Any]
) -> None:
    """Beside a dense recomputation of each node's path; and a second answer accepts more than the first."""
    draft = Recycling(5)
    engine, plain = engine_of(backend, draft), engine_of(backend, None)
    plain_target: Any = plain.target
    lengths, rows = [], {}
    for _ in range(2):
        context = list(PROMPT)
        stream = engine.stream(PROMPT, max_new_tokens=40, **options)
        for piece in stream:
            cycle = piece.cycle
            assert cycle.successors is not None
            assert (
                cycle.successors.tokens.shape
                == cycle.successors.logits.shape
                == (len(cycle.tree), 5)
            )
            with torch.inference_mode():
                plain_target.prefill(context[:-1])
                logits, _ = plain_target.verify(cycle.tree)
            values, tokens = logits.topk(5, dim=1)
            assert torch.allclose(cycle.successors.logits, values, atol=1e-4)
            assert torch.equal(cycle.successors.tokens, tokens)
            accepted = {
                int(cycle.tree.tokens[node]): node
                for node in (*range(len(cycle.tree)), *cycle.path)
            }
            rows |= {token: likeliest(logits[node], 5) for token, node in accepted.items()}
            context += cycle.tokens
        assert (
            stream.result.token_ids
            == plain.generate(PROMPT, max_new_tokens=40, **options).token_ids
        )
        lengths.append(stream.result.stats.mean_acceptance_length)
    for token in range(VOCABULARY):
        assert draft.row(token) == pytest.approx(rows.get(token, {}), abs=1e-5)
    assert lengths[1] > lengths[0] >= 1


def test_without_a_draft_that_reads_them_there_are_none() -> None:
    engine = engine_of("huggingface", Recycling())
    engine.generate(PROMPT, max_new_tokens=4)
    plain = Engine(engine.target, None, None)
    assert all(piece.cycle.successors is None for piece in plain.stream(PROMPT, max_new_tokens=4))


@pytest.mark.parametrize("mixed", [True, False], ids=["beside copies", "alone"])
@pytest.mark.parametrize("rule", ["auto", "eagle"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "drawn"])
def test_beside_copies_a_greedy_answer_under_auto_takes_no_pass(
    options: dict[str, Any], rule: str, mixed: bool
) -> None:
    """A pass brings no other tokens; but of drawn ones it knows the noise, and other rules ask for passes alone."""
    target = ToyTarget(Tables(6, 3, concentration=0.2))
    draft = Lookup(Recycling()) if mixed else Recycling()
    assert draft.about.passes is not mixed
    plain, engine = Engine(target, None, None), Engine(target, draft, policy_for(rule))
    found = engine.generate([1, 2, 0], max_new_tokens=60, **options)
    assert found.token_ids == plain.generate([1, 2, 0], max_new_tokens=60, **options).token_ids
    assert found.stats.num_spec_tokens > 0
    assert (found.stats.num_draft_passes == 0) is (mixed and rule == "auto" and not options)


def test_beside_a_draft_with_passes_it_leaves_them() -> None:
    assert Lookup(ToyDrafter(Tables(6)), Recycling()).about.passes
