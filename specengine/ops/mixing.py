"""The op that mixes a few further probabilities into rows of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops._registry import attached, op
from specengine.ops.select import require_logits, top_children

OUTSIDE = "places: not all of them are in the rows"
FAINT = -20.0  # below a row's best logit: further columns that the row has no use for


@op
def mix_rows(
    logits: Tensor,
    more: int,
    left: Sequence[float],
    places: Sequence[int],
    probabilities: Sequence[float],
    normalized: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows, `more` columns wider, of whose distribution the share `left` stays, and where some columns gain.

    logits: float32, bfloat16 or float16 [rows, V]; `normalized` says that they are log-probabilities already, and so
    are the results; results for logits are logits, in which what was there stays as it is. left: above 0, at most 1,
    for each row; places: distinct, row * (V + more) + column, each in a row of which less than 1 is left;
    probabilities: above 0, what each of these gains. Further columns that gain nothing have a probability next to 0, or
    of 0 where `normalized`.

    Returns the rows, and uint8 alike: 1 for what has gained.
    """
    require_logits(logits)
    if len(left) != len(logits) or len(places) != len(probabilities) or more < 0:
        given = len(left), len(logits), len(places), len(probabilities), more
        raise InputError(f"left, logits, places, probabilities, more: n, n, m, m, 0 or more are needed, got {given}")
    if run := attached("mix_rows", logits):
        return run(logits, more, left, places, probabilities, normalized)
    columns, device = logits.shape[1], logits.device
    logs = torch.tensor([math.log(share) for share in left], device=device, dtype=torch.float32)[:, None]
    if normalized:
        levels, filler = torch.zeros_like(logs), torch.full_like(logs, -math.inf)
        kept = logits + logs.to(logits.dtype)
    else:
        log_probs, best = top_children(logits, 1)
        peaks = logits.gather(1, best).float()
        levels, filler, kept = peaks - log_probs - logs, peaks + FAINT, logits
    mixed = torch.cat([kept, filler.to(logits.dtype).expand(-1, more)], 1)
    raised = torch.zeros(mixed.shape, dtype=torch.uint8, device=device)
    if not all(0 <= place < mixed.numel() for place in places):
        raise InputError(OUTSIDE)
    index = torch.tensor(list(places), dtype=torch.int64, device=device)
    gains = torch.tensor(list(probabilities), dtype=torch.float32, device="cpu")
    flat, added = mixed.view(-1), gains.to(device).log() + levels[index // (columns + more), 0]
    flat[index] = torch.logaddexp(flat[index].float(), added).to(logits.dtype)
    raised.view(-1)[index] = 1
    return mixed, raised
