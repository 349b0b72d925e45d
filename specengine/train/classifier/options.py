"""Options of collecting trees for a classifier, and of training it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specengine.errors import ABOVE_0, TRUTH, Checked, at_least, number, one_of, option

if TYPE_CHECKING:
    from specengine.policies import TreePolicy

SHARE = number(0, 1, "above 0, below 1", open_low=True, open_high=True)


@dataclass(frozen=True)
class CollectOptions(Checked):
    """Options of collecting trees."""

    trees: int = option(
        at_least(0),
        default=1000,
        help="total number of trees, 0 or more; 0: all trees of the prompts' answers",
    )
    length: int = option(
        at_least(1),
        default=48,
        help="maximum tokens per answer, 1 or more; an answer has about length / acceptance length trees",
    )
    width: int = option(
        at_least(1),
        default=10,
        help="children per node of the beam, 1 or more; all 1 + width + expansions * width**2 candidates are verified",
    )
    expansions: int = option(
        at_least(0),
        default=6,
        help="levels of the beam below the first, 0 or more",
    )
    top: int = option(
        at_least(1),
        default=1000,
        help="number of most likely tokens that entropies are summed over, 1 or more",
    )
    hidden: bool = option(
        default=True,
        help="true: store the draft's hidden states",
    )
    logits: bool = option(
        default=False,
        help="true: store the draft's logits, in their own dtype",
    )

    @property
    def policy(self) -> TreePolicy:
        """The beam, with a budget for all candidates."""
        from specengine import policies

        capacity = 1 + self.width + self.expansions * self.width**2
        return policies.make("eagle", width=self.width, expansions=self.expansions, budget=capacity)


@dataclass(frozen=True)
class ClassifierOptions(Checked):
    """Options of training a classifier."""

    epochs: int = option(
        at_least(1),
        default=10,
        help="passes over the trees, 1 or more",
    )
    batch: int = option(
        at_least(1),
        default=1024,
        help="candidates per optimiser step, 1 or more",
    )
    learning_rate: float = option(
        ABOVE_0,
        default=1e-3,
        help="learning rate, above 0",
    )
    optimizer: Literal["adam", "adamw"] = option(
        one_of(("adam", "adamw")),
        default="adam",
        help="adam or adamw",
    )
    negatives: float = option(
        ABOVE_0,
        default=4.0,
        help="negatives per positive in training, drawn for every epoch, above 0",
    )
    held_back: float = option(
        SHARE,
        default=0.05,
        help="share of the trees that is not trained on, above 0, below 1; beta and all figures come from it",
    )
    keep_rate: float = option(
        SHARE,
        default=0.03,
        help="share of a tree's candidates that beta is calibrated to keep, above 0, below 1",
    )
    recall: float | None = option(
        SHARE,
        default=None,
        help="share of the accepted nodes that beta is calibrated to keep instead, above 0, below 1; or none",
    )
    head_width: int = option(
        at_least(1),
        default=1024,
        help="units of SpecDec++'s head, 1 or more; no effect for the other kinds",
    )
    blocks: int = option(
        at_least(1),
        default=1,
        help="layers of SpecDec++'s head, 1 or more; no effect for the other kinds",
    )
    units: int = option(
        at_least(1),
        default=48,
        help="hidden units of C2T's and Disco's networks, 1 or more; no effect for SpecDec++",
    )
    entropy: bool = option(
        TRUTH,
        default=True,
        help="false, for C2T: its network does not see the entropy, as in Learning to Draft",
    )
    seed: int = option(
        at_least(0),
        default=0,
        help="random seed, 0 or more",
    )


# Sources: C2T, appendix C.2; Learning to Draft, A.1 (which leaves the batch open).
SETTINGS = {
    "c2t": ClassifierOptions(),
    "disco": ClassifierOptions(
        epochs=50, batch=64, learning_rate=1e-4, optimizer="adamw", negatives=1.0, units=128
    ),
    "specdecpp": ClassifierOptions(
        epochs=5, batch=64, learning_rate=1e-4, optimizer="adamw", negatives=1.0
    ),
}
