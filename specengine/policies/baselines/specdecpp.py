"""SpecDec++: the EAGLE beam, or a chain, ended when some token on its surest path was probably rejected."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.ops import Flag, Nodes, Step, TokenTree, doubled, is_down, number
from specengine.policies import Beam, PerDevice, _classifier, require_each, require_input


@dataclass
class Specdecpp(Beam):
    """Stop once 1 - a_1 * ... * a_i is above `threshold`, a_j being the acceptance of the j-th token of a path.

    A head predicts each a_j, the probability that a token is accepted if its parent is, from the draft's hidden state
    at the token. Of the paths that were drafted from, the one with the largest product decides; with a width of 1 it
    is the only one, as in the published rule.

    classifier  `auto`: the one that ships; or the path of a file that `specengine train classifier` wrote
    threshold   probability of a rejection, 0 to 1 (h)
    minimum     expansions that are made in any case; `expansions` is the most

    Source: SpecDec++, Huang et al. 2025; head and bounds as in Learning to Draft, A.1.
    """

    classifier: str = "auto"
    threshold: float = 0.3
    minimum: int = 1

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "chain": {"width": 1, "expansions": 19, "budget": 21},
        "cpu": {"width": 4, "expansions": 4, "budget": 12},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require_each(
            "specdecpp",
            ("threshold", self.threshold, "0 to 1", 0 <= self.threshold <= 1),
            (
                "minimum",
                self.minimum,
                f"0 to expansions = {self.expansions}",
                0 <= self.minimum <= self.expansions,
            ),
        )
        self._learned = _classifier.load("specdecpp", self.classifier)
        # by node, and a spare one: product of acceptances from the root
        self._reached = PerDevice(
            lambda device: torch.ones(self.capacity + 1, device=device, dtype=torch.float32)
        )

    def stops(self, tree: TokenTree, frontier: Nodes, step: Step, beam: Nodes) -> Flag:
        states: Any = step.hidden
        require_input(
            "policy specdecpp: it reads the draft's hidden states, which only EAGLE heads give",
            states is not None,
        )
        size = self._learned.facts["hidden_size"]
        require_input(
            f"policy specdecpp.classifier: it was trained on hidden states of width {size}, this draft's have "
            f"{states.shape[-1]}; train one for it with: {_classifier.training_command('specdecpp')}",
            states.shape[-1] == size,
        )
        states = states.to(tree.device)
        reach_probabilities = self._reached[tree.device]
        reach_probabilities[:1].fill_(1.0)  # the root is certain
        passes = number(tree.passes)
        below = passes > 1
        if is_down(below):
            return below
        above = reach_probabilities.index_select(
            0, tree.parents.index_select(0, frontier.ids).clamp(min=0)
        )
        reached = above * self._learned.on[states.device](states)
        if isinstance(below, Tensor):
            reached = reached.masked_fill(~below, 1.0)
        reach_probabilities.index_copy_(0, frontier.masked(frontier.ids, self.capacity), reached)
        doubt = doubled(1 - frontier.masked(reached, 0.0).amax(0, keepdim=True))
        return below & (passes > self.minimum) & (doubt > self.threshold)
