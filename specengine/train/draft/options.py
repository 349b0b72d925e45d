"""Options of training a draft head, its losses by name, and recipes: settings for a kind of machine."""

# ruff: noqa: RUF009 (option returns dataclasses.field)

from dataclasses import MISSING, dataclass, replace
from typing import Any, Literal

from specengine.errors import (
    ABOVE_0,
    Checked,
    at_least,
    number,
    one_of,
    option,
    require,
    require_known,
)
from specengine.train.text import SynthesisOptions

LossName = Literal["eagle", "hass", "ttt", "talf", "dflash"]
PART = number(0, 1, "0 to below 1", open_high=True)
SHARE = number(0, 1, "above 0, up to 1", open_low=True)


@dataclass(frozen=True)
class Loss(Checked):
    """A training loss."""

    name: LossName = option(
        default=MISSING,
        help="the method that the loss comes from",
    )
    steps: int = option(
        at_least(1),
        default=MISSING,
        help="consecutive predictions from each position, 1 or more; for `talf`, depths of the tree; for `dflash`, "
        "positions that a block predicts",
    )
    width: int = option(
        at_least(0),
        default=0,
        help="nodes per depth of the target's tree, 0 or more; 0: follow the text instead of a tree",
    )
    anchors: float = option(
        SHARE,
        default=1.0,
        help="share of the positions from which the steps after the first are unrolled, for `dflash` the first too, "
        "drawn for each batch, above 0, up to 1",
    )
    cross_entropy: float = option(
        at_least(0),
        default=1.0,
        help="weight of the cross-entropy with the target's distribution, 0 or more",
    )
    top_k: int = option(
        at_least(1),
        default=10,
        help="number of the target's best tokens for `top_weight`, 1 or more",
    )
    top_weight: float = option(
        at_least(0),
        default=0.0,
        help="weight of the cross-entropy over the `top_k` best tokens, 0 or more",
    )
    regression: float = option(
        at_least(0),
        default=0.0,
        help="weight of the smooth L1 distance to the target's hidden state, averaged over its channels, 0 or more",
    )
    decay: float = option(
        SHARE,
        default=1.0,
        help="step j has weight decay**j, above 0, up to 1",
    )
    detach: bool = option(
        default=False,
        help="true: stop gradients between steps",
    )
    noise: float = option(
        at_least(0),
        default=0.0,
        help="width of the uniform noise on the features for sequences of 512 tokens, 0 or more; narrower for "
        "longer ones",
    )


# EAGLE: Li et al. 2024, weights of its code. HASS: Zhang et al. 2025, three steps, top 10. EAGLE-3's training-time
# test: Li et al. 2025. TALF: k = 4, depth 3, no regression, gradients through the steps; its paper trains EAGLE's and
# HASS's heads with other weights than their code has. DFlash: Chen et al. 2026, blocks of 8, whose weights fall with
# exp(-1 / 4) per position; its paper draws 512 blocks from 3,072 tokens.
LOSSES: dict[str, Loss] = {
    "eagle": Loss("eagle", steps=1, regression=1.0, cross_entropy=0.1, noise=0.2),
    "hass": Loss("hass", steps=3, regression=1.0, cross_entropy=0.1, top_weight=1.0, detach=True),
    "ttt": Loss("ttt", steps=7, decay=0.8),
    "talf": Loss("talf", steps=3, width=4),
    "dflash": Loss("dflash", steps=7, anchors=0.17, decay=0.78),
    "eagle-paper": Loss("eagle", steps=1, regression=1.0, cross_entropy=10.0, noise=0.2),
    "hass-paper": Loss(
        "hass", steps=3, regression=1.0, cross_entropy=10.0, top_weight=10.0, detach=True
    ),
}


def make_loss(name: str, **changes: Any) -> Loss:
    """Return the loss of this name, with `changes` to its settings. Raise InputError for an unknown name."""
    return replace(require_known("loss", name, LOSSES), **changes)


