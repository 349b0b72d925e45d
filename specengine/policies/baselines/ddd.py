"""DDD: the EAGLE beam, ended when the probability that it still holds the answer is low."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from specengine.ops import Flag, Nodes, Step, TokenTree, doubled, is_down, number
from specengine.policies import Beam, require_each


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
        require_each(
            "ddd",
            (
                "checks",
                self.checks,
                "expansions of 0 or more",
                all(check >= 0 for check in self.checks),
            ),
            ("threshold", self.threshold, "a number", not math.isnan(self.threshold)),
        )

    def stops(self, tree: TokenTree, frontier: Nodes, step: Step, beam: Nodes) -> Flag:
        passes = number(tree.passes)
        checks: Flag = sum(passes == check + 1 for check in self.checks) > 0
        return (
            checks
            if is_down(checks)
            else checks & (doubled(tree.scores(beam)).logsumexp(0) < self.threshold)
        )
