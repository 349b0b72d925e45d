"""specengine batch: answer a file of prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from specengine.cli.arguments import shared

HELP = "answer a file of prompts, one answer a line; what breaks off goes on where it was"


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.batch:run", loads=lambda _: None)  # what is wrong is said before
    parser.add_argument(
        "prompts",
        type=Path,
        metavar="FILE",
        help='a line is a string, {"prompt": ...}, {"messages": [...]}, {"turns": [...]} as in Spec-Bench, or a '
        'request of OpenAI\'s batches (custom_id, url, body); with "id" and "options" where wanted',
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE",
        help="the answers, in the order of the prompts; what was measured goes to NAME.stats.jsonl beside it. If "
        "they are there, the run goes on",
    )  # fmt: skip
    parser.add_argument("--raw", action="store_true", help="take prompts as they are, without the chat template")
    add_replicas(parser.add_argument_group("replicas"), "engines, each in a process of its own (needs the extra `ray`)")
    shared.add_model(parser)
    shared.add_draft_and_policy(parser)
    shared.add_generation(parser)


def add_replicas(group: argparse._ArgumentGroup, meaning: str) -> None:
    group.add_argument("--replicas", type=int, default=1, metavar="N", help=f"{meaning} (default 1: this process)")
    group.add_argument(
        "--threads", type=int, metavar="N", help="of each replica (default: its share of the processors)"
    )
    group.add_argument(
        "--ray-address", metavar="ADDRESS", help="a cluster of Ray's to run on, auto for the one here (default: none)"
    )
