"""Recipes: settings for a kind of machine."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.errors import require_known
from specengine.train.draft.options import Loss, make_loss
from specengine.train.options import TrainOptions
from specengine.train.text.options import SynthesisOptions


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
