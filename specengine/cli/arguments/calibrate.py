"""specengine calibrate: what the parts of a cycle take on this machine."""

from __future__ import annotations

import argparse

from specengine.cli.arguments import shared

HELP = "measure what verifying and drafting cost here, by nodes, and keep it for policies that read it"


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.calibrate:run")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in seconds")
    shared.add_model(parser)
    shared.add_draft(parser.add_argument_group("draft"))
