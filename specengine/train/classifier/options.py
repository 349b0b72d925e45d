"""Options of collecting trees for a classifier, and of training it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specengine.errors import require, require_minimum

if TYPE_CHECKING:
    from specengine.policies import TreePolicy


@dataclass(frozen=True)
class CollectOptions:
    """Options of collecting trees.

    trees       total number of trees, 0 or more; 0: all trees of the prompts' answers
    length      maximum tokens per answer, 1 or more; an answer has about length / acceptance length trees
    width       children per node of the beam, 1 or more; all 1 + width + expansions * width**2 candidates are verified
    expansions  levels of the beam below the first, 0 or more
    top         number of most likely tokens that entropies are summed over, 1 or more
    hidden      true: store the draft's hidden states
    logits      true: store the draft's logits, in their own dtype
    """

    trees: int = 1000
    length: int = 48
    width: int = 10
    expansions: int = 6
    top: int = 1000
    hidden: bool = True
    logits: bool = False

    def __post_init__(self) -> None:
        require_minimum(self, trees=0, length=1, width=1, expansions=0, top=1)

    @property
    def policy(self) -> TreePolicy:
        """The beam, with a budget for all candidates."""
        from specengine import policies

        capacity = 1 + self.width + self.expansions * self.width**2
        return policies.make("eagle", width=self.width, expansions=self.expansions, budget=capacity)


@dataclass(frozen=True)
class ClassifierOptions:
    """Options of training a classifier.

    epochs         passes over the trees, 1 or more
    batch          candidates per optimiser step, 1 or more
    learning_rate  learning rate, above 0
    optimizer      adam or adamw
    negatives      negatives per positive in training, drawn for every epoch, above 0
    held_back      share of the trees that is not trained on, above 0, below 1; beta and all figures come from it
    keep_rate      share of a tree's candidates that beta is calibrated to keep, above 0, below 1
    recall         share of the accepted nodes that beta is calibrated to keep instead, above 0, below 1; or none
    head_width     units of SpecDec++'s head, 1 or more; no effect for the other kinds
    blocks         layers of SpecDec++'s head, 1 or more; no effect for the other kinds
    seed           random seed, 0 or more
    """

    epochs: int = 10
    batch: int = 1024
    learning_rate: float = 1e-3
    optimizer: Literal["adam", "adamw"] = "adam"
    negatives: float = 4.0
    held_back: float = 0.05
    keep_rate: float = 0.03
    recall: float | None = None
    head_width: int = 1024
    blocks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        require_minimum(self, epochs=1, batch=1, head_width=1, blocks=1, seed=0)
        for name in ("learning_rate", "negatives"):
            require(name, value := getattr(self, name), "above 0", 0 < value < math.inf)
        require("optimizer", repr(self.optimizer), "adam, adamw", self.optimizer in ("adam", "adamw"))
        for name in ("held_back", "keep_rate", "recall"):
            value = getattr(self, name)
            require(name, value, "above 0, below 1", value is None or 0 < value < 1)


# Sources: C2T, appendix C.2; Learning to Draft, A.1 (which leaves the batch open).
SETTINGS = {
    "c2t": ClassifierOptions(),
    "disco": ClassifierOptions(epochs=50, batch=64, learning_rate=1e-4, optimizer="adamw", negatives=1.0),
    "specdecpp": ClassifierOptions(epochs=5, batch=64, learning_rate=1e-4, optimizer="adamw", negatives=1.0),
}
