"""Run the requested parts, then compare the results with the goals."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bench.cpu
from bench import provenance, workloads
from bench.arguments import add_arguments
from bench.cpu import answers, forwards, goals, processes
from bench.cpu.answers import LLAMA_CPP
from bench.cpu.ways import KINDS, Given, Unavailable

PARTS = ("forward", "plain", "default", "memory", "isa", "start")
DEFAULT_ROUNDS = {"forward": 9, "plain": 3, "default": 3, "memory": 1, "isa": 5, "start": 3}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary = (bench.cpu.__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=summary)
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="only this part; may be repeated"
    )
    parser.add_argument(
        "--way", choices=(*KINDS, LLAMA_CPP), action="append", help="only this one; may be repeated"
    )
    add_arguments(parser, "model", "draft", "prompts", "per_set", "max_new_tokens", "out")
    parser.add_argument(
        "--gguf", type=Path, help="the same model as a GGUF file; default: the embedded model's"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["float32", "bfloat16"],
        help="of what is not quantized",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(forwards.ROWS), help="of the part forward"
    )
    parser.add_argument("--rounds", type=int, help=f"default: by part, {DEFAULT_ROUNDS}")
    parser.add_argument(
        "--wheel", type=Path, help="of the embedded model, for the part start; default: the cache's"
    )
    parser.add_argument("--memory-of", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    given = Given(args.model, args.gguf, args.draft, args.dtype)
    if args.memory_of:
        try:
            print(json.dumps(processes.memory_of(given, args.memory_of)))
        except Unavailable as error:
            sys.exit(str(error))
        return 0
    print(goals.table(provenance.show(measured(args, given), args.out)).markdown())
    return 0


def measured(args: argparse.Namespace, given: Given) -> Iterator[dict[str, Any]]:
    """Yield the records of the requested parts, in the order of PARTS."""
    kinds = [kind for kind in KINDS if not args.way or kind in args.way]
    names = [name for name in (*KINDS, LLAMA_CPP) if not args.way or name in args.way]
    items = workloads.read(args.prompts, args.per_set)
    model = ["--dtype", args.dtype]
    for option, value in (("--model", args.model), ("--gguf", args.gguf), ("--draft", args.draft)):
        model += [option, str(value)] if value else []
    parts: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
        "forward": partial(forwards.forward, given, kinds, sorted({1, *args.rows})),
        "plain": partial(answers.plain, given, names, items, args.max_new_tokens),
        "default": partial(answers.default, given, names, items, args.max_new_tokens),
        "memory": lambda rounds: processes.memory(kinds, model),
        "isa": partial(forwards.isa, given, model),
        "start": partial(processes.start, kinds, args.wheel),
    }
    for part, run in parts.items():
        if not args.part or part in args.part:
            print(part, file=sys.stderr, flush=True)
            yield from run(args.rounds or DEFAULT_ROUNDS[part])


if __name__ == "__main__":
    sys.exit(main())
