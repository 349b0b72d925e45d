"""Argument parsers, one file per command. They import neither torch nor transformers, so help is fast.

A file here is a command: HELP, `add(parser)`, and where the function stands that runs it, as `module:function`.
"""

from __future__ import annotations

import specengine
from specengine.cli.arguments import (
    batch,
    bench,
    calibrate,
    chat,
    check,
    demo,
    export,
    generate,
    inspect,
    serve,
    trace,
    train,
)
from specengine.cli.arguments.parser import Parser

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "batch": batch,
    "check": check,
    "inspect": inspect,
    "calibrate": calibrate,
    "bench": bench,
    "trace": trace,
    "demo": demo,
    "train": train,
    "export": export,
}


def make_parser() -> Parser:
    """What it parses says in `run` which function runs it, and by `loads` which model that loads, if any."""
    parser = Parser(
        prog="specengine", description="Lossless tree speculative decoding for Hugging Face causal language models."
    )
    parser.add_argument("--version", action="version", version=f"specengine {specengine.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add(commands.add_parser(name, help=module.HELP, description=module.HELP))
    return parser
