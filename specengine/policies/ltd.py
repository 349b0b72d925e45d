"""Learning to Draft: two small networks, trained on throughput, choose a beam's depth and how much is verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine import ops
from specengine.costs import PassCosts
from specengine.ops import Flag, Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree, is_down
from specengine.policies import PerDevice, _ltd, require
from specengine.policies._beam import Beam
from specengine.policies._ltd import REPEATS, LtdShape, Networks

if TYPE_CHECKING:
    from specengine.records import Outcome

CONTEXT_UNIT, EXPANSIONS_UNIT = 1000.0, 10.0


class Decisions(Protocol):
    """Source of decisions: the networks, or the trainer."""

    def goes_on(self, observation: Tensor, expansions: Tensor) -> Tensor:
        """Return whether to expand once more, bool [1]. expansions: int32 [1], complete ones; observation: see
        depth_observation."""

    def choose_size(self, observation: Tensor) -> Tensor:
        """Return the index of the shape's size to verify, int64 [1]; observation: see size_observation."""


@dataclass
class Ltd(Beam):
    """EAGLE's beam; a network says after each expansion whether it goes on, another how many candidates are verified.

    networks     paper or cpu, the pairs that ship; the path of a file that `python -m research.ltd train` wrote; or
                 DEPTH,SIZE, two files of Stable-Baselines3, as the paper's code released them
    depth        expansions, instead of asking the depth network
    size         candidates verified, the root excluded, instead of asking the size network
    check_every  expansions from one decision of the depth network to the next; none: as in its training

    The networks' file says the beam's width and its most expansions. Source: Learning to Draft, sections 3 and 4,
    appendix A.
    """

    networks: str = "paper"
    depth: int | None = None
    size: int | None = None
    check_every: int | None = None

    width: int = field(default=0, init=False, repr=False)
    expansions: int = field(default=0, init=False, repr=False)
    budget: int = field(default=0, init=False, repr=False)

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"networks": "paper"}, "cpu": {"networks": "cpu"}}

    def __post_init__(self) -> None:
        networks = _ltd.load(self.networks).networks
        self.follow(networks.shape, networks)

    @classmethod
    def steered(cls, shape: LtdShape, decisions: Decisions, depth: int | None = None, size: int | None = None) -> Ltd:
        """Make a policy that follows `decisions`, for networks that are still being trained."""
        policy = cls.__new__(cls)
        policy.networks, policy.depth, policy.size, policy.check_every = "(steered)", depth, size, None
        policy.follow(shape, decisions)
        return policy

    def follow(self, shape: LtdShape, decisions: Decisions) -> None:
        deepest = shape.expansions
        require(
            "ltd", "depth", self.depth, f"0 to {deepest}, or none", self.depth is None or 0 <= self.depth <= deepest
        )
        require("ltd", "size", self.size, "1 or more, or none", self.size is None or self.size >= 1)
        if self.check_every is not None:
            shape = LtdShape(**{**vars(shape), "check_every": self.check_every})
        sizes = [1 + size for size in (shape.sizes if self.size is None else [self.size])]
        self._shape, self._tokens = shape, 0
        # int32: nodes verified, by action
        self._sizes = PerDevice(lambda device: torch.tensor(sizes, dtype=torch.int32, device=device))
        # int64 [1]: tokens committed
        self._context = PerDevice(lambda device: torch.tensor([self._tokens], device=device, dtype=torch.int64))
        self._decisions = PerDevice(
            lambda device: decisions.on(device) if isinstance(decisions, Networks) else decisions
        )
        self.width, self.expansions = shape.width, deepest if self.depth is None else self.depth
        most = shape.sizes[-1] if self.size is None else self.size
        self.budget = min(1 + most, self.capacity)

    def begin(self, tokens: int, sampled: bool = False, costs: Callable[[], PassCosts] | None = None) -> None:
        self._tokens = tokens
        self._tell()

    def learn(self, outcome: Outcome) -> None:
        cycle = outcome.cycle
        assert cycle is not None  # it keeps no state on a device
        self._tokens += len(cycle.tokens)
        self._tell()

    def _tell(self) -> None:
        for context in self._context.values():
            context.fill_(self._tokens)

    def stops(self, tree: TokenTree, frontier: Nodes, step: Step, beam: Nodes) -> Flag:
        done, shape = ops.number(tree.passes) - 1, self._shape
        asked = (done >= shape.least) & (done < shape.expansions) & (done % shape.check_every == 0)
        asked = asked & (self.depth is None)
        if is_down(asked):
            return asked
        expansions = ops.held(done)
        return asked & ~self._decisions[tree.device].goes_on(self._observed("depth", tree, expansions), expansions)

    def keep(self, tree: TokenTree) -> Nodes:
        sizes = self._sizes[tree.device]
        if self.size is None:
            expansions = (tree.passes - 1).clamp(min=0)  # a capture may run over a tree without a pass
            observation = self._observed("size", tree, expansions)
            sizes = sizes.index_select(0, self._decisions[tree.device].choose_size(observation))
        return tree.best_of_all(self.budget, sizes)

    def _observed(self, which: str, tree: TokenTree, expansions: Tensor) -> Tensor:
        return observed(which, tree, self._context[tree.device], expansions, self._shape)


