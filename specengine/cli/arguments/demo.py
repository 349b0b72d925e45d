"""specengine demo: one streamed answer, one of its trees, and the same answer timed three ways in one run."""

from __future__ import annotations

import argparse

from specengine.cli.arguments import shared

HELP = "generate with and without speculation, and compare speed and tokens"
PROMPT = "Explain how a rainbow forms, and why its colours always stand in the same order."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default=PROMPT, help="default: a question about rainbows")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to generate at most (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; the median counts (default 3)")
    shared.add_model(parser)
    shared.add_draft_and_policy(parser)
    parser.set_defaults(run="specengine.cli.demo:run", strict=None)  # where it can
