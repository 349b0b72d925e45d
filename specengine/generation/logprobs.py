"""Log-probabilities of tokens under the target's own distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specengine import ops
from specengine.records import TokenLogprob


def of_rows(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Each row's token among the whole row; logits [rows, vocabulary], count: how many of the likeliest are wanted."""
    scores = logits.float()
    scores = scores.masked_fill(~torch.isfinite(scores), -math.inf)
    rated = scores.log_softmax(-1)
    chosen = rated.gather(1, torch.tensor(tokens, device=logits.device, dtype=torch.int64)[:, None])[:, 0].tolist()
    if not count:
        return [TokenLogprob(token, value, []) for token, value in zip(tokens, chosen, strict=True)]
    best = ops.top_children(scores, count, normalized=True)[1]
    tops = zip(best.tolist(), rated.gather(1, best).tolist(), strict=True)
    return [
        TokenLogprob(token, value, list(zip(*top, strict=True)))
        for token, value, top in zip(tokens, chosen, tops, strict=True)
    ]
