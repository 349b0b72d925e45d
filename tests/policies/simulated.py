"""Answers of auto on a clock and costs of our own: true costs, and what a first table says of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from research.drafting import draft_tree
from specengine import policies
from specengine.costs import MEASURED, PassCosts, Points, interpolated
from specengine.cycle import Draft
from specengine.drafters import Drafter
from specengine.ops import Nodes
from specengine.ops.select import FREE, Step
from specengine.ops.tree import Free, TokenTree
from specengine.ops.worth import LEVELS
from specengine.policies.auto.auto import Auto
from specengine.records import Cycle, Outcome, Seconds
from tests.policies.lawful import Lawful, Rows, World
from tests.toy import CPU

UNIT = 0.01  # seconds of a pass of one row
# this project's default model on two cores with 512-bit integer products, by committed calibrations
QUIET: Points = {1: 1.0, 2: 1.1, 4: 1.29, 8: 1.42, 16: 2.47, 32: 4.78, 64: 9.0}
DRAFT: Points = {1: 0.12, 8: 0.2}
# kept tables that were seen, of the same model while other programs ran
SEEN: dict[str, Points] = {
    "8 rows 3.6, 16 rows 10.8": {1: 1.0, 2: 1.15, 4: 1.44, 8: 3.63, 16: 10.8, 32: 13.1, 64: 20.0},
    "4 rows 2.2, 8 rows 2.2": {1: 1.0, 2: 1.6, 4: 2.21, 8: 2.24, 16: 4.0, 32: 8.0, 64: 16.0},
}


def table(verify: Points, draft: Points = DRAFT, scale: float = 1.0) -> PassCosts:
    """Return costs in seconds; points: in passes of one row."""
    seconds = [{n: scale * UNIT * cost for n, cost in points.items()} for points in (verify, draft)]
    return PassCosts("simulated", seconds[0], seconds[1], measured=True)


class Copies(Lawful):
    """Proposes what a copied text says: a chain of up to `length` tokens without a draft pass, besides the draft's."""

    def __init__(self, rows: Rows, stated: float, length: int) -> None:
        super().__init__(rows)
        self.stated = stated
        self.length = length

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        length = min(self.length, most, int(least / math.log(self.stated)))
        if not len(nodes.alive()) or length < 1:
            return None
        first = int(nodes.alive()[0])
        parents = [first, *range(len(tree), len(tree) + length - 1)]
        tokens = [50 + place for place in range(length)]
        return Free(
            parents, tokens, [math.log(self.stated)] * length, [FREE] * length, [0] * length
        )


ROWS: Rows = [[0.6, 0.2, 0.1]] * LEVELS


def head_truth(tree: TokenTree, node: int) -> float:
    """Return the chance of a drafted token: what the draft states."""
    return ROWS[0][int(tree.tokens[node])]


def copy_truth(tree: TokenTree, node: int) -> float:
    """Return the same of an answer that copies its prompt."""
    return 0.97 if int(tree.tokens[node]) >= 50 else 0.02


TEXTS: dict[str, tuple[Callable[[], Drafter], Callable[[TokenTree, int], float]]] = {
    "head": (lambda: Lawful(ROWS), head_truth),
    "copies": (lambda: Copies(ROWS, 0.97, 30), copy_truth),
    "noise": (lambda: Lawful(ROWS), lambda tree, node: 0.01),
}


@dataclass
class Machine:
    """A clock: true costs with noise, and how much slower the machine is at a cycle."""

    costs: PassCosts
    noise: float = 0.05
    slower: Callable[[int], float] = lambda cycle: 1.0
    seed: int = 0
    cycles: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def seconds(self, rows: int, widths: list[int]) -> tuple[float, float]:
        """Return the seconds of a verification and of draft passes."""
        self.cycles += 1
        slower = self.slower(self.cycles)
        verify = (
            interpolated(self.costs.verify, rows)
            * slower
            * math.exp(self.random.gauss(0, self.noise))
        )
        draft = sum(interpolated(self.costs.draft, width) for width in widths) * slower
        return verify, draft


@dataclass
class Simulation:
    """An engine's answers, one after the other, by a policy that began with `first` on this machine."""

    text: str
    machine: Machine
    first: PassCosts
    policy: Auto = field(init=False)
    sampled: bool = False

    def __post_init__(self) -> None:
        policy = policies.make("auto", costs=MEASURED)
        assert isinstance(policy, Auto)
        self.policy = policy
        drafter, truth = TEXTS[self.text]
        self._world = World(policy, drafter(), truth, self.machine.seed)
        self._widths: list[int] = []
        step = self._world.drafter.step

        def counted(tree: TokenTree, frontier: Nodes) -> Step:
            self._widths.append(len(frontier.alive()))
            return step(tree, frontier)

        self._world.drafter.step = counted  # type: ignore[method-assign]

    def answer(self, tokens: int = 200) -> float:
        """Return an answer's tokens per time of a pass of one row: its rate over that of plain decoding."""
        self.policy.begin(100, self.sampled, lambda: self.first)
        written = 0
        spent = 0.0
        while written < tokens:
            count, seconds = self._cycle()
            written += count
            spent += seconds
        return written * self.machine.costs.verify[1] / spent

    def _walk(self, draft: Draft) -> tuple[list[int], list[int]]:
        """Return the verified nodes that the target goes down, and its tokens, also those of nodes left unverified."""
        world = self._world
        grown = range(len(draft.tree)) if draft.kept is None else draft.kept.tolist()
        path = [0]
        chosen = list[int]()
        while True:
            token = world.choose(draft.grown, grown[path[-1]])
            chosen.append(token)
            below = world.children(draft.tree, path[-1])
            if token not in below:
                return path, chosen
            path.append(below[token])

    def _cycle(self) -> tuple[int, float]:
        self._widths.clear()
        plan = self.policy.plan()
        draft = draft_tree(0, self._world.drafter, self.policy, Seconds(), CPU, plan)
        path, chosen = self._walk(draft)
        verify, drafting = self.machine.seconds(len(draft.tree), self._widths)
        seconds = Seconds(draft=drafting, verify=verify, total=verify + drafting)
        kept = None if plan.rests else draft.kept
        cycle = Cycle(
            draft.tree, path, chosen, seconds, len(draft.grown) - 1, None, draft.grown, kept
        )
        self.policy.learn(Outcome.of(cycle))
        return len(chosen), verify + drafting
