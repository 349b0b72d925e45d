"""Learning to Draft: two small networks, trained on throughput, choose a beam's depth and how much is verified."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from specengine import ops
from specengine.ops import Flag, Nodes, Step, TokenTree, is_down
from specengine.policies import Beam, PerDevice, _ltd, require, require_minimum_or_none
from specengine.policies._ltd import FACTS, REPEATS, LtdShape, Networks

if TYPE_CHECKING:
    from specengine.costs import PassCosts
    from specengine.records import Outcome


class Decisions(Protocol):
    """Source of decisions: the networks, or the trainer."""

    def goes_on(self, observation: Tensor, expansions: Tensor) -> Tensor:
        """Return whether to expand once more, bool [1]. expansions: int32 [1], complete; observation: as `observed`."""

    def choose_size(self, observation: Tensor) -> Tensor:
        """Return the index of the shape's size to verify, int64 [1]; observation: as `observed` returns it."""


@dataclass
class Ltd(Beam):
    """EAGLE's beam; a network says after each expansion whether it goes on, another how many candidates are verified.

    networks     a pair that ships, named by the costs that it was trained on: `cpu`, two cores, or `a100`, an A100;
                 `auto`: a100 where torch sees a CUDA device, else cpu; or the path of a file that `python -m
                 research.ltd train` wrote, or `convert` of the files that the paper's code released
    depth        expansions, instead of asking the depth network
    size         candidates verified, the root excluded, instead of asking the size network
    check_every  expansions from one decision of the depth network to the next; none: as in its training

    The networks' file says the beam's width and its most expansions. Source: Learning to Draft, sections 3 and 4,
    appendix A.
    """

    networks: str = "auto"
    depth: int | None = None
    size: int | None = None
    check_every: int | None = None

    width: int = field(default=0, init=False, repr=False)
    expansions: int = field(default=0, init=False, repr=False)
    budget: int = field(default=0, init=False, repr=False)

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "a100": {"networks": "a100"},
        "cpu": {"networks": "cpu"},
    }

    def __post_init__(self) -> None:
        if self.networks == "auto":
            self.networks = "a100" if torch.cuda.is_available() else "cpu"
        networks = _ltd.load(self.networks).networks
        self.follow(networks.shape, networks)

    def follow(self, shape: LtdShape, decisions: Decisions) -> None:
        """Grow trees of this shape by these decisions, instead of those of `networks`."""
        require(
            "ltd",
            "depth",
            self.depth,
            f"0 to {shape.expansions}, or none",
            0 <= (self.depth or 0) <= shape.expansions,
        )
        require_minimum_or_none("ltd", self, "size")
        if self.check_every is not None:
            shape = LtdShape(**{**vars(shape), "check_every": self.check_every})
        sizes = [1 + size for size in (shape.sizes if self.size is None else [self.size])]
        self._shape, self._tokens = shape, 0
        # int32: nodes verified, by action
        self._sizes = PerDevice(
            lambda device: torch.tensor(sizes, dtype=torch.int32, device=device)
        )
        # int64 [1]: tokens committed
        self._context = PerDevice(
            lambda device: torch.tensor([self._tokens], device=device, dtype=torch.int64)
        )
        self._decisions = PerDevice(
            lambda device: decisions.on(device) if isinstance(decisions, Networks) else decisions
        )
        self.width = shape.width
        self.expansions = shape.expansions if self.depth is None else self.depth
        self.budget = min(sizes[-1], self.capacity)

    def begin(
        self, tokens: int, sampled: bool = False, costs: "Callable[[], PassCosts] | None" = None
    ) -> None:
        self._tokens = tokens
        self._tell()

    def learn(self, outcome: "Outcome") -> None:
        cycle: Any = outcome.cycle  # there, as it keeps no state on a device
        self._tokens += len(cycle.tokens)
        self._tell()

    def _tell(self) -> None:
        for context in self._context.values():
            context.fill_(self._tokens)

    def stops(self, tree: TokenTree, frontier: Nodes, step: Step, beam: Nodes) -> Flag:
        done, shape = ops.number(tree.passes) - 1, self._shape
        checks = (
            (done >= shape.least)
            & (done < shape.expansions)
            & (done % shape.check_every == 0)
            & (self.depth is None)
        )
        if is_down(checks):
            return checks
        expansions = ops.held(done)
        return checks & ~self._decisions[tree.device].goes_on(
            observed("depth", tree, self._context[tree.device], expansions, shape), expansions
        )

    def keep(self, tree: TokenTree) -> Nodes:
        sizes = self._sizes[tree.device]
        if self.size is None:
            observation = observed(
                "size",
                tree,
                self._context[tree.device],
                (tree.passes - 1).clamp(min=0),  # a capture may run over a tree without a pass
                self._shape,
            )
            sizes = sizes.index_select(0, self._decisions[tree.device].choose_size(observation))
        return tree.best_of_all(self.budget, sizes)


def observed(
    which: str, tree: TokenTree, context: Tensor, expansions: Tensor, shape: LtdShape
) -> Tensor:
    """Return the input of network `which` for a running beam: float32 [shape.inputs[which]].

    The depth network sees the last level's candidates, the size network all, level by level in the shape's order; then
    the context's length and the number of expansions, REPEATS times each, or 0 for what it does not see. context: int64
    [1], tokens committed; expansions: int32 [1]. Source: Learning to Draft, equation 3.
    """
    repeats = REPEATS[which]
    room = shape.inputs[which] - 2 * repeats
    length, depth = (unit if fact in shape.sees else math.inf for fact, unit in FACTS.items())
    window = ops.Window(shape.width, which == "depth", room, shape.pad, repeats, (length, depth))
    order = _best_parents_first(tree) if shape.best_first else None
    scores = tree.path_log_probs if order is None else tree.path_log_probs.index_select(0, order)
    return ops.beam_observation(scores, tree.depths, tree.size, expansions, context, window)


def _best_parents_first(tree: TokenTree) -> Tensor:
    """Return the nodes by level, in each the children of likelier parents first, int64 [capacity]."""
    vacant = torch.arange(tree.capacity, device=tree.device, dtype=torch.int64) >= tree.size
    scores = tree.path_log_probs.index_select(0, tree.parents.clamp(min=0).masked_fill(vacant, 0))
    order = scores.argsort(descending=True, stable=True)
    depths = tree.depths.masked_fill(vacant, tree.capacity).index_select(0, order)
    return order.index_select(0, depths.argsort(stable=True))
