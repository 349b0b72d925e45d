"""Options of the training losses, and the losses by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from specengine.errors import require, require_known, require_minimum

LossName = Literal["eagle", "hass", "ttt", "talf"]


@dataclass(frozen=True)
class Loss:
    """A training loss.

    name           the method that the loss comes from
    steps          consecutive predictions from each position, 1 or more; for `talf`, depths of the tree
    width          nodes per depth of the target's tree, 0 or more; 0: follow the text instead of a tree
    anchors        share of the positions from which the steps after the first are unrolled, drawn for each batch,
                   above 0, up to 1
    cross_entropy  weight of the cross-entropy with the target's distribution, 0 or more
    top_k          number of the target's best tokens for `top_weight`, 1 or more
    top_weight     weight of the cross-entropy over the `top_k` best tokens, 0 or more
    regression     weight of the smooth L1 distance to the target's hidden state, averaged over its channels, 0 or more
    decay          step j has weight decay**j, above 0, up to 1
    detach         true: stop gradients between steps
    noise          width of the uniform noise on the features for sequences of 512 tokens, 0 or more; narrower for
                   longer ones
    """

    name: LossName
    steps: int
    width: int = 0
    anchors: float = 1.0
    cross_entropy: float = 1.0
    top_k: int = 10
    top_weight: float = 0.0
    regression: float = 0.0
    decay: float = 1.0
    detach: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        require_minimum(self, steps=1, width=0, top_k=1, cross_entropy=0, top_weight=0, regression=0, noise=0)
        for field in ("anchors", "decay"):
            require(field, value := getattr(self, field), "above 0, up to 1", 0 < value <= 1)


# EAGLE: Li et al. 2024, weights of its code. HASS: Zhang et al. 2025, three steps, top 10. EAGLE-3's training-time
# test: Li et al. 2025. TALF: k = 4, depth 3, no regression, gradients through the steps.
LOSSES: dict[str, Loss] = {
    "eagle": Loss("eagle", steps=1, regression=1.0, cross_entropy=0.1, noise=0.2),
    "hass": Loss("hass", steps=3, regression=1.0, cross_entropy=0.1, top_weight=1.0, detach=True),
    "ttt": Loss("ttt", steps=7, decay=0.8),
    "talf": Loss("talf", steps=3, width=4),
}


def make_loss(name: str, **changes: Any) -> Loss:
    """Return the loss of this name, with `changes` to its settings. Raise InputError for an unknown name."""
    return replace(require_known("loss", name, LOSSES), **changes)
