"""A toy engine to watch, with its prompts and costs, and options of a training that takes seconds."""

from __future__ import annotations

from typing import Any

from research.ltd.candidates import CandidateOptions
from research.ltd.environments import LiveEnvironment
from research.ltd.options import PolicyOptions
from research.ltd.steered import SteeredEngine
from specengine import policies
from specengine.costs import PassCosts
from specengine.engine import Engine
from specengine.policies._ltd import LtdShape
from tests.toy import LetterTokenizer, Tables, ToyDrafter, ToyTarget

TARGET = Tables(12, 1, concentration=0.2)
SHAPE = LtdShape(width=3, expansions=4, sizes=(2, 5, 9))
COSTS = PassCosts("toy", {1: 30.0, 10: 40.0}, {1: 3.0, 3: 2.0})
PROMPTS = [[i, j, 3] for i in range(4) for j in range(2)]
LOGGING = CandidateOptions(length=40, width=3, expansions=4, verified=5)
OPTIONS = PolicyOptions(
    width=3, expansions=4, sizes=(2, 5, 9), fixed_depth=2, fixed_size=5, size_steps=128, depth_steps=128, rollout=64,
    minibatch=32, epochs=2, hidden_size=(8,), hidden_depth=(8,), hidden_critic=(8,), environments=8, validate_every=1,
    length=24,
)  # fmt: skip


def engine(**kind: Any) -> Engine:
    draft = ToyDrafter(Tables(12, 2, concentration=0.2, like=TARGET, share=0.7), **kind)
    return Engine(ToyTarget(TARGET), draft, policies.make("chain"), LetterTokenizer())


def environment(
    which: Any, costs: PassCosts | None, other: Any = None, **kind: Any
) -> LiveEnvironment:
    def make(seed: int) -> SteeredEngine:
        return SteeredEngine(engine(**kind), PROMPTS, SHAPE, which, other, length=24, seed=seed)

    return LiveEnvironment(make, SHAPE, which, "table" if costs else "wallclock", costs)
