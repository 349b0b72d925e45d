"""Outcomes of every depth and size at each logged tree: Learning to Draft's episodes, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from research.ltd.candidates import Candidates, CandidateTrees
from research.ltd.observations import best_actions, depth_observation, laid_out, size_observation
from research.ltd.options import RewardName
from specengine.costs import PassCosts
from specengine.errors import InputError
from specengine.policies._ltd import GO_ON, LtdShape, Networks

Array = np.ndarray[Any, Any]
T = TypeVar("T")


def reward(kind: RewardName, committed: Array | int, cost: Array | float, plain: float) -> Any:
    """Return the reward of cycles, from tokens committed (bonus token included) and cost; a plain token costs `plain`.

    table and wallclock are throughput, as a multiple of plain decoding's (equation 4, but for its scale); accept and
    time are the ablations of section 6.3.
    """
    if kind == "accept":
        return np.asarray(committed, dtype=np.float64)
    if kind == "time":
        return -np.asarray(cost, dtype=np.float64) / plain
    return committed * plain / np.asarray(cost, dtype=np.float64)


class Speed(NamedTuple):
    """Tokens per cost over many cycles as a multiple of plain decoding's; mean tokens, draft passes, nodes verified."""

    speed: float
    tau: float
    delta: float
    verified: float


@dataclass(frozen=True)
class Outcomes:
    """The logged trees of some answers, and what depths and sizes would have given at them under a cost table.

    laid      float32 [trees, shape.candidates], as the policy lays them out
    contexts  float32 [trees], tokens committed
    ranks     int32 [trees, expansions + 1, longest path]: how many of the candidates that there are after j expansions
              are better than the path's node at depth d + 1; out of reach where it is not among them
    answers   int64 [trees], ascending: which answer each tree is of

    Where every position of the answers was logged, trees are visited as in serving: the next one stands behind what was
    committed. Where only some were, or `each` is set, all count. That flatters deep trees: most positions stand within
    the long runs that a few cycles leap over.
    """

    shape: LtdShape
    costs: PassCosts
    laid: Tensor
    contexts: Tensor
    ranks: Array
    answers: Array
    each: bool = False

    @classmethod
    def of(
        cls, answers: Sequence[Sequence[Candidates]], shape: LtdShape, costs: PassCosts
    ) -> Outcomes:
        """Compute the outcomes. InputError if the trees are narrower or lower than the shape's."""
        trees = [tree for answer in answers for tree in answer]
        if not trees:
            raise InputError("candidates: no tree was logged")
        laid, ranks = (
            [],
            np.full(
                (len(trees), shape.expansions + 1, shape.expansions + 1), OUT_OF_REACH, np.int32
            ),
        )
        for number, tree in enumerate(trees):
            if len(tree.scores) < shape.candidates:
                raise InputError(
                    f"candidates: a logged tree has {len(tree.scores)} nodes, {shape.candidates} are needed for width "
                    f"{shape.width} and {shape.expansions} expansions; where the draft proposes fewer, train live"
                )
            scores, depths = tree.scores[: shape.candidates], tree.depths[: shape.candidates]
            laid.append(laid_out(scores, depths, shape))
            path = tree.path[tree.path < shape.candidates]
            ranks[number, :, : len(path)] = path_ranks(
                scores.numpy(), depths.numpy(), path.numpy(), shape.expansions
            )
        contexts = torch.tensor(
            [float(tree.context) for tree in trees], dtype=torch.float32, device="cpu"
        )
        numbers = np.repeat(np.arange(len(answers)), [len(answer) for answer in answers])
        return cls(shape, costs, torch.stack(laid), contexts, ranks, numbers)

    def __len__(self) -> int:
        return len(self.laid)

    @cached_property
    def dense(self) -> bool:
        """True if every position from the first to the last of each answer was logged."""
        same = np.diff(self.answers) == 0
        return bool((np.diff(self._places)[same] == 1).all())

    @cached_property
    def _places(self) -> Array:
        """Answer and position of each tree in one number, int64 [trees], ascending."""
        return self.answers * POSITIONS + self.contexts.long().numpy()

    def following(self, trees: Array, committed: Array) -> Array:
        """Return the tree after `committed` tokens of the same answer, int64 [m]; -1 after its end. For dense logs."""
        wanted = self._places[trees] + committed
        found = np.searchsorted(self._places, wanted).clip(max=len(self) - 1)
        return np.where(self._places[found] == wanted, found, -1)

    def visited(self, committed: Array) -> Array:
        """Return the trees that serving visits, int64 [m], from the starts of answers, given the tokens committed at
        each tree; all trees if the log is not dense, or `each` is set."""
        if self.each or not self.dense:
            return np.arange(len(self))
        current, found = np.flatnonzero(np.diff(self.answers, prepend=-1)), []
        while len(current):
            found.append(current)
            current = self.following(current, committed[current])
            current = current[current >= 0]
        return np.concatenate(found)

    def part(self, answers: Array) -> Outcomes:
        """Return the trees of some answers alone, by their numbers."""
        own = np.isin(self.answers, answers)
        where = torch.from_numpy(own)
        laid, contexts = self.laid[where], self.contexts[where]
        ranks, numbers = self.ranks[own], self.answers[own]
        return replace(self, laid=laid, contexts=contexts, ranks=ranks, answers=numbers)

    def all_trees(self, number: int) -> Array:
        """Return the same number for every tree, int64 [trees]."""
        return np.full(len(self), number)

    def committed(self, trees: Array, expansions: Array, sizes: Array) -> Array:
        """Return the tokens, bonus token included, of cycles at these trees; int64 [m] each, or broadcast to that."""
        return 1 + (self.ranks[trees, expansions] < np.asarray(sizes)[..., None]).sum(-1)

    def cost(self, expansions: Array, sizes: Array) -> Array:
        """Return the cost of cycles with these expansions and candidates, in the table's unit."""
        pairs = np.stack(np.broadcast_arrays(expansions, sizes), -1)
        unique, place = np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)
        return np.array([cycle_cost(self.costs, self.shape, int(j), int(v)) for j, v in unique])[
            place
        ].reshape(pairs.shape[:-1])

    def speed(self, expansions: Array | int, sizes: Array | int) -> Speed:
        """Return the speed of these decisions at all trees; int64 [trees] each, or one number for all."""
        _, depths, counts, committed = self._at_visited(expansions, sizes)
        cost = self.cost(depths, counts)
        grown = self.shape.width + depths * self.shape.width**2
        return Speed(
            float(committed.sum() * self.costs.plain / cost.sum()),
            float(committed.mean()),
            float(depths.mean() + 1),
            float((1 + np.minimum(counts, grown)).mean()),
        )

    def by_answer(self, expansions: Array | int, sizes: Array | int) -> list[dict[str, float]]:
        """Return what each answer adds to tau and to the speed: the sums of its cycles.

        As research.replay.by_answer: under the name of the costs stands the time, in tokens of plain decoding.
        """
        trees, depths, counts, committed = self._at_visited(expansions, sizes)
        cost, answers = self.cost(depths, counts) / self.costs.plain, self.answers[trees]
        return [
            {
                "cycles": int((answers == answer).sum()),
                "committed": int(committed[answers == answer].sum()),
                self.costs.name: float(cost[answers == answer].sum()),
            }
            for answer in np.unique(answers)
        ]

    def _at_visited(
        self, expansions: Array | int, sizes: Array | int
    ) -> tuple[Array, Array, Array, Array]:
        """Return the trees that serving visits, and expansions, sizes and tokens committed there; int64 [m] each."""
        trees = np.arange(len(self))
        depths, counts = (np.broadcast_to(given, trees.shape) for given in (expansions, sizes))
        everywhere = self.committed(trees, depths, counts)
        trees = self.visited(everywhere)
        return trees, depths[trees], counts[trees], everywhere[trees]

    def depths_by(self, networks: Networks) -> Array:
        """Return how many expansions the depth network makes at each tree, int64 [trees]."""
        shape, found = self.shape, np.full(len(self), self.shape.expansions)
        growing = torch.arange(len(self), dtype=torch.int64, device="cpu")
        for expansions in range(shape.expansions):
            if shape.asks(expansions):
                seen = depth_observation(
                    self.laid[growing], self.contexts[growing], expansions, shape
                )
                goes_on = best_actions(networks, "depth", seen) == GO_ON
                found[growing[~goes_on].numpy()] = expansions
                growing = growing[goes_on]
        return found

    def sizes_by(self, networks: Networks, expansions: Array) -> Array:
        """Return how many candidates the size network takes at each tree after these expansions; int64 [trees] both."""
        sizes, found = np.array(self.shape.sizes), np.zeros(len(self), dtype=np.int64)
        for count in np.unique(expansions):
            at = np.flatnonzero(expansions == count)
            seen = size_observation(self.laid[at], self.contexts[at], int(count), self.shape)
            found[at] = sizes[best_actions(networks, "size", seen).numpy()]
        return found


