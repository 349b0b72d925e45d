"""Drafting by a DFlash head, which predicts a block of positions in one pass."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.drafters.eagle import EagleDraft
from specengine.models.dflash import DflashHead
from specengine.models.native import NativeDflashHead
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree


class Dflash(EagleDraft):
    """A DFlash head: one pass gives the distribution of each position of a block, whatever stands at the others.

    So nodes of one depth have the same distribution, and only the first step of a tree runs the head. `ddtree` and
    `caddtree` take all positions of that step, other policies one position per step.
    """

    runner, native = DflashHead, NativeDflashHead
    _rows: Tensor  # log-probabilities by depth from the root's children on; the last row proposes nothing

    def root(self, tree: TokenTree) -> Step:
        step = super().root(tree)
        rows = step.logits.float()
        if self._factors is not None and not step.normalized:  # the first is in all logits
            depths = torch.arange(len(rows), device=rows.device, dtype=torch.int64)
            rows = (
                rows
                * (self._factors[depths.clamp(max=len(self._factors) - 1)] / self._factors[0])[
                    :, None
                ]
            )
        rows = rows if step.normalized else rows.log_softmax(-1)
        self._rows = pad(rows, (0, 0, 0, 1), value=-torch.inf)
        return Step(
            rows[:1],
            normalized=True,
            hidden=step.hidden,
            further=rows[1:] if len(rows) > 1 else None,
        )

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        depths = tree.depths.index_select(0, frontier.ids).clamp(max=len(self._rows) - 1)
        return Step(self._rows.index_select(0, depths), normalized=True)
