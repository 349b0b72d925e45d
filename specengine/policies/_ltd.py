"""Learning to Draft's two networks: the trees that they are for, how they compute, and the files that they are in.

A module of policies, none itself.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from specengine import ops
from specengine.errors import InputError, require_input, require_or, restating
from specengine.policies import require_each, require_minimum
from specengine.policies._classifier import UNREADABLE, filled, read

FORMAT = 1
# what ships, and for which target
FOLDER = Path(__file__).parent / "networks" / "smollm2-135m-instruct"
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}
# of the context's length and of the number of expansions in an observation
REPEATS = {"depth": 14, "size": 29}
FACTS = {"length": 1000.0, "depth": 10.0}  # in an observation, in this order, and their units
STOP, GO_ON = 0, 1


@dataclass(frozen=True)
class LtdShape:
    """The trees that a pair of networks decides about.

    width        of the beam
    expansions   levels grown after the first, at most
    sizes        candidates verified by the size network's actions, ascending, the root excluded
    least        expansions before the depth network is asked for the first time
    check_every  expansions from one of its decisions to the next
    pad          what stands in an observation for candidates that there are not; log-probabilities below a negative
                 one count as that
    best_first   whether the children of a level's likeliest parent stand first in an observation, as in EAGLE's code,
                 instead of the children of the parent that was created first
    sees         the facts that the networks see besides the candidates; 0 stands for the others. Source: Table 6, whose
                 entropies and hidden states are not built: it finds both no better than none
    """

    width: int = 10
    expansions: int = 12
    sizes: tuple[int, ...] = tuple(range(20, 241, 20))
    least: int = 1
    check_every: int = 1
    pad: float = -20.0
    best_first: bool = False
    sees: tuple[str, ...] = tuple(FACTS)

    def __post_init__(self) -> None:
        require_minimum("ltd", self, width=1, expansions=1, least=0, check_every=1)
        require_each(
            "ltd",
            (
                "least, check_every",
                (self.least, self.check_every),
                "a depth that is asked about",
                any(self.asks(count) for count in range(self.expansions)),
            ),
            (
                "sizes",
                self.sizes,
                "one or more, ascending, above 0",
                bool(self.sizes) and all(a < b for a, b in pairwise((0, *self.sizes))),
            ),
            ("pad", self.pad, "0 or less", self.pad <= 0),
            ("sees", self.sees, ", ".join(FACTS), set(self.sees) <= set(FACTS)),
        )

    @property
    def candidates(self) -> int:
        """Return the number of nodes of the whole tree, the root excluded."""
        return self.grown(self.expansions)

    def grown(self, expansions: int) -> int:
        """Return the number of nodes after `expansions` expansions, the root excluded."""
        return self.width + expansions * self.width**2

    def asks(self, expansions: int) -> bool:
        """Return whether the depth network is asked after `expansions` expansions."""
        return self.least <= expansions < self.expansions and expansions % self.check_every == 0

    @property
    def inputs(self) -> dict[str, int]:
        return {
            "depth": self.width**2 + 2 * REPEATS["depth"],
            "size": self.candidates + 2 * REPEATS["size"],
        }

    @property
    def outputs(self) -> dict[str, int]:
        return {"depth": 2, "size": len(self.sizes)}


class Networks(nn.Module):
    """A depth and a size network: multi-layer perceptrons from an observation to one value per action.

    hidden: units of the hidden layers of each; activation: relu or tanh.
    """

    def __init__(
        self, shape: LtdShape, hidden: Mapping[str, Sequence[int]], activation: str = "relu"
    ) -> None:
        super().__init__()
        self.shape, self.activation = shape, activation
        self.depth = perceptron(
            shape.inputs["depth"], hidden["depth"], shape.outputs["depth"], activation
        )
        self.size = perceptron(
            shape.inputs["size"], hidden["size"], shape.outputs["size"], activation
        )

        self._list_parameters()

    def _list_parameters(self) -> None:
        self._parameters_of = {
            name: list(getattr(self, name).parameters()) for name in ("depth", "size")
        }

    def on(self, device: torch.device) -> "Networks":
        """Return the networks on a device, as a copy if they stand elsewhere."""
        if self.device == device:
            return self
        moved = copy.deepcopy(self).to(device)
        moved._list_parameters()
        return moved

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def goes_on(self, observation: Tensor, expansions: Tensor) -> Tensor:
        return self._best("depth", observation) == GO_ON

    def choose_size(self, observation: Tensor) -> Tensor:
        return self._best("size", observation)

    def _best(self, name: str, observation: Tensor) -> Tensor:
        return ops.best_action(observation, self._parameters_of[name], self.activation)


def perceptron(inputs: int, hidden: Sequence[int], outputs: int, activation: str) -> nn.Sequential:
    layers: list[nn.Module] = [
        layer
        for a, b in pairwise([inputs, *hidden, outputs])
        for layer in (
            nn.Linear(a, b, dtype=torch.float32, device="cpu"),
            ACTIVATIONS[activation](),
        )
    ]
    return nn.Sequential(*layers[:-1])


class Trained(NamedTuple):
    """Networks and the facts in their file."""

    networks: Networks
    facts: Mapping[str, Any]


# ---------------------------------------------------------------------------------------------------- files


def shipped() -> list[str]:
    """Return the names of the pairs that ship."""
    return sorted(file.stem for file in FOLDER.glob("*.safetensors"))


def load(networks: str) -> Trained:
    """Load a pair of networks: the name of one that ships, or the path of a file.

    InputError naming the option where a file is missing, damaged, of another kind, or has other tensors.
    """
    file = (
        FOLDER / f"{networks}.safetensors" if networks in shipped() else Path(networks).expanduser()
    )
    where = f"policy ltd.networks: {file}"
    require_input(
        f"{where} is not a file, known are {', '.join(shipped())}; or train a pair with: "
        "python -m research.ltd train",
        file.is_file(),
    )
    with restating(
        UNREADABLE,
        lambda error: InputError(
            f"{where} cannot be read ({error!r}); train it again: python -m research.ltd train"
        ),
    ):
        state, facts = read(file)
        require_or(
            ValueError,
            f"it is of kind {facts['kind']}, format {facts['format']}",
            (facts["format"], facts["kind"]) == (FORMAT, "ltd"),
        )
        shape = LtdShape(
            **cast(
                "dict[str, Any]",
                {
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in dict(facts["shape"]).items()
                },
            )
        )
        empty_networks = Networks(shape, facts["hidden"], facts["activation"])
    return Trained(filled(empty_networks, state, where), facts)
