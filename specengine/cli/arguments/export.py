"""specengine export: an EAGLE head as other engines read it."""

from __future__ import annotations

import argparse
from pathlib import Path

from specengine.cli.arguments import shared
from specengine.cli.arguments.parser import one_of

HELP = "write an EAGLE head for vLLM, speculators or SGLang"
# By what people call them, and by who reads them: a Layout.
FORMATS = {"speculators": "speculators", "vllm": "speculators", "eagle": "official", "sglang": "official"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="HEAD", help="path or Hub id of an EAGLE head, or default-head, which ships")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to, a new or an empty one")
    parser.add_argument(
        "--format",
        type=one_of(tuple(FORMATS), FORMATS),
        default=FORMATS["speculators"],
        metavar="{" + ",".join(FORMATS) + "}",
        help="speculators or vllm: vLLM and speculators read it, the target's name in it; eagle or sglang: SGLang, "
        "vLLM and the EAGLE repository do (default: speculators)",
    )
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="a Hugging Face id or a local path, as engines will load it; its config.json is compared with the head "
        "(default: the embedded one for its own head; the eagle format needs none)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="length of the chain that vLLM drafts when it is given the folder alone, for the speculators format "
        "(default: 3)",
    )
    shared.add_draft_option(parser)
    shared.add_access(parser)
    parser.set_defaults(run="specengine.cli.export:run")
