"""The command `specengine`: answers go to standard output, everything else to standard error.

Exit status: 0, or 1 where `check` found a mismatch, 2 for an error in what was asked, 70 for one that nobody
expected, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from transformers.utils import logging

import specengine
from specengine.cli import bench, calibrate, chat, check, demo, generate, inspection, trace, train
from specengine.cli.terminal import say
from specengine.errors import SpecEngineError

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "check": check,
    "inspect": inspection,
    "calibrate": calibrate,
    "bench": bench,
    "trace": trace,
    "demo": demo,
    "train": train,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Malformed arguments end in argparse's SystemExit(2)."""
    parsed = make_parser().parse_args(arguments)
    logging.disable_progress_bar()
    try:
        status = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except SpecEngineError as error:
        say(f"specengine: error: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone. What Python still wants to flush at its exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if parsed.debug:
            raise
        say(
            f"specengine: error: {type(error).__name__}: {' '.join(str(error).split())} (--debug before the command "
            "shows where)"
        )
        return 70


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specengine", description="Lossless tree speculative decoding for Hugging Face causal language models."
    )
    parser.add_argument("--version", action="version", version=f"specengine {specengine.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error that nobody expected")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(command)
        if hasattr(module, "run"):  # one with subcommands sets theirs
            command.set_defaults(run=module.run)
    return parser
