"""Drafting for sampled tokens by the noise that draws them, which a draft can compute as well as the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specengine import ops
from specengine.drafters import Drafter, Wrapped
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree

MEAN = 0.5772  # of the noise
NOISE, NOISE_OF_TRUNCATED = 0.75, 0.5  # shares, of 0, 0.25, 0.5, 0.75 and 1, that let the default draft guess best
MOST_SCALE = 1e4  # of the noise, beside which no logit counts
LEAST_REST = 1e-6  # chance that is always left to what was not proposed


class Coupled(Wrapped):
    """A drafter for sampled answers: the distributions of `drafter` given the noise of the draws.

    The target takes the largest of log p + g, where the noise g is a pure function of seed, position and token. A draft
    that adds the same noise to its own log q guesses the draw instead of the distribution: of two distributions that
    agree in a share of 1 - d the draws agree with a probability of at least (1 - d) / (1 + d), and always where q is p.
    The answer stays the one that plain decoding draws with that seed, as the tree has no say in any choice (Daliri et
    al. 2024, Coupling without Communication, and Drafter-Invariant Speculative Decoding, section 3).

    Log-probabilities become those of being drawn: softmax(z + s T g), s being `Traits.sharpness`. A greedy target takes
    the largest of logits that are off from the draft's by errors of some scale t, and z = logits / t are calibrated to
    that; one that draws at temperature T takes the largest of logits + T g, off by the same errors. Drafts are more
    often right with a part of that noise, `NOISE`, and with less where a truncation leaves unlikely tokens out, which
    the noise would raise. Where a row says only what part of the tokens is likely, the rest counts as one token of mean
    noise. Continuations that need no pass stay as they are: what is copied is mostly sure or wrong, and would be
    guessed worse by the noise.

    seed: int64 [1], 64 bits, and scale: float32 [1], of the noise, on the trees' device; length: of the text, the root
    included, there or on the host.
    """

    def __init__(self, drafter: Drafter, seed: Tensor, scale: Tensor, length: Callable[[], Tensor | int]) -> None:
        super().__init__(drafter)
        self._seed, self._scale, self._length = seed, scale, length

    @staticmethod
    def scale(drafter: Drafter, temperature: float, *, truncated: bool) -> float:
        """Return the scale of the noise for this drafter's logits."""
        share = NOISE_OF_TRUNCATED if truncated else NOISE
        return min(share * temperature * drafter.traits.sharpness, MOST_SCALE)

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        positions = tree.depths.index_select(0, frontier.ids) + self._length()
        further = step.further
        if further is not None:  # positions that follow each other
            behind = torch.arange(1, len(further) + 1, device=positions.device, dtype=torch.int64)
            further = self._guessed(further, step, positions + behind)
        return replace(step, logits=self._guessed(step.logits, step, positions), further=further)

    def _guessed(self, rows: Tensor, step: Step, positions: Tensor) -> Tensor:
        """Return rows of a step with the noise of their positions, int64 [rows]."""
        logits = ops.couple(rows, step.token_ids, positions, self._seed, self._scale)
        if step.normalized:
            rest = (1 - rows.float().exp().sum(1, keepdim=True)).clamp(min=LEAST_REST)
            whole = torch.logaddexp(logits.logsumexp(1, keepdim=True), rest.log() + self._scale * MEAN)
            logits = logits - whole
        return logits
