"""Helpers of tests of draft heads: targets with enough layers for EAGLE-3, rotary settings, and fitting a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from specengine.models.dflash import DflashConfig
from specengine.models.eagle import EagleHead, causal
from tests.toy import VOCABULARY, tiny

LAYERS = 6
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def deep(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A tiny model with layers enough for EAGLE-3."""
    return tiny(family, num_hidden_layers=LAYERS, **changes)


def fit(
    head: EagleHead,
    features: Tensor,
    embeddings: Tensor,
    wanted: Tensor,
    *,
    steps: int,
    depth: int = 1,
) -> EagleHead:
    """The head, trained to say the columns `wanted` [rows] after each row; -100 is not looked at.

    depth: how often rows are run, after the first time on their parents' states, as they are when drafting.
    """
    optimizer = torch.optim.Adam(head.parameters(), 0.01)
    for _ in range(steps):
        hidden, loss = head.fuse(features), torch.zeros(())
        for _ in range(depth):
            recurrent = head(
                hidden[None], embeddings[None], torch.arange(len(hidden))[None], causal
            )[0]
            loss = loss + cross_entropy(head.logits(recurrent), wanted)  # type: ignore[arg-type]
            hidden = torch.cat([hidden[:1], recurrent[:-1]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval()


MASK, BLOCK = 259, 6  # token that stands for a position to predict, and positions of a block
SIZES: dict[str, Any] = {
    "version": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "target_hidden_size": 32,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": VOCABULARY,
    "own_head": False,
    "qk_norm": True,
    "layer_ids": (2, 3, 5),
    "num_layers": 3,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "windows": (0, 0, 0),
    "causal": (False, False, False),
}


def block_config(**changes: Any) -> DflashConfig:
    """Return the config of a DFlash head for a target of `deep`."""
    return DflashConfig(**(SIZES | changes))
