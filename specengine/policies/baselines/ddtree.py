"""DDTree: the likeliest nodes of a tree whose positions are drawn independently of each other, by their marginals."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from specengine import ops
from specengine.ops import Flag, Nodes, Step, TokenTree
from specengine.policies import TreePolicy, require_minimum

MAX_BEAM = 64  # nodes whose distributions, each of the vocabulary, are read at once


@dataclass
class DDTree(TreePolicy):
    """Take the distribution of each of the next `block` positions, and verify the `budget` likeliest nodes.

    A node's probability is the product of its tokens' over the positions of its path, whatever tokens stand there. A
    draft that gives several positions in one pass (`Step.further`) needs one pass per block. Of others each pass brings
    the next position: the distribution after the likeliest path, which the other paths borrow.

    A draft whose positions depend on the token before them (`Step.conditioned`) gives each node its own distribution
    without a pass. Then a node's probability is the product of those along its path, and only nodes that could be
    verified get children.

    budget  nodes verified, the root included; the paper's budgets leave it out
    block   positions

    Source: DDTree, Ringel and Romano 2026 (arXiv 2604.12989), and its repository, whose best-first search with a heap
    finds the same nodes; layer by layer it also runs on a device. Ours: drafts that give one position per pass.
    """

    budget: int = 60
    block: int = 8

    width = 1  # nodes drafted from in a pass

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "dflash": {"budget": 61, "block": 15},
        "cpu": {"budget": 12, "block": 3},
    }

    def __post_init__(self) -> None:
        require_minimum("ddtree", self, budget=2, block=1)

    @property
    def capacity(self) -> int:
        return 1 + (self.budget - 1) * self.block

    @property
    def passes(self) -> int:
        return self.block

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        layer = self.layer(tree, frontier, step)
        return self.beam(tree, layer, step).where(self.unfinished(tree, layer))

    def keep(self, tree: TokenTree) -> Nodes:
        return tree.best_of_all(self.budget)

    def layer(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        """Append a layer for each position that the step holds, and return the last one, the likeliest nodes first."""
        if step.conditioned or self.width > 1:
            least = tree.scores(tree.best_of_all(self.budget)).amin(0, keepdim=True)
            candidates = step.candidates(
                tree, frontier, self.budget - 1, bound=least if step.conditioned else None
            )
            return tree.add(*step.children(frontier, candidates))
        rows = step.logits if step.further is None else torch.cat([step.logits, step.further])
        edges, columns = ops.top_children(rows, self.budget - 1, step.normalized)
        tokens, depth = step.tokens_of(columns), tree.depths.index_select(0, frontier.ids)
        layer = frontier.where(False)
        for place in range(len(rows)):
            at = tree.path_log_probs.masked_fill(tree.depths != depth + place, -math.inf)
            there = (ops.number(frontier.live) > 0) & (ops.number(depth) + place < self.block)
            above = ops.select_best(at, tree.size, self.budget - 1).where(there)
            scores = tree.path_log_probs.index_select(0, above.ids)
            candidates = ops.best_candidates(
                edges[place].expand(len(scores), -1).contiguous(),
                scores,
                above.live,
                self.budget - 1,
                normalized=True,
            )
            layer = tree.add(
                above.ids.index_select(0, candidates.rows),
                tokens[place].index_select(0, candidates.columns),
                candidates.log_probs,
                candidates.live,
            )
        return layer

    def beam(self, tree: TokenTree, layer: Nodes, step: Step) -> Nodes:
        """Return the nodes of a layer to draft from."""
        return tree.best(layer, MAX_BEAM if step.conditioned else self.width)

    def unfinished(self, tree: TokenTree, layer: Nodes) -> Flag:
        """Return whether the block has positions after those of a layer."""
        return (ops.number(layer.live) > 0) & (
            ops.number(tree.depths.index_select(0, layer.ids[:1])) < self.block
        )
