"""specengine train policy: the two networks of the policy ltd."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from specengine.cli.arguments import shared
from specengine.cli.arguments.option_lists import changes, listing
from specengine.cli.arguments.parser import add_options
from specengine.cli.prompt_files import FORMATS
from specengine.costs import PUBLISHED
from specengine.train.ltd.options import RECIPES, PolicyOptions, PolicyRecipe

HELP = "train the networks of the policy ltd, which choose a tree's depth and size, by reinforcement learning"
DEFAULT_RECIPE = "short"
MEASURE = "measure"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="of the networks; goes on if a training stopped there"
    )
    recipes = "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items())
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help=f"{recipes} (default: {DEFAULT_RECIPE})")
    costs = "; ".join(f"{name}: {found.source}" for name, found in PUBLISHED.items()).replace("%", "%%")
    parser.add_argument(
        "--costs", default=MEASURE, metavar="TABLE",
        help=f"what cycles cost: {MEASURE} (the default: on this machine), a file of bench.end_to_end, or {costs}",
    )  # fmt: skip
    parser.add_argument(
        "--live", action="store_true",
        help="learn while the engine runs, also under a cost table; otherwise from logged trees, which is much faster. "
        "The reward wallclock is always live",
    )  # fmt: skip
    source = parser.add_argument_group("questions", "of --data, --prompts or both; or the trees logged of some earlier")
    source.add_argument("--data", type=Path, metavar="FOLDER", help="text of `train data`: its first users' turns")
    source.add_argument("--prompts", type=Path, metavar="FILE", help=f"prompts of your own. {FORMATS}")
    source.add_argument(
        "--candidates",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="trees logged earlier; repeatable, no model",
    )
    shared.add_target(parser)
    parser.add_argument("--draft", help="as for generate (default: the target's)")
    parser.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="log trees of a draft that copies from the text before, or does not (default: as for generate)",
    )
    add_options(parser, "-o", "option")
    usual = _settings(RECIPES[DEFAULT_RECIPE])
    others = {
        name: {key: value for key, value in _settings(recipe).items() if value != usual[key]}
        for name, recipe in RECIPES.items()
        if name != DEFAULT_RECIPE
    }
    parser.epilog = "\n\n".join(
        [
            listing(f"options of -o, as recipe {DEFAULT_RECIPE} sets them", PolicyOptions, usual),
            changes("other recipes", others),
        ]
    )
    parser.set_defaults(run="specengine.cli.train_policy:run", goes_on="folder", loads=_loads)


def _settings(recipe: PolicyRecipe) -> dict[str, Any]:
    return {field.name: field.default for field in fields(PolicyOptions)} | dict(recipe.changes)


def _loads(arguments: argparse.Namespace) -> str | None:
    return None if arguments.candidates else shared.names_of(arguments)
