"""C2T: a classifier of 241 parameters decides, layer by layer, which candidates enter the tree."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specengine import ops
from specengine.ops import Nodes, Step, TokenTree, is_down
from specengine.policies import (
    TreePolicy,
    _classifier,
    require,
    require_minimum,
    require_minimum_or_none,
)


@dataclass
class C2t(TreePolicy):
    """Each parent's best `children` are classified by path probability, entropy of the parent's distribution and depth.

    Candidates with a confidence of at least `beta` enter the tree, of these the `layer` most confident per layer, but
    none of probability 0; all of them are drafted from next and verified. With `children` 1 the tree is a chain that
    ends before the first token of low confidence.

    classifier  `auto`: the one that ships; or the path of a file that `specengine train classifier` wrote
    beta        confidence in 0 to 1; none: the one that the classifier's file was calibrated to
    children    candidates per parent (the paper's first top-K)
    layer       nodes per layer (its second top-K); none: as many as are confident
    max_depth   greatest depth of a node
    top         likeliest tokens that the entropy is summed over (M); none: as in the classifier's training
    min_level1  nodes at depth 1 that stay even if none is confident; 0 is the paper's rule
    hard_cap    nodes in all, the root included; a layer that would pass it keeps its most confident

    Source: C2T, section 4 and Algorithm 1. What beta means depends on how the classifier was trained: the file says.
    """

    classifier: str = "auto"
    beta: float | None = None
    children: int = 10
    layer: int | None = 10
    max_depth: int = 10
    top: int | None = None
    min_level1: int = 1
    hard_cap: int = 256

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"beta": 0.5, "min_level1": 0},
        "beta-0.65": {"beta": 0.65, "max_depth": 6, "min_level1": 0},
        "beta-0.85": {"beta": 0.85, "max_depth": 6, "min_level1": 0},
        "chain": {"beta": 0.85, "children": 1, "layer": None, "min_level1": 0},
        "cpu": {"beta": 0.2, "children": 4, "layer": 6, "max_depth": 2},
    }

    def __post_init__(self) -> None:
        require("c2t", "beta", self.beta, "0 to 1, or none", 0 <= (self.beta or 0) <= 1)
        require_minimum_or_none("c2t", self, "layer", "top")
        require_minimum("c2t", self, children=1, max_depth=1, hard_cap=1, min_level1=0)
        self._learned = _classifier.load("c2t", self.classifier)

    @property
    def threshold(self) -> float:
        """Return the confidence threshold in use."""
        return float(self._learned.facts["beta"]) if self.beta is None else self.beta

    @property
    def capacity(self) -> int:
        widest, total = 1, 1
        for _ in range(self.max_depth):
            widest = min(widest * self.children, self.layer or self.hard_cap)
            total = min(total + widest, self.hard_cap)
        return total

    @property
    def rows(self) -> int:
        return self.layer or self.hard_cap

    @property
    def passes(self) -> int:
        return self.max_depth

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        log_probs, tokens = step.best_children(self.children)
        paths = tree.path_log_probs.index_select(0, frontier.ids)[:, None] + log_probs
        passes, parts = ops.number(tree.passes), self._learned.parts[tree.device]
        depth = ops.held(passes + (self._learned.facts["depth_base"] - 1))
        entropy = (
            step.entropy(int(self.top or self._learned.facts["top"]))
            if self._learned.facts.get("entropy", True)
            else paths.new_zeros(paths.shape[0])
        )
        confidence = ops.classify_paths(paths, entropy, depth, parts)
        confidence = confidence.masked_fill(log_probs == -math.inf, -math.inf)
        proposed, room = (
            ops.held(ops.number(frontier.live) * tokens.shape[1]),
            ops.held(self.hard_cap - ops.number(tree.size)),
        )
        selected = self.select(confidence.reshape(-1), proposed, tree.passes, room)
        parents = frontier.ids.index_select(0, selected.ids // tokens.shape[1])
        tokens, log_probs = (
            values.reshape(-1).index_select(0, selected.ids) for values in (tokens, log_probs)
        )
        nodes = tree.add(parents, tokens, log_probs, selected.live)
        return nodes.where((passes < self.max_depth) & (ops.number(tree.size) < self.hard_cap))

    def select(self, confidence: Tensor, proposed: Tensor, level: Tensor, room: Tensor) -> Nodes:
        """Select from the first `proposed` candidates of a layer, ascending; among equals the earlier ones.

        confidence: float32 [m], -inf for what was not proposed; level, 1 for the root's children, and room, nodes left:
        int32 [1].
        """
        most = min(self.rows, confidence.shape[0])
        confident = ops.select_best(
            confidence.masked_fill(confidence < self.threshold, -math.inf), proposed, most, room
        )
        few = (ops.number(level) == 1) & (ops.number(confident.live) < self.min_level1)
        if is_down(few):
            return confident
        least = ops.select_best(confidence, proposed, most, room.clamp(max=self.min_level1))
        return Nodes(
            ops.held(ops.where(few, least.ids, confident.ids)),
            ops.held(ops.where(few, least.live, confident.live)),
        )
