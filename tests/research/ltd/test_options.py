"""Options, recipes and the log of LTD's training."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from research.ltd import training as training
from research.ltd.grounds import LoggedGround
from research.ltd.options import RECIPES, Activation, PolicyOptions, find_recipe
from research.ltd.training import read_log, train_policy
from specengine.errors import InputError, MissingExtraError, declared_in
from specengine.policies._ltd import ACTIVATIONS, LtdShape
from tests.research.ltd.engines import OPTIONS

pytestmark = pytest.mark.usefixtures("one_thread")


def test_recipes() -> None:
    """Appendix A.3, and the released scripts."""
    paper = find_recipe("paper").options
    assert paper.shape == LtdShape()
    assert (paper.size_steps, paper.depth_steps, paper.rollout, paper.minibatch, paper.epochs) == (
        10**5,
        10**6,
        2048,
        256,
        20,
    )
    assert (paper.learning_rate, paper.entropy, paper.size_gamma, paper.depth_gamma) == (
        1e-3,
        0.01,
        0.9,
        0.999,
    )
    assert paper.stages == ["size", "depth", "size", "depth", "size"]
    released = find_recipe("released").options
    assert (len(released.sizes), released.pad, released.activation) == (24, 0.0, "tanh")
    assert all(recipe.about for recipe in RECIPES.values())
    with pytest.raises(InputError, match="recipe: got 'tpu', accepted paper, released, short, cpu"):
        find_recipe("tpu")


def test_every_option_says_what_it_means() -> None:
    assert all(declared.help for declared in declared_in(PolicyOptions).values())
    assert set(get_args(Activation)) == set(ACTIVATIONS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rollout": 100}, "rollout: got 100, accepted a multiple of environments 8"),
        ({"minibatch": 30}, "minibatch: got 30, accepted a divisor of rollout"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0, accepted above 0"),
        ({"warmup": 1.5}, "warmup: got 1.5, accepted 0 to 1"),
        ({"again": ("both",)}, "again: got .* accepted size, depth"),
        ({"fixed_depth": 5}, "fixed_depth: got 5, accepted at most 4"),
        ({"hidden_size": (0,)}, "hidden_size"),
        ({"activation": "gelu"}, "activation: got gelu, accepted relu, tanh"),
        ({"sizes": (3, 3)}, "sizes"),
        ({"epochs": 0}, "epochs: got 0"),
    ],
)
def test_options_out_of_range(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(OPTIONS, **wrong)


def test_a_missing_extra_is_named(
    tmp_path: Path, ground: LoggedGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "stable_baselines3":
            raise ModuleNotFoundError(
                "No module named 'stable_baselines3'", name="stable_baselines3"
            )
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        MissingExtraError,
        match=r"research.ltd: stable_baselines3 is not installed; it comes with: pip install -e '.*\[research\]'",
    ):
        train_policy(ground, tmp_path, OPTIONS)
    assert not (tmp_path / training.MANIFEST).exists()


def test_a_log_is_json_lines(tmp_path: Path) -> None:
    assert read_log(tmp_path) == []
    (tmp_path / training.LOG).write_text(json.dumps({"stage": 0}) + "\n")
    assert read_log(tmp_path) == [{"stage": 0}]
