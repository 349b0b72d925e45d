"""Worlds whose law is known, for policies that weigh chances: drafts that state it, targets that follow it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from research.drafting import draft_tree
from specengine.costs import PassCosts
from specengine.cycle import Draft
from specengine.drafters import Drafter
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.ops.worth import LEVELS, PLACES
from specengine.policies import TreePolicy
from specengine.records import Cycle, Outcome, Seconds
from tests.toy import CPU

Rows = Sequence[Sequence[float]]  # chances of children, best first, by the level of their parent
ELSEWHERE = 99  # a token that no draft proposes


def level(chance: float) -> int:
    """Return the level of a node below the root whose edge has this chance."""
    return min(int(chance * (LEVELS - 1)), LEVELS - 2) + 1


class Lawful(Drafter):
    """States, for the children of a node, the chances of its level; tokens are places."""

    name = "lawful"

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def begin(self, prompt: list[int], features: Any = None, hints: Any = None) -> None:
        pass

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        logits = torch.full((len(frontier.alive()), PLACES), -math.inf)
        for row, node in zip(logits, frontier.alive().tolist(), strict=True):
            chances = self.rows[level(math.exp(tree.log_probs[node])) if node else 0]
            row[: len(chances)] = torch.tensor(chances).log()
        return Step(logits, normalized=True)

    def accept(self, cycle: Cycle) -> None:
        pass

    def reset(self) -> None:
        pass


# ---- the best that any tree gives


class Found(NamedTuple):
    """The expected tokens of a way of growing a tree, and its time."""

    tokens: float
    time: float

    @property
    def rate(self) -> float:
        return self.tokens / self.time


class Node(NamedTuple):
    chance: float
    level: int
    place: int


def all_ways(rows: Rows, costs: PassCosts, *, budget: int, width: int, passes: int) -> list[Found]:
    """Return the results of every sequence of widths, best first, and every number of verified nodes."""
    verify, draft = (table.tolist() for table in costs.table(budget, width, 0))
    found = list[Found]()

    def follow(chances: list[float], waiting: list[Node], spent: float, left: int) -> None:
        best = sorted(chances, reverse=True)[:budget]
        found.extend(Found(sum(best[:n]), verify[n] + spent) for n in range(1, len(best) + 1))
        order = sorted(waiting, key=lambda node: (-node.chance, node.place))
        for taken in range(1, min(width, len(order)) + 1 if left else 1):
            grown, rest = list(chances), order[taken:]
            for node in order[:taken]:
                for edge in rows[node.level]:
                    rest.append(Node(node.chance * edge, level(edge), len(grown)))
                    grown.append(node.chance * edge)
            follow(grown, rest, spent + draft[taken], left - 1)

    follow([1.0], [Node(1.0, 0, 0)], 0.0, passes)
    return found


# ---- cycles


def drafted(policy: TreePolicy, drafter: Drafter) -> Draft:
    return draft_tree(0, drafter, policy, Seconds(), CPU)


@dataclass
class World:
    """Cycles of a policy; truth: the chance of a child by its parent and place; others: what became of each cycle."""

    policy: TreePolicy
    drafter: Drafter
    truth: Callable[[TokenTree, int], float]
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def cycle(self) -> Draft:
        """A tree that the target went down, as the policy has learnt."""
        draft = drafted(self.policy, self.drafter)
        assert draft.kept is not None
        path, chosen = self.walk(draft.tree)
        self.policy.learn(
            Outcome(
                draft.grown, Nodes.of(draft.kept[torch.tensor(path)]), torch.tensor(chosen), None
            )
        )
        return draft

    def walk(self, tree: TokenTree) -> tuple[list[int], list[int]]:
        """The nodes that the target goes down, and the tokens that it chooses."""
        path, chosen = [0], list[int]()
        while True:
            token = self.choose(tree, path[-1])
            chosen.append(token)
            below = self.children(tree, path[-1])
            if token not in below:
                return path, chosen
            path.append(below[token])

    def expected(self, tree: TokenTree) -> float:
        """Tokens that its verification commits on average."""
        chances = [1.0]
        for node in range(1, len(tree)):
            chances.append(chances[int(tree.parents[node])] * self.truth(tree, node))
        return sum(chances)

    def children(self, tree: TokenTree, parent: int) -> dict[int, int]:
        return {
            int(tree.tokens[node]): node
            for node in range(1, len(tree))
            if int(tree.parents[node]) == parent
        }

    def choose(self, tree: TokenTree, parent: int) -> int:
        drawn = self.random.random()
        for token, node in self.children(tree, parent).items():
            drawn -= self.truth(tree, node)
            if drawn < 0:
                return token
        return ELSEWHERE
