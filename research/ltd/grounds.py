"""Training environments and validation of Learning to Draft's networks: logged trees, or the running engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.costs_record import costs_record
from research.ltd.environments import (
    WALLCLOCK_UNIT,
    LiveEnvironment,
    LoggedEnvironment,
    cycle_facts,
)
from research.ltd.options import PolicyOptions, Stage
from research.ltd.outcomes import Outcomes, Speed
from research.ltd.steered import SteeredEngine, decision_seconds, steered_policy
from specengine.costs import PassCosts
from specengine.engine import Engine
from specengine.policies._ltd import Networks
from specengine.policies.ltd import Ltd
from specengine.records import Cycle


class Ground(Protocol):
    def environment(self, which: Stage, other: Networks | int | None, networks: Networks) -> Any:
        """Return the environment in which network `which` learns. other: the other's choices; None: random."""

    def validate(self, networks: Networks, depth: int | None, size: int | None) -> Speed:
        """Return the networks' speed on held-back trees; a depth or size replaces a network."""

    def facts(self) -> dict[str, Any]:
        """Return facts for the metadata of the networks."""


@dataclass(frozen=True)
class LoggedGround:
    """Logged trees under a cost table. held: the held-back trees."""

    learnt: Outcomes
    held: Outcomes
    options: PolicyOptions

    def environment(
        self, which: Stage, other: Networks | int | None, networks: Networks
    ) -> LoggedEnvironment:
        return LoggedEnvironment(
            self.learnt, which, self.options.reward, other, count=self.options.environments
        )

    def validate(self, networks: Networks, depth: int | None, size: int | None) -> Speed:
        return speed_of(self.held, networks, depth, size)

    def facts(self) -> dict[str, Any]:
        costs = costs_record(self.learnt.costs)
        return {"trees": len(self.learnt), "held_back_trees": len(self.held), "costs": costs}


def speed_of(
    outcomes: Outcomes, networks: Networks, depth: int | None = None, size: int | None = None
) -> Speed:
    """Return the speed of the networks at all of these trees; a depth or size replaces a network."""
    depths = outcomes.depths_by(networks) if depth is None else outcomes.all_trees(depth)
    return outcomes.speed(depths, outcomes.sizes_by(networks, depths) if size is None else size)


@dataclass(frozen=True)
class LiveGround:
    """The running engine. Without a cost table, time is wall-clock time."""

    engine: Engine
    learnt: Sequence[list[int]]
    held: Sequence[list[int]]
    costs: PassCosts | None
    options: PolicyOptions

    def environment(
        self, which: Stage, other: Networks | int | None, networks: Networks
    ) -> LiveEnvironment:
        options, shape = self.options, self.options.shape
        own = decision_seconds(networks, which, self.engine.target.device)

        def make(seed: int) -> SteeredEngine:
            return SteeredEngine(
                self.engine,
                self.learnt,
                shape,
                which,
                other,
                length=options.length,
                seed=seed,
                decision_seconds=own,
            )

        return LiveEnvironment(make, shape, which, options.reward, self.costs)

    def validate(self, networks: Networks, depth: int | None, size: int | None) -> Speed:
        policy = steered_policy(self.options.shape, networks, depth, size)
        length = self.options.length
        cycles = [
            cycle
            for prompt in self.held
            for cycle in live_cycles(self.engine, policy, prompt, length)
        ]
        tokens = sum(len(cycle.tokens) for cycle in cycles)
        passes, verified = (
            sum(int(cycle.tree.passes) for cycle in cycles),
            sum(len(cycle.tree) for cycle in cycles),
        )
        plain = WALLCLOCK_UNIT if self.costs is None else self.costs.plain
        speed = tokens * plain / sum(self._cost(cycle) for cycle in cycles)
        return Speed(speed, tokens / len(cycles), passes / len(cycles), verified / len(cycles))

    def _cost(self, cycle: Cycle) -> float:
        if self.costs is None:
            return cycle.seconds.total
        facts = cycle_facts(cycle)
        return self.costs.cycle(facts["verified"], facts["widths"])

    def facts(self) -> dict[str, Any]:
        costs = "wall clock" if self.costs is None else costs_record(self.costs)
        return {"prompts": len(self.learnt), "held_back_prompts": len(self.held), "costs": costs}


def live_cycles(
    engine: Engine, policy: Ltd, prompt: list[int], length: int, **options: Any
) -> list[Cycle]:
    """Return the cycles of one answer, which is greedy unless options say otherwise."""
    serving = Engine(engine.target, engine.drafter, policy, engine.tokenizer)
    return list(serving.answer(prompt, **{"max_new_tokens": length, "temperature": 0.0, **options}))
