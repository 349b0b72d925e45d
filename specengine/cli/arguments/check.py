"""specengine check: is speculative decoding's answer the target's own?"""

from __future__ import annotations

import argparse
from pathlib import Path

from specengine.cli.arguments import shared

HELP = "compare speculative decoding with plain decoding, token by token; exit status 1 on a mismatch"


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.check:run")
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="default: a few built-in prompts")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=shared.PROMPT_FORMATS)
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N prompts")
    parser.add_argument("--raw", action="store_true", help="take prompts as they are, without the chat template")
    parser.add_argument(
        "--against",
        choices=("plain", "huggingface"),
        default="plain",
        help="this engine's plain decoding (default) or transformers' generate (greedy only)",
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="LOGITS", help="largest logit gap of a near-tie (default: by dtype)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the summary")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object to a file as well")
    shared.add_model(parser)
    shared.add_draft_and_policy(parser, several_policies=True)
    shared.add_generation(parser)
