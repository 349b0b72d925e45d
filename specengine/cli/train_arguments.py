"""Arguments of `specengine train`, and options given as KEY=VALUE, listed for `--help` from their dataclasses."""

import argparse
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specengine.cli.parser import (
    PROMPT_FORMATS,
    add_draft,
    add_model,
    add_options,
    add_target,
    declare,
    file,
    number,
)
from specengine.errors import declared_in
from specengine.train.classifier.options import SETTINGS, ClassifierOptions, CollectOptions
from specengine.train.draft.options import LOSSES, RECIPES, Loss, TrainOptions
from specengine.train.text import SynthesisOptions

COLUMN, WIDTH = 26, 112


def listing(
    title: str, of: type, values: Mapping[str, Any] | None = None, *, without: str = ""
) -> str:
    """Return a line per field of the dataclass `of`: its value in `values`, else its default, and its text."""
    return "\n".join([f"{title}:", *_lines(of, values or {}, without)])


def _lines(of: type, values: Mapping[str, Any], without: str) -> Iterator[str]:
    for name, declared in declared_in(of).items():
        if name != without:
            key = f"  {name}={as_typed(values.get(name, declared.default))}"
            first = f"{key:<{COLUMN}}" if len(key) < COLUMN - 1 else f"{key}  "
            yield from textwrap.wrap(
                declared.help or "",
                WIDTH,
                initial_indent=first,
                subsequent_indent=" " * COLUMN,
                break_long_words=False,
            )


def changes(title: str, named: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a paragraph per name with the options that it changes."""
    settings = {
        name: " ".join(f"{key}={as_typed(value)}" for key, value in values.items())
        for name, values in named.items()
    }
    return "\n".join(
        [
            f"{title}:",
            *(
                textwrap.fill(
                    text or "none",
                    WIDTH,
                    initial_indent=f"  {name:<{COLUMN - 2}}",
                    subsequent_indent=" " * COLUMN,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                for name, text in settings.items()
            ),
        ]
    )


def as_typed(value: Any) -> str:
    """Return a value as KEY=VALUE takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


DEFAULT_RECIPE = "cpu-small"


def add_train(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    for name, (add_to, text, folder) in PARTS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # for the listing at the end
        )
        command.set_defaults(run=f"specengine.cli.train:run_{name}", goes_on="folder")
        declare(command, {"folder": file(folder, "FOLDER")})
        add_to(command)
    parser.epilog = "The networks of the policy ltd are trained in a checkout: python -m research.ltd train --help"


def _add_common(parser: argparse.ArgumentParser) -> None:
    recipes = "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items())
    parser.add_argument(
        "--recipe", default=DEFAULT_RECIPE, help=f"{recipes} (default: {DEFAULT_RECIPE})"
    )
    add_target(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    add_options(parser, "-o", "option")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=f"prompts of your own to add. {PROMPT_FORMATS}"
    )
    text = {name: asdict(recipe.text) for name, recipe in RECIPES.items()}
    parser.epilog = "\n\n".join(
        [
            listing(
                f"options of -o, as recipe {DEFAULT_RECIPE} sets them",
                SynthesisOptions,
                text[DEFAULT_RECIPE],
            ),
            changes("other recipes", _differing(text)),
        ]
    )


def _add_draft(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    usual = RECIPES[DEFAULT_RECIPE].loss.name
    declare(
        parser,
        {
            "--data": file("text to train on (default: the recipe's is written first)", "FOLDER"),
            "--hours": number(
                "time for text and training together, over all calls, which chooses the numbers of tokens and of "
                "steps (default: the recipe's)",
                None,
                float,
                "H",
            ),
            "--loss": {"help": f"{', '.join(LOSSES)} (default: the recipe's, {usual})"},
        },
    )
    add_options(parser, "-o", "option")
    add_options(parser, "-l", "loss-option")
    training = {name: asdict(recipe.training) for name, recipe in RECIPES.items()}
    losses = {name: asdict(recipe.loss) for name, recipe in RECIPES.items()}
    parser.epilog = "\n\n".join(
        [
            listing(
                f"options of -o, as recipe {DEFAULT_RECIPE} sets them",
                TrainOptions,
                training[DEFAULT_RECIPE],
            ),
            changes("other recipes", _differing(training)),
            listing(
                f"options of -l, as recipe {DEFAULT_RECIPE} sets them",
                Loss,
                losses[DEFAULT_RECIPE],
                without="name",
            ),
            changes("other recipes", _differing(losses)),
            changes("with --loss", {name: _without_name(loss) for name, loss in LOSSES.items()}),
        ]
    )


def _differing(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings in which each recipe differs from the default one."""
    usual = settings[DEFAULT_RECIPE]
    return {
        name: {key: value for key, value in values.items() if value != usual[key]}
        for name, values in settings.items()
        if name != DEFAULT_RECIPE
    }


def _without_name(loss: Loss) -> dict[str, Any]:
    return {
        name: value
        for name, value in asdict(loss).items()
        if name != "name" and value != getattr(Loss, name, None)
    }


def _add_classifier(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=SETTINGS, required=True, help="policy to train for")
    declare(
        parser.add_mutually_exclusive_group(required=True),
        {
            "--data": file("text of `train data`: its first users' turns", "FOLDER"),
            "--prompts": file(f"prompts of your own. {PROMPT_FORMATS}"),
        },
    )
    add_target(parser)
    parser.add_argument("--draft", help="as for generate (default: the target's)")
    add_options(parser, "-o", "option")
    usual = asdict(ClassifierOptions())
    kinds = {
        name: {key: value for key, value in asdict(of).items() if value != usual[key]}
        for name, of in SETTINGS.items()
    }
    parser.epilog = "\n\n".join(
        [
            listing("options of -o for the trees", CollectOptions),
            listing("options of -o for the classifier", ClassifierOptions),
            changes(
                "other defaults, by --kind",
                {name: options for name, options in kinds.items() if options},
            ),
        ]
    )


def _add_learn(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        {"--minutes": number("to learn for; fewer once nothing helps (default 10)", 10.0, float)},
    )
    add_model(parser)
    add_draft(parser.add_argument_group("draft"))
    parser.set_defaults(policy=None, goes_on="", run="specengine.cli.learn:run")


# For each kind of `specengine train`: its arguments, its function, and the content of its folder.
PARTS = {
    "data": (
        _add_data,
        "let the target write training text",
        "folder of the text; continues if there is text already",
    ),
    "draft": (
        _add_draft,
        "train an EAGLE head",
        "folder of the head; continues a training that stopped there",
    ),
    "classifier": (
        _add_classifier,
        "train the classifier of a policy, on trees that the draft grows and the target verifies",
        "folder of the trees and the classifier; continues a collection that stopped",
    ),
    "learn": (
        _add_learn,
        "train the draft's head on the texts that chat and serve kept with --learn",
        "a folder that chat or serve filled with --learn FOLDER",
    ),
}
