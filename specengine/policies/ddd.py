"""DDD: the EAGLE beam, ended when the probability that it still holds the answer is low."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.drafters import Step
from specengine.policies import require
from specengine.policies._beam import Beam
from specengine.policies._ended import StoppedBeamLevels
from specengine.policies._levels import Scored
from specengine.tree import TokenTree


@dataclass
class Ddd(Beam):
    """After some expansions, stop if the log of the beam's summed path probabilities is below `threshold`.

    checks     expansions after which the rule is asked
    threshold  in nats

    Source: Dynamic Depth Decoding, Brown et al. 2024; settings as in Learning to Draft, A.1.
    """

    checks: tuple[int, ...] = (5, 7, 9)
    threshold: float = -0.3

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "original": {"expansions": 11},
        "cpu": {"width": 4, "expansions": 4, "budget": 12, "checks": (1, 2, 3)},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require("ddd", "checks", self.checks, "expansions of 0 or more", all(check >= 0 for check in self.checks))
        require("ddd", "threshold", self.threshold, "a number", not math.isnan(self.threshold))

    def stops(self, tree: TokenTree, frontier: Tensor, step: Step, beam: Tensor) -> bool:
        return tree.passes - 1 in self.checks and bool(self.is_lost(tree.path_log_probs[beam]))

    def levels(self) -> StoppedBeamLevels:
        return StoppedBeamLevels(self.width, self.expansions + 1, self._ends)

    def is_lost(self, scores: Tensor) -> Tensor:
        """Whether the answer has probably left a beam of these path log-probabilities: bool []."""
        return scores.double().logsumexp(0) < self.threshold

    def _ends(self, scored: Scored) -> Tensor:
        asked = torch.zeros_like(scored.passes, dtype=torch.bool)
        for check in self.checks:
            asked = asked | (scored.passes == check + 1)
        return asked & self.is_lost(scored.scores)
