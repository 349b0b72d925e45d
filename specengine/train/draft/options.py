"""Options of training a draft head, its losses by name, and recipes: settings for a kind of machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from specengine.errors import require, require_known, require_minimum
from specengine.train.text.options import SynthesisOptions

LossName = Literal["eagle", "hass", "ttt", "talf"]


@dataclass(frozen=True)
class Loss:
    """A training loss.

    name           the method that the loss comes from
    steps          consecutive predictions from each position, 1 or more; for `talf`, depths of the tree
    width          nodes per depth of the target's tree, 0 or more; 0: follow the text instead of a tree
    anchors        share of the positions from which the steps after the first are unrolled, drawn for each batch,
                   above 0, up to 1
    cross_entropy  weight of the cross-entropy with the target's distribution, 0 or more
    top_k          number of the target's best tokens for `top_weight`, 1 or more
    top_weight     weight of the cross-entropy over the `top_k` best tokens, 0 or more
    regression     weight of the smooth L1 distance to the target's hidden state, averaged over its channels, 0 or more
    decay          step j has weight decay**j, above 0, up to 1
    detach         true: stop gradients between steps
    noise          width of the uniform noise on the features for sequences of 512 tokens, 0 or more; narrower for
                   longer ones
    """

    name: LossName
    steps: int
    width: int = 0
    anchors: float = 1.0
    cross_entropy: float = 1.0
    top_k: int = 10
    top_weight: float = 0.0
    regression: float = 0.0
    decay: float = 1.0
    detach: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        require_minimum(self, steps=1, width=0, top_k=1, cross_entropy=0, top_weight=0, regression=0, noise=0)
        for field in ("anchors", "decay"):
            require(field, value := getattr(self, field), "above 0, up to 1", 0 < value <= 1)


# EAGLE: Li et al. 2024, weights of its code. HASS: Zhang et al. 2025, three steps, top 10. EAGLE-3's training-time
# test: Li et al. 2025. TALF: k = 4, depth 3, no regression, gradients through the steps.
LOSSES: dict[str, Loss] = {
    "eagle": Loss("eagle", steps=1, regression=1.0, cross_entropy=0.1, noise=0.2),
    "hass": Loss("hass", steps=3, regression=1.0, cross_entropy=0.1, top_weight=1.0, detach=True),
    "ttt": Loss("ttt", steps=7, decay=0.8),
    "talf": Loss("talf", steps=3, width=4),
}


def make_loss(name: str, **changes: Any) -> Loss:
    """Return the loss of this name, with `changes` to its settings. Raise InputError for an unknown name."""
    return replace(require_known("loss", name, LOSSES), **changes)


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


@dataclass(frozen=True)
class Recipe:
    about: str
    text: SynthesisOptions
    training: TrainOptions
    loss: Loss


RECIPES = {
    "cpu-small": Recipe(
        "two CPU cores; 89 minutes for a model of 135M parameters, text included, with other work on the machine",
        SynthesisOptions(tokens=650_000, rows=128, length=512),
        TrainOptions(
            steps=1700, batch_tokens=1024, lengths=(512, 1024), learning_rate=1e-3, validate_every=500, save_every=50
        ),
        make_loss("ttt", steps=3, anchors=0.5),
    ),
    "gpu": Recipe(
        "one large GPU, tens of minutes for small models; not measured",
        SynthesisOptions(tokens=30_000_000, rows=1024, length=1024),
        TrainOptions(
            steps=12_000, batch_tokens=8192, lengths=(1024, 2048), learning_rate=5e-4, keep_gib=0.0, validate_every=1000
        ),
        make_loss("ttt", steps=5),
    ),
}


def find_recipe(name: str) -> Recipe:
    return require_known("recipe", name, RECIPES)
