"""specengine train classifier: the small networks of the policies c2t, disco and specdecpp."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from specengine.cli.arguments import shared
from specengine.cli.arguments.option_lists import changes, listing
from specengine.cli.arguments.parser import add_options
from specengine.train.classifier.options import SETTINGS, ClassifierOptions, CollectOptions

HELP = "train the classifier of a policy, on trees that the draft grows and the target verifies"


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.train_classifier:run", goes_on="folder")
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="of the trees and the classifier; goes on if a collection stopped"
    )
    parser.add_argument("--kind", choices=SETTINGS, required=True, help="the policy that it is for")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--data", type=Path, metavar="FOLDER", help="text of `train data`: its first users' turns")
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help=f"prompts of your own. {shared.PROMPT_FORMATS}")
    shared.add_target(parser)
    parser.add_argument("--draft", help="as for generate (default: the target's)")
    add_options(parser, "-o", "option")
    usual = asdict(ClassifierOptions())
    kinds = {
        name: {key: value for key, value in asdict(of).items() if value != usual[key]} for name, of in SETTINGS.items()
    }
    parser.epilog = "\n\n".join(
        [
            listing("options of -o for the trees", CollectOptions),
            listing("options of -o for the classifier", ClassifierOptions),
            changes("other defaults, by --kind", {name: given for name, given in kinds.items() if given}),
        ]
    )
