"""Mixing copies into the rows of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from specengine import ops
from specengine.drafters import COPIED, Step
from specengine.drafters._copies import Mixture

UNSEEN = -20.0  # below a row's best logit: columns that only another row has a use for

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


class _Rows(NamedTuple):
    """Rows with room for further columns, and what the log of a probability needs to be one of their values.

    values: [rows, wider vocabulary], scaled to what is left where they are log-probabilities; levels: of each row.
    """

    values: Tensor
    levels: list[float]


def mixed(step: Step, mixtures: Sequence[Mixture | None], places: Places) -> Step:
    """`step` with a mixture in each row that has one: p becomes what is left of p, and what is copied is added.

    Tokens without a column are given one behind the others. Logits stay logits, and log-probabilities stay that.
    """
    copied = chain.from_iterable(mixture.copied for mixture in mixtures if mixture is not None)
    new = {token: 0 for token in copied if token not in places}
    width = step.logits.shape[1]
    new = {token: column for column, token in enumerate(new, width)}
    rows = _log_probabilities(step, mixtures, len(new)) if step.normalized else _logits(step, mixtures, len(new))
    at, gains = [], []
    for row, mixture in enumerate(mixtures):
        if mixture is not None:
            start, level = row * (width + len(new)), rows.levels[row]
            for token, probability in mixture.copied.items():
                at.append(start + (places[token] if token in places else new[token]))
                gains.append(level + math.log(probability))
    device = rows.values.device
    index, flat = torch.tensor(at, device=device), rows.values.view(-1)
    raised = torch.logaddexp(flat.index_select(0, index).float(), torch.tensor(gains, device=device))
    flat.index_copy_(0, index, raised.to(flat.dtype))
    marks = torch.zeros(rows.values.shape, dtype=torch.uint8, device=device)
    marks.view(-1).index_fill_(0, index, COPIED)
    return Step(rows.values, _ids_with(step, list(new)), step.normalized, step.hidden, marks)


def _logits(step: Step, mixtures: Sequence[Mixture | None], more: int) -> _Rows:
    """They are left as they are: against them, what is copied counts by its odds."""
    logits, width = step.logits, step.logits.shape[1]
    values = logits.new_empty(logits.shape[0], width + more)
    values[:, :width] = logits
    log_probs, best = ops.top_children(logits, 1)
    peaks = logits.gather(1, best)
    if more:
        values[:, width:] = peaks + UNSEEN
    sums = (peaks - log_probs)[:, 0].tolist()  # log-sum-exp of each row
    levels = [total if m is None else total - math.log(m.left) for total, m in zip(sums, mixtures, strict=True)]
    return _Rows(values, levels)


def _log_probabilities(step: Step, mixtures: Sequence[Mixture | None], more: int) -> _Rows:
    logits, width = step.logits, step.logits.shape[1]
    values = logits.new_full((logits.shape[0], width + more), -math.inf)
    left = [[0.0 if mixture is None else math.log(mixture.left)] for mixture in mixtures]
    torch.add(logits, torch.tensor(left, dtype=logits.dtype, device=logits.device), out=values[:, :width])
    return _Rows(values, [0.0] * len(left))


def _ids_with(step: Step, new: list[int]) -> Tensor | None:
    """The target's ids of the step's columns and of new ones behind them."""
    if not new:
        return step.token_ids
    device = step.logits.device if step.token_ids is None else step.token_ids.device
    ids = torch.arange(step.logits.shape[1], device=device) if step.token_ids is None else step.token_ids
    return torch.cat([ids, torch.tensor(new, device=device)])