POSITIONS = 1 << 32  # more than an answer has
OUT_OF_REACH = np.iinfo(np.int32).max


def path_ranks(scores: Array, depths: Array, path: Array, expansions: int) -> Array:
    """Return ranks, int32 [expansions + 1, nodes of the path], by the order of ops.select_best; see Outcomes.ranks."""
    better = scores[None] > scores[path][:, None]
    better |= (scores[None] == scores[path][:, None]) & (
        np.arange(len(scores))[None] < path[:, None]
    )
    by_level = np.stack(
        [(better & (depths[None] == depth)).sum(1) for depth in range(1, expansions + 2)]
    )
    ranks = by_level.cumsum(0).astype(np.int32)
    ranks[np.arange(1, expansions + 2)[:, None] < depths[path][None]] = OUT_OF_REACH
    return ranks


def cycle_cost(costs: PassCosts, shape: LtdShape, expansions: int, size: int) -> float:
    """Return the cost of a whole beam with this many expansions, with `size` candidates and the root verified."""
    return costs.cycle(1 + min(size, shape.grown(expansions)), [1, *[shape.width] * expansions])


def split(
    folders: Sequence[CandidateTrees], shape: LtdShape, costs: PassCosts, held_back: float
) -> tuple[Outcomes, Outcomes]:
    """Split the answers of all folders into trees to learn from and trees to hold back."""
    learnt, held = hold_back(
        [answer for trees in folders for answer in trees.answers() if answer], held_back
    )
    return Outcomes.of(learnt, shape, costs), Outcomes.of(held, shape, costs)


def hold_back(items: Sequence[T], share: float) -> tuple[list[T], list[T]]:
    """Split items into those to learn from and a share, at least one, evenly far apart, to hold back.

    InputError where nothing would be left to learn from.
    """
    held = set(evenly(len(items), max(1, round(share * len(items)))))
    if len(held) == len(items):
        raise InputError(f"held_back: {share} of {len(items)} answers leaves none to learn from")
    return [item for place, item in enumerate(items) if place not in held], [
        items[place] for place in sorted(held)
    ]


def evenly(total: int, count: int) -> list[int]:
    """Return `count` places of `total`, ascending and evenly far apart; all if there are no more."""
    count = min(count, total)
    return [(2 * place + 1) * total // (2 * count) for place in range(count)]
