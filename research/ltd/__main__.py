"""Learning to Draft: train the networks of the policy ltd, and compare them with the EAGLE beam.

`train` trains a pair on the trees of a target and a draft. `log` answers prompts and logs the candidates of each cycle.
`compare` evaluates, under a cost table, the beam with its default settings, the beam with the best depth and size on
these trees, on the other half of the answers and on the training trees, and pairs of networks. `agree` makes random
decisions while the engine runs, and correlates measured rewards with those of the table. `curves` writes the logs of
training runs into one file and plots it. `convert` writes the networks that the authors published as a file of the
policy.

    python -m research.ltd train FOLDER --recipe cpu --target MODEL --draft HEAD --prompts FILE
    python -m research.ltd log FOLDER --prompts FOLDER --per-set 2 --width 4 --expansions 6
    python -m research.ltd compare FOLDER --networks cpu --costs 2-cores-amx
    python -m research.ltd agree --networks cpu --costs 2-cores-amx
    python -m research.ltd curves TRAINING --out FILE
    python -m research.ltd convert DEPTH.zip SIZE.zip networks.safetensors
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import provenance
from bench.arguments import add_arguments
from research.ltd import released, train
from research.ltd.compare import agree, compare, curves, log
from specengine.errors import SpecEngineError


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        provenance.show(args.run(args), args.out)
    except SpecEngineError as error:
        print(f"research.ltd: error: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="train a pair of networks")
    train.add(training)
    training.set_defaults(run=train.run, out=None)
    converting = commands.add_parser("convert")
    for name in ("depth", "size", "file"):
        converting.add_argument(name, type=Path)
    converting.set_defaults(run=released.run, out=None)
    first = commands.add_parser("log")
    first.add_argument(
        "folder", type=Path, help="folder of the trees; resumes after an interruption"
    )
    first.add_argument("--width", type=int, default=10)
    first.add_argument("--expansions", type=int, default=12)
    first.add_argument("--temperature", type=float, default=0.0)
    second = commands.add_parser("compare")
    second.add_argument("folder", type=Path, nargs="+")
    second.add_argument(
        "--grid",
        type=Path,
        nargs="+",
        default=(),
        help="more trees to search the best depth and size on",
    )
    second.add_argument(
        "--default", type=int, nargs=2, default=(8, 59), help="the beam's own depth and size"
    )
    third = commands.add_parser("agree")
    third.add_argument("--cycles", type=int, default=300)
    third.add_argument("--candidates", type=Path, help="logged trees of the same prompts")
    fourth = commands.add_parser("curves")
    fourth.add_argument("folder", type=Path, nargs="+", help="folder of a training run")
    for command, run in ((first, log), (second, compare), (third, agree), (fourth, curves)):
        add_arguments(command, "out")
        command.set_defaults(run=run)
        if command in (second, third):
            command.add_argument(
                "--networks",
                action="append",
                required=True,
                help="as of the policy ltd; repeatable",
            )
            command.add_argument("--costs", required=True, help="as of `train`")
        if command in (first, third):
            add_arguments(
                command, "model", "draft", "dtype", "prompts", per_set=2, max_new_tokens=96
            )
            command.add_argument(
                "--no-lookup", action="store_true", help="the draft alone, as by default on a GPU"
            )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
