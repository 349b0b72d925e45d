"""specengine bench: ways of decoding against each other on this machine, losslessness checked along the way."""

from __future__ import annotations

import argparse
from pathlib import Path

from specengine.cli.arguments import shared

HELP = "measure policies and drafts beside transformers' and llama.cpp's decoding, on prompts of several kinds"
REPORT = "print the tables of what `specengine bench --out` wrote"
PLAIN, LLAMA_CPP, ASSISTED = "plain", "llama.cpp", "assisted"
DEFAULT_WAYS = (PLAIN, "auto", "generate", "prompt-lookup")
BASELINES = {
    "generate": "transformers' generate",
    "prompt-lookup": "its prompt lookup",
    ASSISTED: "its assisted decoding by --assistant",
    LLAMA_CPP: "llama.cpp on the model's GGUF file",
}
WAYS = (
    "POLICY or DRAFT:POLICY with ,option=value behind it, as talon/cpu,mu=0.05 or ngram:eagle; or "
    + ", ".join(f"{name} ({what})" for name, what in BASELINES.items())
    + f"; repeatable. {PLAIN} decoding always takes part (default: {', '.join(DEFAULT_WAYS)})"
)


def add(parser: argparse.ArgumentParser) -> None:
    report = parser.add_subparsers(metavar="[report]", required=False).add_parser(
        "report", help=REPORT, description=REPORT
    )
    report.add_argument("file", nargs="+", type=Path, metavar="FILE", help="what --out wrote, of one run each")
    report.add_argument("--set", help="the prompt set of the first table (default: all)")
    report.add_argument("--plot", type=Path, metavar="DIR", help="draw each file's speeds as well (needs matplotlib)")
    report.set_defaults(run="specengine.cli.bench:run_report", goes_on="")
    group = parser.add_argument_group("what is measured")
    group.add_argument("--way", action="append", metavar="WAY", help=WAYS)
    group.add_argument(
        "--prompts", type=Path, action="append", metavar="FILE",
        help='.jsonl with a {"question_id": ..., "category": ..., "turns": [...]} per line, as in Spec-Bench, or a '
        "folder of such files; repeatable (default: six small sets that ship)",
    )  # fmt: skip
    group.add_argument(
        "--set-by", choices=("file", "category"), default="file", help="what makes a set (default: a file is one)"
    )
    group.add_argument("--per-set", type=int, default=2, metavar="N", help="prompts of each set, 0 for all (default 2)")
    group.add_argument("--turns", type=int, default=1, metavar="N", help="turns of each conversation (default 1)")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer (default 128)")
    group.add_argument("--rounds", type=int, default=3, metavar="N", help="medians are taken over them (default 3)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default); above 0 all ways sample")
    group.add_argument("--seed", type=int, default=0, help="of sampling, the same for every way (default 0)")
    group.add_argument("--assistant", metavar="MODEL", help=f"id or path of the smaller model of way {ASSISTED}")
    group.add_argument("--gguf", type=Path, metavar="FILE", help=f"for way {LLAMA_CPP} (default: the model's own)")
    group.add_argument(
        "--out", type=Path, metavar="FILE", help="keep the records in this .jsonl; if it is there, the run goes on"
    )
    shared.add_model(parser)
    shared.add_draft(parser.add_argument_group("draft"))
    parser.set_defaults(
        run="specengine.cli.bench:run", goes_on="out", loads=lambda _: None
    )  # what is wrong is said before
