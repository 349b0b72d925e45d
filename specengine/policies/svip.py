"""SVIP: the EAGLE beam, or a chain, ended where the draft's distribution is too flat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specengine import ops
from specengine.drafters import Step
from specengine.policies import require
from specengine.policies._beam import Beam
from specengine.policies._ended import StoppedBeamLevels
from specengine.policies._levels import Scored
from specengine.tree import TokenTree


@dataclass
class Svip(Beam):
    """Stop once sqrt(factor * H) is above `threshold`, with H the entropy in nats behind the best node drafted from.

    The uncertain token itself is still proposed. With a width of 1 this is the published rule for chains.

    Source: SVIP, Zhang et al. 2024; settings as in Learning to Draft, A.1.
    """

    factor: float = 0.15
    threshold: float = 0.3

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "chain": {"width": 1, "expansions": 11, "budget": 13},
        "cpu": {"width": 4, "expansions": 4, "budget": 12},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require("svip", "factor", self.factor, "above 0", 0 < self.factor < math.inf)
        require("svip", "threshold", self.threshold, "0 or more", 0 <= self.threshold < math.inf)

    def stops(self, tree: TokenTree, frontier: Tensor, step: Step, beam: Tensor) -> bool:
        best = int(tree.path_log_probs[frontier].argmax())
        return bool(self.is_flat(step.row(best).entropy()))

    def levels(self) -> StoppedBeamLevels:
        return StoppedBeamLevels(self.width, self.expansions + 1, self._ends)

    def is_flat(self, entropy: Tensor) -> Tensor:
        """Whether a distribution of this entropy, float32 [1], ends the growth: bool [1]."""
        return (self.factor * entropy.double().clamp(min=0.0)).sqrt() > self.threshold

    def _ends(self, scored: Scored) -> Tensor:
        best = scored.frontier.scores.argmax(0, keepdim=True)
        logits = scored.logits.index_select(0, best)
        return self.is_flat(ops.top_entropy(logits, logits.shape[1]))
