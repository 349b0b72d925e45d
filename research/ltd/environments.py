"""Learning to Draft's decisions as environments: of the running engine, and of logged trees.

Needs the extra `research` (Gymnasium and Stable-Baselines3); see research.ltd.training.require_extra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv

from research.ltd.observations import depth_observation, size_observation
from research.ltd.options import RewardName, Stage
from research.ltd.outcomes import Array, Outcomes, reward
from research.ltd.steered import Question, SteeredEngine
from specengine.costs import PassCosts
from specengine.policies._ltd import GO_ON, LtdShape, Networks
from specengine.records import Cycle

WALLCLOCK_UNIT = 0.01  # seconds; the released code's reward is tokens / (100 seconds)


def spaces(shape: LtdShape, which: Stage) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Discrete]:
    inputs, outputs = shape.inputs[which], shape.outputs[which]
    return gymnasium.spaces.Box(-np.inf, np.inf, (inputs,), np.float32), gymnasium.spaces.Discrete(
        outputs
    )


class LiveEnvironment(gymnasium.Env[Array, Any]):
    """The serving engine. An episode is a cycle; its decisions are actions, and its end gives the reward.

    make   an SteeredEngine from a seed
    kind   what is rewarded; without `costs` the time is the wall clock's, in units of 10 ms, else the table's
    """

    def __init__(
        self,
        make: Callable[[int], SteeredEngine],
        shape: LtdShape,
        which: Stage,
        kind: RewardName,
        costs: PassCosts | None,
    ) -> None:
        self.observation_space, self.action_space = spaces(shape, which)
        self._make, self._kind, self._costs, self._seed = make, kind, costs, 0
        self._engine: SteeredEngine | None = None
        self._latest = np.zeros(shape.inputs[which], dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.close()
            self._seed = seed
        self._engine = self._engine or self._make(self._seed)
        found = self._engine.next()
        while not isinstance(found, Question):  # cycles without a decision
            found = self._engine.next()
        self._latest = found.observation.numpy()
        return self._latest, {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        assert self._engine is not None, "reset comes first"
        found = self._engine.next(int(action))
        if isinstance(found, Question):
            self._latest = found.observation.numpy()
            return self._latest, 0.0, False, False, {}
        facts = {**cycle_facts(found.cycle), "seconds": found.seconds}
        return self._latest, self.reward(facts), True, False, facts

    def reward(self, facts: dict[str, Any]) -> float:
        """Return the reward of a cycle with these facts, as `step` gives them."""
        cost, plain = facts["seconds"], WALLCLOCK_UNIT
        if self._costs is not None:
            cost, plain = self._costs.cycle(facts["verified"], facts["widths"]), self._costs.plain
        return float(reward(self._kind, facts["tokens"], cost, plain))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def cycle_facts(cycle: Cycle) -> dict[str, Any]:
    """Return the facts that a cost table needs: tokens committed, nodes verified, widths of the draft passes."""
    grown = cycle.grown
    assert grown is not None, "an engine records it"
    levels = torch.bincount(grown.depths, minlength=int(cycle.tree.passes)).tolist()
    parents = [
        len(grown.parents[grown.depths == depth].unique()) for depth in range(1, len(levels))
    ]
    return {
        "tokens": len(cycle.tokens),
        "verified": len(cycle.tree),
        "widths": (parents + [1] * int(cycle.tree.passes))[: int(cycle.tree.passes)],
    }


class LoggedEnvironment(VecEnv):
    """Many logged trees at a time, an episode each: cycle after cycle of an answer where all its positions were logged,
    else drawn at random.

    other  what decides in the other network's place: networks, a number, or None for random depths
    """

    def __init__(
        self,
        outcomes: Outcomes,
        which: Stage,
        kind: RewardName,
        other: Networks | int | None,
        *,
        count: int,
        seed: int = 0,
    ) -> None:
        super().__init__(count, *spaces(outcomes.shape, which))
        self._outcomes, self._which, self._kind = outcomes, which, kind
        self._sizes = np.array(outcomes.shape.sizes)
        self._other_depths, self._other_sizes = _others(outcomes, which, other)
        self._random = np.random.default_rng(seed)
        self._trees, self._expansions = (
            np.zeros(count, dtype=np.int64),
            np.zeros(count, dtype=np.int64),
        )
        self._actions = np.zeros(count, dtype=np.int64)

    def reset(self) -> Array:
        self._draw(np.arange(self.num_envs))
        return self._observe()

    def step_async(self, actions: Array) -> None:
        self._actions = np.asarray(actions)

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        done = self._advance() if self._which == "depth" else np.ones(self.num_envs, dtype=bool)
        ended = np.flatnonzero(done)
        rewards = np.zeros(self.num_envs, dtype=np.float32)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if len(ended):
            committed, rewards[ended] = self._rewards(ended)
            for place in ended:
                infos[place]["reward"] = float(rewards[place])
            self._draw(ended, committed)
        return self._observe(), rewards, done, infos

    def _advance(self) -> Array:
        """Take one decision about the depth; returns whether the growth is over."""
        shape, goes_on = self._outcomes.shape, self._actions == GO_ON
        self._expansions += goes_on
        while (
            silent := goes_on
            & ~_asked(shape, self._expansions)
            & (self._expansions < shape.expansions)
        ).any():
            self._expansions += silent
        return ~goes_on | (self._expansions >= shape.expansions)

    def _rewards(self, places: Array) -> tuple[Array, Array]:
        """Return tokens committed and rewards of the episodes that end."""
        trees, expansions = self._trees[places], self._expansions[places]
        own = self._which == "size"
        sizes = self._sizes[self._actions[places]] if own else self._other_sizes[trees, expansions]
        committed = self._outcomes.committed(trees, expansions, sizes)
        cost, plain = self._outcomes.cost(expansions, sizes), self._outcomes.costs.plain
        return committed, reward(self._kind, committed, cost, plain)

    def _draw(self, places: Array, committed: Array | None = None) -> None:
        """Draw new trees: those after the committed tokens if all positions were logged, else any."""
        shape, trees = (
            self._outcomes.shape,
            self._random.integers(len(self._outcomes), size=len(places)),
        )
        if committed is not None and self._outcomes.dense:
            following = self._outcomes.following(self._trees[places], committed)
            trees = np.where(following >= 0, following, trees)
        self._trees[places] = trees
        if self._which == "depth":
            first = next(count for count in range(shape.expansions) if shape.asks(count))
            self._expansions[places] = first
        elif self._other_depths is None:
            self._expansions[places] = self._random.integers(
                max(1, shape.least), shape.expansions + 1, len(places)
            )
        else:
            self._expansions[places] = self._other_depths[trees]

    def _observe(self) -> Array:
        outcomes, shape = self._outcomes, self._outcomes.shape
        seen = np.empty((self.num_envs, shape.inputs[self._which]), dtype=np.float32)
        observation = depth_observation if self._which == "depth" else size_observation
        for count in np.unique(self._expansions):
            at = np.flatnonzero(self._expansions == count)
            trees = self._trees[at]
            seen[at] = observation(
                outcomes.laid[trees], outcomes.contexts[trees], int(count), shape
            ).numpy()
        return seen

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        self._random = np.random.default_rng(seed)
        return [seed] * self.num_envs

    def close(self) -> None: ...

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("logged trees have no such attributes")

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        raise NotImplementedError("logged trees have no such methods")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def _asked(shape: LtdShape, expansions: Array) -> Array:
    return np.array([shape.asks(count) for count in range(shape.expansions + 1)])[expansions]


def _others(
    outcomes: Outcomes, which: Stage, other: Networks | int | None
) -> tuple[Array | None, Array]:
    """Return depths by tree (None: random), and sizes by tree and depth, that the other network decides."""
    trees, levels = len(outcomes), outcomes.shape.expansions + 1
    if not isinstance(other, Networks):
        depths = None if other is None or which == "depth" else np.full(trees, other)
        return depths, np.full((trees, levels), other or 0)
    if which == "size":
        return outcomes.depths_by(other), np.zeros((trees, levels), dtype=np.int64)
    sizes = [outcomes.sizes_by(other, np.full(trees, count)) for count in range(levels)]
    return None, np.stack(sizes, 1)
