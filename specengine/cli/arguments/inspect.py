"""specengine inspect: what is installed here, what it runs on, and what there is to choose from."""

from __future__ import annotations

import argparse

from specengine.cli.arguments import shared

HELP = "show versions, devices, backends, policies, drafts and, with --model and --draft, a model and an EAGLE head"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ops", action="store_true", help="list the backend of every op")
    parser.add_argument(
        "--draft",
        metavar="PATH",
        help="an EAGLE head: its layout, its tensors, and how often its first guess is the next token of --model",
    )
    shared.add_draft_option(parser)
    shared.add_model(parser)
    parser.set_defaults(run="specengine.cli.inspection:run", loads=_loads)


def _loads(arguments: argparse.Namespace) -> str | None:
    asked = arguments.model is not None or arguments.draft is not None
    return shared.names_of(arguments) if asked else None
