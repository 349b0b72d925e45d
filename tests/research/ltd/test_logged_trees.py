"""Logged trees against the engine: outcomes, ranks, observations, resuming."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from research.drafting import draft_tree
from research.ltd.candidates import CandidateTrees, log_candidates
from research.ltd.grounds import live_cycles
from research.ltd.observations import depth_observation, size_observation
from research.ltd.outcomes import Outcomes, hold_back, path_ranks, split
from research.ltd.steered import steered_policy
from specengine import policies
from specengine.cycle import walk
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.policies._ltd import Networks
from specengine.records import Seconds
from tests.research.ltd.engines import COSTS, LOGGING, PROMPTS, SHAPE, TARGET, engine
from tests.toy import CPU, ToyTarget

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_logged_outcomes_are_those_of_the_engine(trees: CandidateTrees, logged: Outcomes) -> None:
    """At each logged position, every depth and size: tokens, nodes and passes of the beam that would have run there."""
    prompts = [PROMPTS[int(file.stem)] for file in trees.shards()]
    number = 0
    for prompt, answer in zip(prompts, trees.answers(), strict=True):
        tokens = (
            Engine(ToyTarget(TARGET), None, None)
            .generate(prompt, max_new_tokens=60, temperature=0.0)
            .token_ids
        )
        for tree in answer:
            context = [*prompt, *tokens[: tree.context - len(prompt)]]
            for expansions in (0, 1, 4):
                for size in (1, 5, 30):
                    draft = engine().drafter
                    assert draft is not None
                    draft.begin(context[:-1])
                    beam = policies.make("eagle", width=3, expansions=expansions, budget=size + 1)
                    made = draft_tree(context[-1], draft, beam, Seconds(), CPU).tree
                    following = [
                        int(TARGET.logits([*context, *made.path_tokens(n)]).argmax())
                        for n in range(made.size)
                    ]
                    _, committed = walk(made, following.__getitem__, lambda token: False)
                    at, deep, many = (np.array([value]) for value in (number, expansions, size))
                    assert logged.committed(at, deep, many).tolist() == [len(committed)]
                    cost = COSTS.cycle(made.size, [1, *[3] * (made.passes - 1)])
                    assert logged.cost(deep, many).tolist() == [pytest.approx(cost)]
            number += 1
    assert number == len(logged) > 40


def test_ranks_by_hand() -> None:
    """Five candidates, two levels; the path is candidate 1, then candidate 4; ties go to the earlier one."""
    scores, depths = np.array([-1.0, -2.0, -1.5, -2.0, -2.5]), np.array([1, 1, 2, 2, 2])
    ranks = path_ranks(scores, depths, np.array([1, 4]), 1)
    assert ranks[0].tolist()[0] == 1
    assert ranks[0].tolist()[1] > 1000, "not there yet"
    assert ranks[1].tolist() == [2, 4]


def test_observations_of_logged_trees_are_those_of_serving(
    trees: CandidateTrees, logged: Outcomes
) -> None:
    file = trees.shards()[0]
    prompt = PROMPTS[int(file.stem)]
    shown: list[Any] = []

    class Watching(Networks):
        def goes_on(self, observation: torch.Tensor, expansions: torch.Tensor) -> torch.Tensor:
            shown.append(("depth", int(expansions), observation))
            return expansions < 3

        def choose_size(self, observation: torch.Tensor) -> torch.Tensor:
            shown.append(("size", 3, observation))
            return torch.tensor([1])

    policy = steered_policy(SHAPE, Watching(SHAPE, {"depth": (4,), "size": (4,)}))
    live_cycles(engine(), policy, prompt, 3)
    for which, expansions, observation in shown[:4]:
        observe = depth_observation if which == "depth" else size_observation
        assert torch.equal(
            observation, observe(logged.laid[0], logged.contexts[0], expansions, SHAPE)
        )


def test_logging_goes_on_where_it_stopped_and_refuses_other_options(
    tmp_path: Path, trees: CandidateTrees
) -> None:
    log_candidates(engine(), PROMPTS[:2], tmp_path, LOGGING, name="toy")
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    assert len(before) == 2
    more = log_candidates(engine(), PROMPTS[:4], tmp_path, LOGGING, name="toy")
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    for found, expected in zip(more.answers(), trees.answers(), strict=False):
        assert all(
            torch.equal(a.scores, b.scores) and a.context == b.context
            for a, b in zip(found, expected, strict=True)
        )
    with pytest.raises(InputError, match=r"width: the candidates in .* begun with 3, got 4"):
        log_candidates(engine(), PROMPTS, tmp_path, replace(LOGGING, width=4), name="toy")
    (tmp_path / "00000.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match="is damaged"):
        list(CandidateTrees.open(tmp_path).answers())
    with pytest.raises(InputError, match="prompts: number 2 has fewer than 2 tokens"):
        log_candidates(engine(), [[1, 2], [1]], tmp_path / "short", LOGGING)
    with pytest.raises(InputError, match="draft: got none"):
        log_candidates(Engine(ToyTarget(TARGET), None, None), PROMPTS, tmp_path / "plain", LOGGING)


def test_sampled_answers_are_logged_by_their_seed(tmp_path: Path) -> None:
    sampled = replace(LOGGING, temperature=1.0, seed=5)
    first, again = (
        log_candidates(engine(), PROMPTS[:2], tmp_path / name, sampled) for name in "ab"
    )
    paths = [
        [tree.path.tolist() for answer in found.answers() for tree in answer]
        for found in (first, again)
    ]
    assert paths[0] == paths[1]
    other = log_candidates(engine(), PROMPTS[:2], tmp_path / "c", replace(sampled, seed=6))
    assert paths[0] != [tree.path.tolist() for answer in other.answers() for tree in answer]


def test_trees_that_are_too_small_are_refused(trees: CandidateTrees) -> None:
    answers = list(trees.answers())
    with pytest.raises(
        InputError, match=r"has 39 nodes, 48 are needed for width 3 and 5 expansions"
    ):
        Outcomes.of(answers, replace(SHAPE, expansions=5), COSTS)
    assert len(Outcomes.of(answers, replace(SHAPE, expansions=2), COSTS)) == sum(map(len, answers))
    with pytest.raises(InputError, match="no tree was logged"):
        Outcomes.of([[]], SHAPE, COSTS)
    with pytest.raises(InputError, match=r"held_back: 1.0 of 8 answers leaves none to learn from"):
        split([trees], SHAPE, COSTS, 1.0)


@given(st.integers(2, 300), st.floats(0, 0.49))
def test_what_is_held_back_is_spread_over_all_answers(total: int, share: float) -> None:
    learnt, held = hold_back(range(total), share)
    assert sorted(learnt + held) == list(range(total))
    assert len(held) == max(1, round(share * total))
    gaps = [b - a for a, b in pairwise(held)]
    assert not gaps or max(gaps) - min(gaps) <= 1