def observed(which: str, tree: TokenTree, context: Tensor, expansions: Tensor, shape: LtdShape) -> Tensor:
    """Return the input of network `which` for a running beam: depth_observation or size_observation.

    context: int64 [1], tokens committed; expansions: int32 [1].
    """
    repeats = REPEATS[which]
    room = shape.inputs[which] - 2 * repeats
    window = ops.Window(shape.width, which == "depth", room, shape.pad, repeats, (CONTEXT_UNIT, EXPANSIONS_UNIT))
    return ops.beam_observation(tree.path_log_probs, tree.depths, tree.size, expansions, context, window)


def laid_out(scores: Tensor, depths: Tensor, shape: LtdShape) -> Tensor:
    """Return float32 [shape.candidates]: the candidates' path log-probabilities, each level from its own place on.

    scores: float32 [m], in the order of creation; depths: int64 [m], ascending from 1.
    """
    window = ops.Window(shape.width, False, shape.candidates, shape.pad, 0, (CONTEXT_UNIT, EXPANSIONS_UNIT))
    expansions = int(depths[-1]) - 1 if len(depths) else 0
    count, done = torch.tensor([[len(depths)], [expansions]], dtype=torch.int32, device="cpu")
    return ops.beam_observation(scores, depths, count, done, torch.zeros(1, dtype=torch.int64, device="cpu"), window)


def depth_observation(laid: Tensor, context: Tensor | int, expansions: int, shape: LtdShape) -> Tensor:
    """Return float32 [..., width**2 + 28]: the last level's candidates, the context's length, the expansions so far.

    laid: float32 [..., shape.candidates] (see `laid_out`); context: tokens committed, [...]; expansions: complete.
    Before the first expansion the last level has `width` candidates. Source: Learning to Draft, equation 3.
    """
    start = shape.grown(expansions - 1) if expansions else 0
    level = laid[..., start : shape.grown(expansions)]
    level = pad(level, (0, shape.inputs["depth"] - 2 * REPEATS["depth"] - level.shape[-1]), value=shape.pad)
    return _with_facts(level, context, expansions, REPEATS["depth"])


def size_observation(laid: Tensor, context: Tensor | int, expansions: int, shape: LtdShape) -> Tensor:
    """Return float32 [..., shape.candidates + 58]: all candidates, the context's length, the number of expansions.

    laid: float32 [..., shape.candidates], of which those of later expansions are not shown. Source: equation 3.
    """
    grown = shape.grown(expansions)
    shown = (
        laid
        if expansions == shape.expansions
        else pad(laid[..., :grown], (0, shape.candidates - grown), value=shape.pad)
    )
    return _with_facts(shown, context, expansions, REPEATS["size"])


def _with_facts(values: Tensor, context: Tensor | int, expansions: int, repeats: int) -> Tensor:
    """Append each fact `repeats` times, so that it weighs among many inputs."""
    lengths = torch.as_tensor(context, dtype=torch.float32, device=values.device) / CONTEXT_UNIT
    counts = torch.full_like(lengths, expansions / EXPANSIONS_UNIT)
    spread = (*values.shape[:-1], repeats)
    return torch.cat([values, *(fact[..., None].expand(spread) for fact in (lengths, counts))], -1)
