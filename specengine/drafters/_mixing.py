"""Mixing copies into the rows of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specengine import ops
from specengine.drafters import Step
from specengine.drafters._copies import Mixture

Places = Mapping[int, int] | range  # the column of each target id that a step has one for


class Columns:
    """Finds the columns of tokens; remembers the draft's vocabulary, which is that of most steps."""

    def __init__(self) -> None:
        self._ids: Tensor | None = None
        self._places: dict[int, int] = {}

    def of(self, step: Step) -> Places:
        if step.token_ids is None:
            return range(step.logits.shape[1])
        if step.token_ids is not self._ids:
            self._ids = step.token_ids
            self._places = {token: column for column, token in enumerate(self._ids.tolist())}
        return self._places


def mixed(step: Step, mixtures: Sequence[Mixture | None], columns: Places) -> Step:
    """`step` with a mixture in each row that has one: p becomes what is left of p, and what is copied is added.

    mixtures: of the rows that are not padding. Tokens without a column are given one behind the others. Logits stay
    logits, and log-probabilities stay that.
    """
    width = step.logits.shape[1]
    copied = [mixture.copied if mixture is not None else {} for mixture in mixtures]
    new = {token: 0 for row in copied for token in row if token not in columns}
    new = {token: column for column, token in enumerate(new, width)}
    places = [
        row * (width + len(new)) + (columns[token] if token in columns else new[token])
        for row, tokens in enumerate(copied)
        for token in tokens
    ]
    gains = [probability for row in copied for probability in row.values()]
    left = [1.0 if mixture is None else mixture.left for mixture in mixtures]
    left += [1.0] * (step.logits.shape[0] - len(left))
    # what has gained is marked with 1, which is COPIED
    logits, marks = ops.mix_rows(step.logits, len(new), left, places, gains, step.normalized)
    return Step(logits, _ids_with(step, list(new)), step.normalized, step.hidden, marks)


def _ids_with(step: Step, new: list[int]) -> Tensor | None:
    """The target's ids of the step's columns and of new ones behind them."""
    if not new:
        return step.token_ids
    device = step.logits.device if step.token_ids is None else step.token_ids.device
    ids = step.token_ids
    if ids is None:
        ids = torch.arange(step.logits.shape[1], device=device, dtype=torch.int64)
    return torch.cat([ids, torch.tensor(new, device=device, dtype=torch.int64)])
