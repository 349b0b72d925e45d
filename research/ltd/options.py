"""Options of training Learning to Draft's networks, and recipes."""

# ruff: noqa: RUF009 (option returns dataclasses.field)

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from specengine.errors import option, require, require_known, require_minimum

if TYPE_CHECKING:
    from specengine.policies._ltd import LtdShape

RewardName = Literal["table", "wallclock", "accept", "time"]
Activation = Literal["relu", "tanh"]  # the keys of policies._ltd.ACTIVATIONS
Stage = Literal["size", "depth"]


@dataclass(frozen=True)
class PolicyOptions:
    """Options of training a pair of networks."""

    width: int = option(
        default=10,
        help="children per node of the beam, 1 or more",
    )
    expansions: int = option(
        default=12,
        help="levels grown below the first, at most, 1 or more",
    )
    sizes: tuple[int, ...] = option(
        default=tuple(range(20, 241, 20)),
        help="numbers of candidates that the size network chooses from, ascending, above 0, without the root",
    )
    least: int = option(
        default=1,
        help="expansions before the first decision of the depth network, 0 or more",
    )
    check_every: int = option(
        default=1,
        help="expansions between its decisions, 1 or more",
    )
    pad: float = option(
        default=-20.0,
        help="what stands in an observation for candidates that there are not, 0 or less; log-probabilities below "
        "a negative one count as that",
    )
    sees: tuple[str, ...] = option(
        default=("length", "depth"),
        help="length, depth: facts that the networks see besides the candidates, for the ablation of Table 6",
    )
    reward: RewardName = option(
        default="table",
        help="table or wallclock: throughput, under a cost table or as it is measured; accept, time: the ablations",
    )
    fixed_depth: int = option(
        default=8,
        help="expansions that stand for the depth network where size is validated alone, 0 to expansions",
    )
    fixed_size: int = option(
        default=60,
        help="candidates that stand for the size network where depth is trained and validated alone, 1 or more",
    )
    size_steps: int = option(
        default=100_000,
        help="training decisions of the size network, 0 or more",
    )
    depth_steps: int = option(
        default=1_000_000,
        help="training decisions of the depth network, 0 or more",
    )
    again: tuple[str, ...] = option(
        default=("size", "depth", "size"),
        help="size, depth: networks to train again, in turn, each with the current other network",
    )
    again_share: float = option(
        default=1.0,
        help="share of the steps in each of these, above 0",
    )
    rollout: int = option(
        default=2048,
        help="decisions between updates, 2 or more; a multiple of environments",
    )
    minibatch: int = option(
        default=256,
        help="decisions per optimiser step, 2 or more; a divisor of rollout",
    )
    epochs: int = option(
        default=20,
        help="passes over a rollout, 1 or more",
    )
    learning_rate: float = option(
        default=1e-3,
        help="peak learning rate, above 0; falls to 0 linearly",
    )
    warmup: float = option(
        default=0.01,
        help="share of the steps in which the learning rate rises, 0 to 1",
    )
    entropy: float = option(
        default=0.01,
        help="weight of the policy's entropy in the loss, 0 to 1",
    )
    target_kl: float = option(
        default=0.02,
        help="divergence that ends an update early where a network is trained again, 0 to 1; 0: none does",
    )
    clip: float = option(
        default=0.2,
        help="limit of the probability ratio in PPO, above 0",
    )
    size_gamma: float = option(
        default=0.9,
        help="discount of the size network's rewards, 0 to 1",
    )
    depth_gamma: float = option(
        default=0.999,
        help="discount of the depth network's rewards, 0 to 1",
    )
    hidden_size: tuple[int, ...] = option(
        default=(1024, 256),
        help="units of the size network's hidden layers, 1 or more each",
    )
    hidden_depth: tuple[int, ...] = option(
        default=(1024,),
        help="units of the depth network's hidden layers, 1 or more each",
    )
    hidden_critic: tuple[int, ...] = option(
        default=(1024, 256),
        help="units of the critics' hidden layers, 1 or more each",
    )
    activation: Activation = option(
        default="relu",
        help="relu or tanh",
    )
    prompts: int = option(
        default=0,
        help="maximum number of questions from a text, evenly spaced, 0 or more; 0: all",
    )
    held_back: float = option(
        default=0.2,
        help="share of the answers that nothing is learnt from, 0 to 1; the checkpoint that is fastest on them is kept",
    )
    validate_every: int = option(
        default=5,
        help="rollouts between validations, 1 or more",
    )
    environments: int = option(
        default=64,
        help="number of parallel environments on logged trees, 1 or more",
    )
    length: int = option(
        default=96,
        help="tokens per answer if the engine runs, 4 or more",
    )
    seed: int = option(
        default=0,
        help="random seed, 0 or more",
    )

    def __post_init__(self) -> None:
        require_minimum(
            self, size_steps=0, depth_steps=0, rollout=2, minibatch=2, epochs=1, validate_every=1
        )
        require_minimum(
            self, environments=1, length=4, seed=0, prompts=0, fixed_size=1, fixed_depth=0
        )
        for name in ("again_share", "learning_rate", "clip"):
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value > 0, "above 0")
        for name in ("warmup", "entropy", "target_kl", "held_back", "size_gamma", "depth_gamma"):
            self._require(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        for name in ("hidden_size", "hidden_depth", "hidden_critic"):
            self._require(name, all(units >= 1 for units in getattr(self, name)), "1 or more each")
        self._require("again", set(self.again) <= {"size", "depth"}, "size, depth")
        self._require("activation", self.activation in get_args(Activation), "relu, tanh")
        self._require(
            "rollout",
            self.rollout % self.environments == 0,
            f"a multiple of environments {self.environments}",
        )
        self._require("minibatch", self.rollout % self.minibatch == 0, "a divisor of rollout")
        self._require(
            "fixed_depth",
            self.fixed_depth <= self.shape.expansions,
            f"at most {self.shape.expansions}",
        )

    def _require(self, name: str, holds: bool, accepted: str) -> None:
        require(name, getattr(self, name), accepted, holds)

    @property
    def shape(self) -> LtdShape:
        from specengine.policies._ltd import LtdShape

        # logged trees hold no parents
        names = {field.name for field in fields(LtdShape)} - {"best_first"}
        return LtdShape(**{name: getattr(self, name) for name in names})

    @property
    def stages(self) -> list[Stage]:
        """Return the networks in the order of training: each alone, then in turn."""
        return ["size", "depth", *self.again]  # type: ignore[list-item]

    def steps(self, number: int) -> int:
        """Return the number of decisions of stage `number`."""
        steps = self.size_steps if self.stages[number] == "size" else self.depth_steps
        return steps if number < 2 else round(self.again_share * steps)


class PolicyRecipe(NamedTuple):
    """A named recipe: its purpose, and changes to the defaults of PolicyOptions."""

    about: str
    changes: Mapping[str, Any]

    @property
    def options(self) -> PolicyOptions:
        return PolicyOptions(**self.changes)


_SHORT: dict[str, Any] = {
    "size_steps": 80_000,
    "depth_steps": 120_000,
    "minibatch": 512,
    "epochs": 6,
    "learning_rate": 5e-4,
    "hidden_size": (256, 64),
    "hidden_depth": (128,),
    "hidden_critic": (256, 64),
}
RECIPES = {
    "paper": PolicyRecipe("the paper's trees and hyperparameters", {}),
    "released": PolicyRecipe(
        "the 24 sizes and the hyperparameters of the paper's code",
        {
            "sizes": tuple(range(10, 241, 10)), "pad": 0.0, "activation": "tanh", "depth_steps": 100_000,
            "rollout": 128, "minibatch": 64, "epochs": 1, "learning_rate": 3e-4, "entropy": 0.0, "size_gamma": 0.99,
            "depth_gamma": 0.99,
        },
    ),
    "short": PolicyRecipe("the paper's trees, smaller networks, fewer steps", _SHORT),
    "cpu": PolicyRecipe(
        "as short, on trees of width 4 with 2 to 47 candidates, which with the root fill blocks of 16 rows",
        {
            "width": 4, "expansions": 6, "sizes": (2, 3, 4, 6, 8, 10, 12, 15, 20, 24, 31, 47), "least": 0,
            "fixed_depth": 2, "fixed_size": 11, **_SHORT,
        },
    ),
}  # fmt: skip


def find_recipe(name: str) -> PolicyRecipe:
    return require_known("recipe", name, RECIPES)
