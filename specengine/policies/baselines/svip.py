"""SVIP: the EAGLE beam, or a chain, ended where the draft's distribution is too flat."""

import math
from dataclasses import dataclass

from specengine.ops import Flag, Nodes, Step, TokenTree, doubled
from specengine.policies import Beam, require_each


@dataclass
class Svip(Beam):
    """Stop once sqrt(factor * H) is above `threshold`, with H the entropy in nats after the best node drafted from.

    The uncertain token itself is still proposed. With a width of 1 this is the published rule for chains.

    Source: SVIP, Zhang et al. 2024; settings as in Learning to Draft, A.1.
    """

    factor: float = 0.15
    threshold: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_each(
            "svip",
            ("factor", self.factor, "above 0", 0 < self.factor < math.inf),
            ("threshold", self.threshold, "0 or more", 0 <= self.threshold < math.inf),
        )

    def stops(self, tree: TokenTree, frontier: Nodes, step: Step, beam: Nodes) -> Flag:
        best = tree.scores(frontier).argmax(0, keepdim=True)
        return (
            self.factor * doubled(step.row(best).entropy()).clamp(min=0.0)
        ).sqrt() > self.threshold
