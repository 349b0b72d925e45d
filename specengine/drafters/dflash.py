"""Drafting by a DFlash head, which predicts a block of positions in one pass."""

import time
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.drafters.eagle import EagleDraft
from specengine.models.dflash import DflashHead
from specengine.models.native import NativeDflashHead
from specengine.ops import Nodes, Step, TokenTree

# Tokens of a position that are corrected, its likeliest ones, as by dspark_draft_topk of vLLM: each level of a tree
# would else read DSpark's table of the whole vocabulary.
MAX_CORRECTED = 1024


class Dflash(EagleDraft):
    """A DFlash head: one pass gives the distribution of each position of a block, whatever stands at the others.

    So nodes of one depth have the same distribution, and only the first step of a tree runs the head. `ddtree` and
    `caddtree` take all positions of that step, other policies one position per step. Of a head whose positions are
    corrected by the token before them, DSpark's and DFlash2's, each step gives each node the distribution after it;
    of Domino's and of recurrent ones, the distribution after its path.
    """

    runner, native, counts = DflashHead, NativeDflashHead, False
    # By depth from the root's children on: log-probabilities, or logits of _columns to be corrected by the token
    # before; the last row proposes nothing.
    _rows: Tensor
    _hidden: Tensor | None = None  # states that corrections read, by depth, [depths, hidden size]
    _columns: Tensor | None = None  # those that any position proposes, ascending; None: all
    _ids: Tensor | None = None  # the target's of these columns, as in a Step
    _scales: Tensor  # of corrections, by depth, [depths, 1]
    # By node, the last one before the root: the recurrent state after its path, and whether it was computed.
    _memory: Tensor
    _ready: Tensor

    def root(self, tree: TokenTree) -> Step:
        step = super().root(tree)
        config = cast(DflashHead, self.head).config
        rows = step.logits.float()
        self._scales = torch.ones_like(rows[:, :1])
        if self._factors is not None and not step.normalized:  # the first is in all logits
            depths = torch.arange(len(rows), device=rows.device, dtype=torch.int64)
            self._scales = self._factors[depths.clamp(max=len(self._factors) - 1)][:, None]
            rows = rows * (self._scales / self._factors[0])
        self._scales[: config.uncorrected] = 0
        # none where a prompt of one token has run nothing
        self._hidden = step.hidden if config.rank else None
        nodes, size = len(tree.parents) + 1, config.rank if config.recurrent else config.gru_size
        self._memory = rows.new_zeros(nodes, size, dtype=self.head.dtype)
        self._ready = torch.arange(nodes, dtype=torch.int64, device=rows.device) == nodes - 1
        self._columns, self._ids = None, step.token_ids
        most = min(config.candidates or MAX_CORRECTED, rows.shape[1])
        if self._hidden is not None and (config.candidates or most < rows.shape[1]):
            best = rows.topk(most)
            rows = torch.full_like(rows, -torch.inf).scatter_(1, best.indices, best.values)
            self._columns = best.indices.unique()
            self._ids = step.tokens_of(self._columns)
            rows = rows.index_select(1, self._columns)
        elif self._hidden is None and not step.normalized:
            rows = rows.log_softmax(-1)
        self._rows = pad(rows, (0, 0, 0, 1), value=-torch.inf)
        return replace(
            self.step(tree, tree.root_alone()),
            hidden=None if step.hidden is None else step.hidden[:1],
            further=rows[1:] if self._hidden is None and len(rows) > 1 else None,
        )

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        depths = tree.depths.index_select(0, frontier.ids).clamp(max=len(self._rows) - 1)
        rows = self._rows.index_select(0, depths)
        if self._hidden is None:
            return Step(rows, self._ids, normalized=True)
        began = time.perf_counter()
        places = depths.clamp(max=len(self._hidden) - 1)
        added = cast(DflashHead, self.head).corrections(
            self._latents(tree, frontier.ids, self._hidden), self._columns
        )
        rows = (rows + added.float() * self._scales[places]).log_softmax(-1)
        rows.masked_fill_((depths > places)[:, None], -torch.inf)  # not a number there
        self.model_seconds += time.perf_counter() - began
        return Step(rows, self._ids, normalized=True, conditioned=True)

    def _latents(self, tree: TokenTree, nodes: Tensor, hidden: Tensor) -> Tensor:
        """Return the factors of the corrections after nodes, [nodes, rank].

        Ancestors that no step has run, as copied ones, are run before.
        """
        groups, latents, parents = [nodes], hidden, tree.parents
        while self._memory.shape[1] and len(
            before := (above := parents[groups[0]])[~self._ready[above]].unique()
        ):
            groups.insert(0, before)
        for group in groups:
            states = hidden[tree.depths[group].clamp(max=len(hidden) - 1)]
            latents, self._memory[group] = cast(DflashHead, self.head).latents(
                tree.tokens[group], states, self._memory[parents[group]]
            )
            self._ready[group] = True
        return latents
