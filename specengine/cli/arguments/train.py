"""specengine train: text written by a model, and drafts and classifiers trained on it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specengine.cli.arguments import shared, train_classifier
from specengine.cli.arguments.option_lists import changes, listing
from specengine.cli.arguments.parser import add_options, part
from specengine.train.draft.options import LOSSES, Loss
from specengine.train.draft.recipes import RECIPES
from specengine.train.options import TrainOptions
from specengine.train.text.options import SynthesisOptions

HELP = "train a draft for a model, on text that the model writes itself"
DEFAULT_RECIPE = "cpu-small"


def add(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    parts = {
        "data": (_add_data, "let the target write training text"),
        "requests": (_add_requests, "make prompts for `train data` around text that a target wrote"),
        "draft": (_add_draft, "train an EAGLE head"),
    }
    for name, (add_to, text) in parts.items():
        add_to(_command(commands, name, text))
    train_classifier.add(_command(commands, "classifier", train_classifier.HELP))
    parser.epilog = "The networks of the policy ltd are trained in a checkout: python -m research.ltd train --help"


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    keeps_lines = argparse.RawDescriptionHelpFormatter  # of the listing at the end
    return commands.add_parser(name, help=text, description=text, formatter_class=keeps_lines)


def _add_common(parser: argparse.ArgumentParser) -> None:
    recipes = "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items())
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help=f"{recipes} (default: {DEFAULT_RECIPE})")
    shared.add_target(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.train:run_data", goes_on="folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="goes on where it stopped if there is text already")
    _add_common(parser)
    add_options(parser, "-o", "option")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=f"prompts of your own to mix in. {shared.PROMPT_FORMATS}"
    )
    parser.add_argument(
        "--part", type=part, default=(0, 1), metavar="I/N", help="write the I-th of N parts, N such commands at a time"
    )
    parser.add_argument(
        "--speculate",
        action="store_true",
        help="let the engine write conversation by conversation, with the target's default draft: on few threads, and "
        "where prompts are long, faster than all of a shard in lockstep",
    )
    text = {name: asdict(recipe.text) for name, recipe in RECIPES.items()}
    parser.epilog = "\n\n".join(
        [
            listing(f"options of -o, as recipe {DEFAULT_RECIPE} sets them", SynthesisOptions, text[DEFAULT_RECIPE]),
            changes("other recipes", _differing(text)),
        ]
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.train:run_requests")
    parser.description = (
        "Prompts for --prompts of `train data`: summaries, extraction, rewriting, translation, code, sums and facts, "
        "around text that the target wrote itself; one or two user's turns each."
    )
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="to be written; an older one is replaced")
    parser.add_argument("--data", type=Path, metavar="FOLDER", required=True, help="text of `train data`")
    parser.add_argument("-n", "--count", type=int, default=2000, help="prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    shared.add_target(parser)


def _add_draft(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.train:run_draft", goes_on="folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the head; goes on if a training stopped there")
    _add_common(parser)
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="text to train on (default: the recipe's is written first)"
    )
    usual = RECIPES[DEFAULT_RECIPE]
    parser.add_argument("--loss", help=f"{', '.join(LOSSES)} (default: the recipe's, {usual.loss.name})")
    add_options(parser, "-o", "option")
    add_options(parser, "-l", "loss-option")
    training = {name: asdict(recipe.training) for name, recipe in RECIPES.items()}
    losses = {name: asdict(recipe.loss) for name, recipe in RECIPES.items()}
    parser.epilog = "\n\n".join(
        [
            listing(f"options of -o, as recipe {DEFAULT_RECIPE} sets them", TrainOptions, training[DEFAULT_RECIPE]),
            changes("other recipes", _differing(training)),
            listing(
                f"options of -l, as recipe {DEFAULT_RECIPE} sets them", Loss, losses[DEFAULT_RECIPE], without="name"
            ),
            changes("other recipes", _differing(losses)),
            changes("with --loss", {name: _without_name(loss) for name, loss in LOSSES.items()}),
        ]
    )


def _differing(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of all but the default recipe, what they set otherwise."""
    usual = settings[DEFAULT_RECIPE]
    return {
        name: {key: value for key, value in given.items() if value != usual[key]}
        for name, given in settings.items()
        if name != DEFAULT_RECIPE
    }


def _without_name(loss: Loss) -> dict[str, Any]:
    return {
        name: value for name, value in asdict(loss).items() if name != "name" and value != getattr(Loss, name, None)
    }
