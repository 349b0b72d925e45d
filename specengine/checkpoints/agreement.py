"""Measure a head's one-step agreement with the target, for each convention of counting the target's layers.

Producers number the same hidden states differently. A head that reads the wrong ones drafts without an error, only
worse, so its agreement is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.models.eagle import EagleConfig, EagleHead, default_layer_ids, embed_for, within
from specengine.models.kv_cache import LanguageModel

CERTAIN = 2.0  # standard errors by which another convention must be better to be reported


@dataclass(frozen=True)
class Convention:
    """A way of counting layers. hits: bool [rows], whether the head's best token was the target's."""

    name: str
    layer_ids: tuple[int, ...]
    hits: Tensor

    @property
    def agreement(self) -> float:
        """Return the share of hits, 0 to 1."""
        return float(self.hits.float().mean())

    def surely_better_than(self, other: Convention) -> bool:
        """Return whether the difference, row by row, is beyond chance."""
        differences = self.hits.float() - other.hits.float()
        error = float(differences.std()) / math.sqrt(len(differences))
        return float(differences.mean()) > CERTAIN * error


def conventions(config: EagleConfig, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the hidden states that the head may have been made for, by name; the config's come first."""
    as_read, usual = config.feature_ids(layers), default_layer_ids(layers)
    if config.version == 1:
        return {"as read": as_read}
    candidates = {
        "as read": as_read,
        "as read, + 1": tuple(i + 1 for i in as_read),
        "as read, - 1": tuple(i - 1 for i in as_read),
        "EAGLE": usual,
        "EAGLE, + 1": tuple(i + 1 for i in usual),
        "EAGLE, - 1": tuple(i - 1 for i in usual),
    }
    distinct: dict[str, tuple[int, ...]] = {}
    for name, ids in candidates.items():
        possible = len(ids) == config.num_features and all(0 <= i < layers for i in ids)
        if possible and ids not in distinct.values():
            distinct[name] = ids
    return distinct


@torch.inference_mode()
def one_step_agreement(
    head: EagleHead, target: LanguageModel, texts: list[list[int]]
) -> list[Convention]:
    """Return each convention's hits over all texts, in order of `conventions`.

    texts: token ids, at least 3 each; drafts are made for text that the target wrote.
    """
    by_name = conventions(head.config, target.layers)
    target.prepare_features(tuple({i for ids in by_name.values() for i in ids}))
    hits = [_hits(head, target, text, list(by_name.values())) for text in texts]
    pooled = torch.cat(hits, dim=1)
    return [
        Convention(name, ids, row) for (name, ids), row in zip(by_name.items(), pooled, strict=True)
    ]


def _hits(
    head: EagleHead, target: LanguageModel, text: list[int], candidates: list[tuple[int, ...]]
) -> Tensor:
    """Return whether the head's best token after each token but the first is the target's: bool [candidates, rows]."""
    device, count = target.device, len(text)
    tokens = torch.tensor(text, device=device, dtype=torch.int64)
    read = tuple(sorted({i for ids in candidates for i in ids}))
    logits, features = target.extend(target.new_cache(count), text, read, logits="all")
    assert logits is not None
    assert features is not None
    state_of = dict(zip(read, features.chunk(len(read), dim=-1), strict=True))
    embeddings = embed_for(head, target, tokens[1:])
    side_by_side = (torch.cat([state_of[i] for i in ids], dim=-1) for ids in candidates)
    return torch.stack(
        [_guesses(head, target, states, embeddings) for states in side_by_side]
    ) == logits[1:].argmax(-1)


def _guesses(
    head: EagleHead, target: LanguageModel, features: Tensor, embeddings: Tensor
) -> Tensor:
    """Return the head's best token after each token but the first, int64 [rows]; features: one row more."""
    hidden = head.fuse(features[:-1].to(head.dtype))
    positions = torch.arange(len(hidden), device=hidden.device, dtype=torch.int64)
    states = head(
        hidden[None], embeddings[None], positions[None], within(head.config.sliding_window)
    )[0]
    logits = head.logits(states)
    if logits is None:
        logits = target.head(head.readout(states))
    best, target_ids = logits.argmax(-1), head.target_ids()
    return best if target_ids is None else target_ids[best]
