"""How a draft is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from specengine.errors import require, require_minimum


@dataclass(frozen=True)
class TrainOptions:
    """How a draft is trained.

    head               eagle1 or eagle3; auto: what the loss is made for
    steps              optimiser steps, 1 or more
    batch_tokens       tokens of a step, 8 or more; at least one of the longest sequences
    lengths            of the sequences, in tokens, 8 to batch_tokens each, taken in turn: whole texts one behind the
                       other, so that a draft of short texts knows long contexts too
    learning_rate      at its peak, above 0; falls to 0 on a cosine
    warmup             share of the steps in which the learning rate rises, 0 to below 1
    weight_decay       of AdamW, 0 or more
    average            share of its past that the average of the weights keeps at each step, 0 to below 1; less in the
                       first steps. What is measured and saved is the average; 0: the weights themselves
    clip               norm that the gradient is scaled down to, above 0
    draft_vocab_size   of an EAGLE-3 head: so many of the answers' most frequent tokens, 0 or more; 0: all of the
                       target's. A head to start from that has fewer of them takes in the missing ones, but with 0
    kv_heads           of the draft's attention, 0 or more; 0: as many as the target has
    intermediate_size  units of the draft's MLP, 0 or more; 0: the target's, or those of the head to start from, which
                       may also become more, or fewer: those of the largest weights
    start              target: from the target's head, final norm and last layer; random; or the path of a head
    autocast           true: run in bfloat16 where the weights are kept in float32
    held_back          share of the texts that nothing is learnt from, 0 to below 1
    keep_gib           GiB of main memory for the target's hidden states, which later epochs need not compute again,
                       0 or more
    temperatures       true: at the end, fit one for each depth on the text that was held back, for the head's
                       probabilities to be the chances that policies take them for
    validate_every     steps from one validation to the next, 1 or more
    save_every         steps from one saved state to the next, 1 or more
    seed               of the order of the texts and the weights drawn, 0 or more
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
