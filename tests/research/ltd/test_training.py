"""LTD's training: seeds, resuming, the bandit, what each reward learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.save_util import load_from_zip_file

from research.ltd import training as training
from research.ltd.candidates import CandidateTrees
from research.ltd.curve import plot
from research.ltd.grounds import LiveGround, LoggedGround, speed_of
from research.ltd.outcomes import split
from research.ltd.training import read_log, train_policy
from specengine import policies
from specengine.costs import PassCosts
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.policies import _ltd
from tests.research.ltd.engines import COSTS, OPTIONS, PROMPTS, SHAPE, TARGET, engine
from tests.toy import ToyTarget

pytestmark = pytest.mark.usefixtures("one_thread")


def weights(file: Path) -> dict[str, torch.Tensor]:
    return dict(_ltd.load(str(file)).networks.state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def figures(folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in entry.items() if key != "seconds"}
        for entry in read_log(folder)
    ]


@pytest.mark.slow
def test_a_training_from_end_to_end(tmp_path: Path, ground: LoggedGround) -> None:
    told: list[str] = []
    file = train_policy(ground, tmp_path, OPTIONS, progress=told.append)
    trained = _ltd.load(str(file))
    assert trained.networks.shape == SHAPE
    assert [pair["stage"] for pair in trained.facts["pairs"]] == [1, 2, 3, 4]
    best = max(trained.facts["pairs"], key=lambda pair: pair["speed"])
    assert trained.facts["kept"] == best["stage"]
    assert best["speed"] == pytest.approx(speed_of(ground.held, trained.networks).speed)
    assert trained.facts["ground"]["costs"]["name"] == "toy"
    stages = [(entry["stage"], entry["which"]) for entry in read_log(tmp_path)]
    assert list(dict.fromkeys(stages)) == [
        (0, "size"),
        (1, "depth"),
        (2, "size"),
        (3, "depth"),
        (4, "size"),
    ]
    assert len(told) == 5 * 3 + 4
    assert not list(tmp_path.rglob(".*")), "no partial file stays"
    assert plot(read_log(tmp_path), tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")
    draft, policy = engine().drafter, policies.make("ltd", networks=str(file))
    answer = Engine(ToyTarget(TARGET), draft, policy).generate([1, 2], max_new_tokens=20).token_ids
    assert (
        answer
        == Engine(ToyTarget(TARGET), None, None).generate([1, 2], max_new_tokens=20).token_ids
    )


@pytest.mark.slow
def test_the_same_seed_gives_the_same_networks(tmp_path: Path, ground: LoggedGround) -> None:
    files = [train_policy(ground, tmp_path / name, OPTIONS) for name in "ab"]
    assert same(*map(weights, files))
    assert figures(tmp_path / "a") == figures(tmp_path / "b")
    other = train_policy(
        replace(ground, options=replace(OPTIONS, seed=1)), tmp_path / "c", replace(OPTIONS, seed=1)
    )
    assert not same(weights(files[0]), weights(other))


class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_training_goes_on_to_the_same_networks(
    tmp_path: Path, ground: LoggedGround
) -> None:
    whole = train_policy(ground, tmp_path / "whole", OPTIONS)
    for lines in (1, 4, 7):
        countdown = iter([False] * (lines - 1) + [True])

        def stop(line: str, countdown: Iterator[bool] = countdown) -> None:
            if next(countdown):
                raise Interrupted

        folder = tmp_path / str(lines)
        with pytest.raises(Interrupted):
            train_policy(ground, folder, OPTIONS, progress=stop)
        assert same(weights(train_policy(ground, folder, OPTIONS)), weights(whole))
        assert figures(folder)[-1] == figures(tmp_path / "whole")[-1]
    with pytest.raises(
        InputError, match=r"entropy: the training in .* was begun with 0.01, got 0.5"
    ):
        train_policy(ground, tmp_path / "whole", replace(OPTIONS, entropy=0.5))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "which"), [(0, "size"), (1, "depth")])
def test_a_discount_changes_nothing_for_a_bandit(
    tmp_path: Path, ground: LoggedGround, stage: int, which: str
) -> None:
    """No gradient of the size network, whose episodes are one step, hangs on gamma; the depth network's do."""
    found = []
    for gamma in (0.0, 0.99):
        options = replace(OPTIONS, again=(), **{f"{which}_gamma": gamma})
        train_policy(replace(ground, options=options), tmp_path / str(gamma), options)
        latest = tmp_path / str(gamma) / f"stage-{stage}-{which}" / training.LATEST
        found.append(load_from_zip_file(latest, device="cpu", load_data=False)[1]["policy"])
    assert same(*found) == (which == "size")


@pytest.mark.sliced(1)
@pytest.mark.parametrize("kind", ["table", "accept", "time"])
def test_each_reward_is_learnt(tmp_path: Path, trees: CandidateTrees, kind: Any) -> None:
    """Verification is dear here: time wants the least, accept the most, throughput what pays."""
    costs = PassCosts("dear", {1: 1.0, 10: 2.0}, {1: 0.0})
    often = {
        "size_steps": 3072,
        "rollout": 256,
        "minibatch": 64,
        "epochs": 8,
        "learning_rate": 3e-3,
        "again": (),
    }
    options = replace(OPTIONS, reward=kind, entropy=0.0, **often)
    ground = LoggedGround(*split([trees], SHAPE, costs, 0.2), options)
    networks = _ltd.load(str(train_policy(ground, tmp_path, options))).networks
    chosen = ground.learnt.sizes_by(networks, ground.learnt.all_trees(2))
    if kind == "time":
        assert (chosen == 2).mean() > 0.95
    elif kind == "accept":
        assert chosen.mean() > 6
    rewards = [
        entry["reward"] for entry in read_log(tmp_path) if entry["stage"] == 0 and "reward" in entry
    ]
    assert np.mean(rewards[-3:]) > rewards[0]


@pytest.mark.slow
@pytest.mark.parametrize("costs", [COSTS, None])
def test_live_training(tmp_path: Path, costs: PassCosts | None) -> None:
    """The same loop around the running engine; under a table the seed decides everything."""
    options = replace(
        OPTIONS, environments=1, again=("size",), reward="table" if costs else "wallclock"
    )
    found = []
    for name in "ab" if costs else "a":
        live = LiveGround(engine(), PROMPTS[:-2], PROMPTS[-2:], costs, options)
        found.append(weights(train_policy(live, tmp_path / name, options)))
        assert live.facts()["prompts"] == len(PROMPTS) - 2
    assert same(found[0], found[-1])
    assert all(
        entry["validation"]["speed"] > 0
        for entry in read_log(tmp_path / "a")
        if "validation" in entry
    )
