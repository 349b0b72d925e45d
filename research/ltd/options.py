"""Options of training Learning to Draft's networks, and recipes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from specengine.errors import require, require_known, require_minimum

if TYPE_CHECKING:
    from specengine.policies._ltd import Shape

RewardName = Literal["table", "wallclock", "accept", "time"]
Activation = Literal["relu", "tanh"]  # the keys of policies._ltd.ACTIVATIONS
Stage = Literal["size", "depth"]


@dataclass(frozen=True)
class PolicyOptions:
    """Options of training a pair of networks.

    width           children per node of the beam, 1 or more
    expansions      levels grown below the first, at most, 1 or more
    sizes           numbers of candidates that the size network chooses from, ascending, above 0, without the root
    least           expansions before the first decision of the depth network, 0 or more
    check_every     expansions between its decisions, 1 or more
    pad             what stands in an observation for candidates that there are not, 0 or less; log-probabilities below
                    a negative one count as that
    reward          table or wallclock: throughput, under a cost table or as it is measured; accept, time: the
                    ablations
    fixed_depth     expansions that stand for the depth network where size is validated alone, 0 to expansions
    fixed_size      candidates that stand for the size network where depth is trained and validated alone, 1 or more
    size_steps      training decisions of the size network, 0 or more
    depth_steps     training decisions of the depth network, 0 or more
    again           size, depth: networks to train again, in turn, each with the current other network
    again_share     share of the steps in each of these, above 0
    rollout         decisions between updates, 2 or more; a multiple of environments
    minibatch       decisions per optimiser step, 2 or more; a divisor of rollout
    epochs          passes over a rollout, 1 or more
    learning_rate   peak learning rate, above 0; falls to 0 linearly
    warmup          share of the steps in which the learning rate rises, 0 to 1
    entropy         weight of the policy's entropy in the loss, 0 to 1
    target_kl       divergence that ends an update early where a network is trained again, 0 to 1; 0: none does
    clip            limit of the probability ratio in PPO, above 0
    size_gamma      discount of the size network's rewards, 0 to 1
    depth_gamma     discount of the depth network's rewards, 0 to 1
    hidden_size     units of the size network's hidden layers, 1 or more each
    hidden_depth    units of the depth network's hidden layers, 1 or more each
    hidden_critic   units of the critics' hidden layers, 1 or more each
    activation      relu or tanh
    prompts         maximum number of questions from a text, evenly spaced, 0 or more; 0: all
    held_back       share of the answers that nothing is learnt from, 0 to 1; the checkpoint that is fastest on them is
                    kept
    validate_every  rollouts between validations, 1 or more
    environments    number of parallel environments on logged trees, 1 or more
    length          tokens per answer if the engine runs, 4 or more
    seed            random seed, 0 or more
    """

    width: int = 10
    expansions: int = 12
    sizes: tuple[int, ...] = tuple(range(20, 241, 20))
    least: int = 1
    check_every: int = 1
    pad: float = -20.0
    reward: RewardName = "table"
    fixed_depth: int = 8
    fixed_size: int = 60
    size_steps: int = 100_000
    depth_steps: int = 1_000_000
    again: tuple[str, ...] = ("size", "depth", "size")
    again_share: float = 1.0
    rollout: int = 2048
    minibatch: int = 256
    epochs: int = 20
    learning_rate: float = 1e-3
    warmup: float = 0.01
    entropy: float = 0.01
    target_kl: float = 0.02
    clip: float = 0.2
    size_gamma: float = 0.9
    depth_gamma: float = 0.999
    hidden_size: tuple[int, ...] = (1024, 256)
    hidden_depth: tuple[int, ...] = (1024,)
    hidden_critic: tuple[int, ...] = (1024, 256)
    activation: Activation = "relu"
    prompts: int = 0
    held_back: float = 0.2
    validate_every: int = 5
    environments: int = 64
    length: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        require_minimum(self, size_steps=0, depth_steps=0, rollout=2, minibatch=2, epochs=1, validate_every=1)
        require_minimum(self, environments=1, length=4, seed=0, prompts=0, fixed_size=1, fixed_depth=0)
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
            "rollout", self.rollout % self.environments == 0, f"a multiple of environments {self.environments}"
        )
        self._require("minibatch", self.rollout % self.minibatch == 0, "a divisor of rollout")
        self._require("fixed_depth", self.fixed_depth <= self.shape.expansions, f"at most {self.shape.expansions}")

    def _require(self, name: str, holds: bool, accepted: str) -> None:
        require(name, getattr(self, name), accepted, holds)

    @property
    def shape(self) -> Shape:
        from specengine.policies._ltd import Shape

        return Shape(**{field.name: getattr(self, field.name) for field in fields(Shape)})

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
