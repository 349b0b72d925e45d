"""DyMax: a chain that ends where the draft's best token is improbable."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from specengine.ops import Nodes, Step, TokenTree, is_down, number
from specengine.policies import require
from specengine.policies.baselines.chain import Chain


@dataclass
class DyMax(Chain):
    """Greedy draft tokens while each has a probability of `threshold` or more; the first is always proposed.

    Source: C2T, Table 7.
    """

    length: int = 10
    threshold: float = 0.3

    ends_early = True
    judges_path: ClassVar[bool] = False  # by the probability of the path to it, not by its own
    presets: ClassVar[dict[str, dict[str, Any]]] = {"c2t-table7": {}}

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            type(self).__name__.lower(),
            "threshold",
            self.threshold,
            "0 to 1",
            0 <= self.threshold <= 1,
        )

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        log_probs, tokens = step.best_children(1)
        passes, edge = number(tree.passes), number(log_probs[0])
        above = (
            number(tree.path_log_probs.index_select(0, frontier.ids)) if self.judges_path else 0.0
        )
        # logarithms are compared, as a probability's rounding would differ between devices
        sure = above + edge >= (math.log(self.threshold) if self.threshold else -math.inf)
        proposed = (edge > -math.inf) & (sure | (passes == 1))
        if is_down(proposed):
            return frontier.where(proposed)
        nodes = tree.add_children(frontier.where(proposed), tokens, log_probs)
        return nodes.where(sure & (passes < self.length))
