"""specengine generate: answer one prompt."""

from __future__ import annotations

import argparse
from pathlib import Path

from specengine.cli.arguments import shared

HELP = "answer one prompt"


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.generate:run", parser=parser)
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads standard input, without its last line break"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--raw", action="store_true", help="take the prompt as it is, without the chat template")
    output.add_argument("--stream", action="store_true", help="print the answer piece by piece; Ctrl-C stops it")
    output.add_argument("--show-draft", action="store_true", help="colour what the draft proposed, in a terminal")
    output.add_argument("--json", action="store_true", help="print one JSON object: answer, token ids and figures")
    parser.add_argument(
        "--prediction",
        type=Path,
        metavar="FILE",
        help="a text that much of the answer is expected to be, as a file that is to be changed a little; it makes the "
        "answer faster, never another one",
    )
    constrained = parser.add_mutually_exclusive_group()
    constrained.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="the answer meets this JSON schema (needs llguidance)"
    )
    constrained.add_argument(
        "--grammar", type=Path, metavar="FILE", help="the answer meets this grammar, Lark or GBNF (needs llguidance)"
    )
    shared.add_trace(output)
    shared.add_model(parser)
    shared.add_draft_and_policy(parser)
    shared.add_generation(parser)
