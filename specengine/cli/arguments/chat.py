"""specengine chat: a conversation on the command line."""

from __future__ import annotations

import argparse

from specengine.cli.arguments import shared

HELP = "talk to a model, turn by turn"
COMMANDS = (
    "/help shows this, /reset starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer, "
    "// begins a message with a slash"
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.chat:run")
    parser.epilog = f"{COMMANDS}. Where standard input is no terminal, each line is a turn."
    shared.add_trace(parser)
    shared.add_model(parser)
    shared.add_draft_and_policy(parser)
    shared.add_generation(parser)