@dataclass(frozen=True)
class TrainOptions(Checked):
    """Options of training a draft."""

    head: Literal["auto", "eagle1", "eagle3", "dflash"] = option(
        one_of(("auto", "eagle1", "eagle3", "dflash")),
        default="auto",
        help="eagle1, eagle3 or dflash; auto: the one that the loss is made for",
    )
    layers: int = option(
        at_least(0),
        default=0,
        help="decoder layers of a DFlash head, 0 or more; 0: two",
    )
    steps: int = option(
        at_least(1),
        default=2000,
        help="optimiser steps, 1 or more",
    )
    batch_tokens: int = option(
        at_least(8),
        default=2048,
        help="tokens per step, 8 or more; at least one of the longest sequences",
    )
    lengths: tuple[int, ...] = option(
        default=(512, 1024, 512, 2048),
        help="lengths of the sequences in tokens, 8 to batch_tokens each, used in turn. A sequence has several "
        "whole texts, so that a draft of short texts sees long contexts too",
    )
    learning_rate: float = option(
        ABOVE_0,
        default=1e-3,
        help="peak learning rate, above 0; falls to 0 on a cosine",
    )
    warmup: float = option(
        PART,
        default=0.03,
        help="share of the steps in which the learning rate rises, 0 to below 1",
    )
    weight_decay: float = option(
        at_least(0),
        default=0.0,
        help="weight decay of AdamW, 0 or more",
    )
    average: float = option(
        PART,
        default=0.0,
        help="decay of the running average of the weights, 0 to below 1; lower in the first steps. The average is "
        "measured and saved; 0: the weights themselves",
    )
    clip: float = option(
        ABOVE_0,
        default=0.5,
        help="maximum norm of the gradient, above 0",
    )
    draft_vocab_size: int = option(
        at_least(-1),
        default=-1,
        help="size of an EAGLE-3 head's vocabulary, -1 or more: the most frequent tokens of the answers; -1: 8,192 to "
        "32,768, as few as make up 99 % of the answers; 0: the target's whole vocabulary. The head in `start` keeps "
        "its tokens, and gets those that it lacks, unless 0",
    )
    kv_heads: int = option(
        at_least(0),
        default=0,
        help="KV heads of the draft's attention, 0 or more; 0: as many as the target has",
    )
    intermediate_size: int = option(
        at_least(-1),
        default=0,
        help="units of the draft's MLP, -1 or more; 0: as many as the target, or the head in `start`, has; -1: the "
        "same, but of a target at most 2,048. Units can be added to a head in `start`, or removed; of more units those "
        "with the largest weights are kept",
    )
    start: str = option(
        default="target",
        help="target: start from the target's head, final norm and last layer; random; or the path of a head",
    )
    autocast: bool = option(
        default=True,
        help="true: run in bfloat16 if the weights are float32 and the device multiplies it",
    )
    held_back: float = option(
        PART,
        default=0.02,
        help="share of the texts that is not trained on, 0 to below 1",
    )
    temperatures: bool = option(
        default=True,
        help="true: at the end, fit a temperature for each depth on held-back text, so that the head's "
        "probabilities are chances of acceptance",
    )
    validate_every: int = option(
        at_least(1),
        default=200,
        help="steps between validations, 1 or more",
    )
    save_every: int = option(
        at_least(1),
        default=100,
        help="steps between saved states, 1 or more",
    )
    seed: int = option(
        at_least(0),
        default=0,
        help="seed of the order of the texts and of new weights, 0 or more",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fit = (
            bool(self.lengths) and min(self.lengths) >= 8 and max(self.lengths) <= self.batch_tokens
        )
        require("lengths", self.lengths, f"8 to batch_tokens = {self.batch_tokens} each", fit)


@dataclass(frozen=True)
class TrainingRecipe:
    about: str
    text: SynthesisOptions
    training: TrainOptions
    loss: Loss


RECIPES = {
    "cpu-small": TrainingRecipe(
        "two CPU cores; 89 minutes for a model of 135M parameters, text included, with other work on the machine",
        SynthesisOptions(tokens=650_000, rows=64, length=512),
        TrainOptions(
            steps=1700,
            batch_tokens=1024,
            lengths=(512, 1024),
            learning_rate=1e-3,
            intermediate_size=-1,
            validate_every=500,
            save_every=50,
        ),
        make_loss("ttt", steps=3, anchors=0.5),
    ),
    "gpu": TrainingRecipe(
        "one large GPU, tens of minutes for small models; not measured",
        SynthesisOptions(tokens=30_000_000, rows=1024, length=1024),
        TrainOptions(
            steps=12_000,
            batch_tokens=8192,
            lengths=(1024, 2048),
            learning_rate=5e-4,
            validate_every=1000,
        ),
        make_loss("ttt", steps=5),
    ),
}
