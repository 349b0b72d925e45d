"""Gammatune: the EAGLE beam, as deep as recent answers were accepted."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specengine.ops import Flag, Nodes, Step, TokenTree, number
from specengine.policies import Beam, PerDevice, require_each

if TYPE_CHECKING:
    from specengine.records import Outcome


@dataclass
class Gammatune(Beam):
    """The height of the next tree follows a moving average of the accepted length.

    After a cycle that accepted a whole path of the tree's height the next tree is one level higher, else its height
    is the average, rounded, plus one; always within half and one and a half times `height`.

    height  of the first tree, in levels
    rate    weight of the newest accepted length in the average

    Source: Gammatune, Gautam et al. 2025, reconstructed from its description in Learning to Draft, A.1.
    """

    height: int = 8
    rate: float = 0.2

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "chain": {"width": 1, "budget": 14, "height": 5},
        "cpu": {"width": 4, "expansions": 4, "budget": 12, "height": 3},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.expansions + 1
        require_each(
            "gammatune",
            ("height", self.height, f"1 to expansions + 1 = {most}", 1 <= self.height <= most),
            ("rate", self.rate, "above 0, up to 1", 0 < self.rate <= 1),
        )
        self._mean, self._height = float(self.height), self.height
        # int32 [1]: `_height`, as the rule reads it
        self._heights = PerDevice(
            lambda device: torch.tensor([self._height], dtype=torch.int32, device=device)
        )

    def stops(self, tree: TokenTree, frontier: Nodes, step: Step, beam: Nodes) -> Flag:
        return number(tree.passes) >= number(self._heights[tree.device])

    def learn(self, outcome: "Outcome") -> None:
        cycle: Any = outcome.cycle  # there, as it keeps no state on a device
        height = int(cycle.tree.depths.max())
        if not height:
            return
        self._mean += self.rate * (cycle.accepted - self._mean)
        target_height = (self._height if cycle.accepted >= height else round(self._mean)) + 1
        self._height = min(
            max(target_height, -(-self.height // 2)), int(1.5 * self.height), self.expansions + 1
        )
        for height_tensor in self._heights.values():
            height_tensor.fill_(self._height)
