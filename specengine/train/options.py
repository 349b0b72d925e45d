"""Options of training a draft head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from specengine.errors import require, require_minimum


@dataclass(frozen=True)
class TrainOptions:
    """Options of training a draft.

    head               eagle1 or eagle3; auto: the one that the loss is made for
    steps              optimiser steps, 1 or more
    batch_tokens       tokens per step, 8 or more; at least one of the longest sequences
    lengths            lengths of the sequences in tokens, 8 to batch_tokens each, used in turn. A sequence has several
                       whole texts, so that a draft of short texts sees long contexts too
    learning_rate      peak learning rate, above 0; falls to 0 on a cosine
    warmup             share of the steps in which the learning rate rises, 0 to below 1
    weight_decay       weight decay of AdamW, 0 or more
    average            decay of the running average of the weights, 0 to below 1; lower in the first steps. The average
                       is measured and saved; 0: the weights themselves
    clip               maximum norm of the gradient, above 0
    draft_vocab_size   size of an EAGLE-3 head's vocabulary, 0 or more: the most frequent tokens of the answers; 0: the
                       target's whole vocabulary. With `start`, a head with fewer tokens gets the missing ones, unless 0
    kv_heads           KV heads of the draft's attention, 0 or more; 0: as many as the target has
    intermediate_size  units of the draft's MLP, 0 or more; 0: as many as the target, or the head in `start`, has. With
                       `start`, units can be added, or removed: those with the largest weights are kept
    start              target: start from the target's head, final norm and last layer; random; or the path of a head
    autocast           true: run in bfloat16 if the weights are float32
    held_back          share of the texts that is not trained on, 0 to below 1
    keep_gib           GiB of main memory for the target's hidden states, which later epochs then need not compute
                       again, 0 or more
    temperatures       true: at the end, fit a temperature for each depth on held-back text, so that the head's
                       probabilities are chances of acceptance
    validate_every     steps between validations, 1 or more
    save_every         steps between saved states, 1 or more
    seed               seed of the order of the texts and of new weights, 0 or more
    """

    head: Literal["auto", "eagle1", "eagle3"] = "auto"
    steps: int = 2000
    batch_tokens: int = 2048
    lengths: tuple[int, ...] = (512, 1024, 512, 2048)
    learning_rate: float = 1e-3
    warmup: float = 0.03
    weight_decay: float = 0.0
    average: float = 0.0
    clip: float = 0.5
    draft_vocab_size: int = 8192
    kv_heads: int = 0
    intermediate_size: int = 0
    start: str = "target"
    autocast: bool = True
    held_back: float = 0.02
    keep_gib: float = 6.0
    temperatures: bool = True
    validate_every: int = 200
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        require_minimum(self, steps=1, batch_tokens=8, draft_vocab_size=0, kv_heads=0, intermediate_size=0)
        require_minimum(self, validate_every=1, save_every=1, seed=0)
        fit = bool(self.lengths) and min(self.lengths) >= 8 and max(self.lengths) <= self.batch_tokens
        require("lengths", self.lengths, f"8 to batch_tokens = {self.batch_tokens} each", fit)
        require("head", repr(self.head), "auto, eagle1, eagle3", self.head in ("auto", "eagle1", "eagle3"))
        for name in ("learning_rate", "clip"):
            require(name, value := getattr(self, name), "above 0", 0 < value < math.inf)
        for name in ("weight_decay", "keep_gib"):
            require(name, value := getattr(self, name), "0 or more", 0 <= value < math.inf)
        for name in ("warmup", "held_back", "average"):
            require(name, value := getattr(self, name), "0 to below 1", 0 <= value < 1)
