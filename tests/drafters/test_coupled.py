"""Drafts that know the noise of the draws: they guess draws, and change none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specengine import Engine, ops
from specengine.drafters import _wrappers
from specengine.drafters._wrappers import MEAN, Coupled
from specengine.errors import InputError
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies import make
from specengine.request.sampling import signed
from tests.drafters.test_free import Silent
from tests.examples import examples
from tests.lossless.engines import engines, prompt_of
from tests.toy import (
    LetterTokenizer,
    Tables,
    ToyDrafter,
    ToyTarget,
    keyed_gumbel,
    near_copy,
    tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def coupled(drafter: Any, seed: int, scale: float, length: int) -> Coupled:
    return Coupled(drafter, torch.tensor([signed(seed)]), torch.tensor([scale]), lambda: length)


@given(
    seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**40), size=st.integers(1, 3000)
)
@examples(40)
def test_it_is_the_noise_of_the_draw(seed: int, position: int, size: int) -> None:
    """In float32, so that near-ties may fall otherwise; in columns of any order."""
    scores = torch.randn(1, size, generator=torch.Generator().manual_seed(size)) * 3
    key, at, one = torch.tensor([signed(seed)]), torch.tensor([position]), torch.ones(1)
    sums = ops.couple(scores, None, at, key, one)[0]
    drawn = ops.keyed_gumbel_argmax(scores[0], seed, position)
    assert sums[drawn] >= sums.max() - 1e-3
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        ops.couple(scores[:, order], order, at, key, one)[0], sums[order], rtol=0, atol=0
    )


def test_a_position_may_leave_the_memory_of_the_noise_and_come_again() -> None:
    logits, key, one = torch.zeros(1, 900), torch.tensor([5]), torch.ones(1)
    fresh = [
        ops.couple(logits[:, : 300 + 9 * n], None, torch.tensor([n]), key, one) for n in range(50)
    ]
    for n in reversed(range(50)):
        again = ops.couple(logits, None, torch.tensor([n]), key, one)
        assert torch.equal(again[:, : 300 + 9 * n], fresh[n])
    assert not torch.equal(
        ops.couple(logits, None, torch.tensor([0]), key + 1, one)[:, :300], fresh[0]
    )


def test_a_draft_that_is_the_target_guesses_every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of the noise one chain is always accepted whole; with none, seldom, and with a part, in between."""
    tables = Tables(12, 3, concentration=1.0)
    lengths = []
    for share in (1.0, _wrappers.NOISE, 0.0):
        monkeypatch.setattr(_wrappers, "NOISE", share)
        engine = Engine(
            ToyTarget(tables), ToyDrafter(tables), make("chain", length=4), LetterTokenizer()
        )
        given = {"max_new_tokens": 200, "temperature": 0.9, "seed": 5}
        found = engine.generate([1, 2, 3], **given, coupled=share > 0)
        lengths.append(found.stats.num_generated_tokens / found.stats.num_spec_steps)
    assert lengths[0] == 5.0 > lengths[1] > lengths[2] + 1
    assert lengths[2] < 3.0


@pytest.mark.sliced(3)
@pytest.mark.parametrize("draft", ["toy", "normalized", "columns"])
@pytest.mark.parametrize("policy", ["eagle", "talon", "salf"])
def test_an_answer_is_the_same_whether_the_draft_knows_the_noise(policy: str, draft: str) -> None:
    world = {"vocabulary": 9, "seed": 4, "concentration": 0.7, "share": 0.6, "exact": False}
    engine, plain = engines(world, policy, draft)
    cycles = {}
    for knows in (True, False):
        cycles[knows] = 0
        for seed in range(6):
            options = {"max_new_tokens": 40, "temperature": 1.0, "seed": seed, "coupled": knows}
            found = engine.generate(prompt_of(world), **options)
            assert found.token_ids == plain.generate(prompt_of(world), **options).token_ids
            cycles[knows] += found.stats.num_spec_steps
    assert cycles[True] < cycles[False]


def test_a_smaller_model_and_its_copies_know_the_noise() -> None:
    model = tiny(initializer_range=0.3)
    ways = {
        knows: Engine.from_pretrained(model, near_copy(), "eagle", lookup=True)
        for knows in (True, False)
    }
    plain = Engine.from_pretrained(model, policy="plain")
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    lengths = {True: 0, False: 0}
    for seed in range(4):
        for knows, engine in ways.items():
            given = {"max_new_tokens": 24, "temperature": 1.0, "seed": seed, "top_k": 30}
            found = engine.generate(prompt, **given, coupled=knows)
            assert found.token_ids == plain.generate(prompt, **given).token_ids
            lengths[knows] += found.stats.num_spec_steps
    assert lengths[True] < lengths[False]


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_a_value_that_is_no_choice_is_refused(wrong: Any) -> None:
    engine = Engine(ToyTarget(Tables(9, 1)), None, None, LetterTokenizer())
    with pytest.raises(InputError, match=r"^coupled: got .*, accepted True or False"):
        engine.generate([1, 2], max_new_tokens=2, temperature=1.0, coupled=wrong)


# ---------------------------------------------------------------------------------------------------- probabilities


class Given(Silent):
    """A draft of one row that says what it is given."""

    def __init__(self, logits: Tensor, *, normalized: bool) -> None:
        self.logits, self.normalized = logits, normalized

    def root(self, tree: TokenTree) -> Step:
        return Step(self.logits, None, self.normalized)


def noise_of(count: int) -> Tensor:
    return torch.from_numpy(keyed_gumbel(np.array([9], dtype=np.uint64), 30, count))[0].float()


def test_what_a_row_leaves_out_counts_as_one_token_of_mean_noise() -> None:
    shares = torch.tensor([[0.5, 0.0, 0.2, 0.1]])
    row = (
        coupled(Given(shares.log(), normalized=True), 9, 0.8, 30).root(TokenTree.root(1)).logits[0]
    )
    noise = noise_of(4)
    parts = shares[0] * (0.8 * noise).exp()
    torch.testing.assert_close(
        row.exp(), parts / (parts.sum() + 0.2 * math.exp(0.8 * MEAN)), rtol=1e-4, atol=1e-6
    )
    logits = torch.randn(1, 6)
    whole = coupled(Given(logits, normalized=False), 9, 0.8, 30).root(TokenTree.root(1))
    expected = logits[0] + 0.8 * noise_of(6)
    torch.testing.assert_close(whole.logits[0], expected)
    assert not whole.normalized


def test_chances_are_those_of_being_drawn() -> None:
    """Where the draft is off by errors like those that its temperature was fitted to, stated chances come true."""
    generator = torch.Generator().manual_seed(0)
    size, texts, error, heat = 6, 20_000, 0.7, 1.2
    draft = torch.randn(texts, size, generator=generator) * 1.5
    uniform = torch.rand(texts, size, generator=generator, dtype=torch.float64)
    target = draft - error * torch.log(-torch.log(uniform)).float()
    positions, key = torch.arange(texts), torch.tensor([11])
    drawn = ops.choose_tokens(target, positions, key, torch.tensor([heat]))
    stated = ops.couple(draft / error, None, positions, key, torch.tensor([heat / error])).softmax(
        1
    )
    sure, best = stated.max(1)
    hits = (best == drawn).float()
    for low in (0.3, 0.5, 0.7, 0.9):
        chosen = (sure >= low) & (sure < low + 0.2)
        count = int(chosen.sum())
        assert count > 300
        assert float(hits[chosen].mean()) == pytest.approx(
            float(sure[chosen].mean()), abs=4 * 0.5 / count**0.5
        )
    unaware = (draft / heat).softmax(1).max(1).values.mean()
    assert hits.mean() > unaware + 0.1
