"""The command: a dry run that lists cases and ways, or the table."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import bench.kernels
from bench.kernels import WAYS
from bench.kernels.cases import CASES, QUICK, Case, Choice, Search, Selection, kind_of
from bench.kernels.inputs import INPUTS
from bench.kernels.timing import launch_floor, rows_of
from bench.kernels.way import Way, installed


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=bench.kernels.__doc__.split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, help="write the table as JSON lines, with provenance")
    parser.add_argument(
        "--kernel",
        choices=sorted(INPUTS),
        action="append",
        help="only this kernel; may be repeated",
    )
    parser.add_argument(
        "--way", action="append", help="only ways whose name contains this; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="one or two cases of each kernel")
    parser.add_argument("--dry-run", action="store_true", help="list cases and ways, run nothing")
    return parser.parse_args(arguments)


def chosen(args: argparse.Namespace) -> Iterator[tuple[Case, list[Way], bool]]:
    for case in QUICK if args.quick else CASES:
        kind = kind_of(case)
        if args.kernel and kind not in args.kernel:
            continue
        ways = [way for way in WAYS if way.kind == kind]
        if args.way:
            ways = [way for way in ways if any(part in way.name for part in args.way)]
        # the layer's logits were just written where selection or a choice follows; the caches of attention were not;
        # queues are never cold
        either = (
            (True, False) if isinstance(case, Selection | Choice) else (isinstance(case, Search),)
        )
        for warm in either:
            yield case, ways, warm


def versions() -> dict[str, Any]:
    found: dict[str, str | None] = {}
    for name in ("triton", "flashinfer-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {"record": "versions", **found, "cuda": torch.version.cuda}


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.dry_run:
        for case, ways, warm in chosen(args):
            names = [way.name + ("" if installed(way) else f" (needs {way.needs})") for way in ways]
            cache = "warm" if warm else "cold"
            print(
                json.dumps({"record": kind_of(case), **asdict(case), "cache": cache, "ways": names})
            )
        return
    if not torch.cuda.is_available():
        sys.exit("bench.kernels needs a CUDA device; --dry-run lists what it would run")
    from bench import provenance  # here, as --dry-run should not load the engine

    provenance.show(records(args), args.out)


def records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield versions()
    yield launch_floor()
    for case, ways, warm in chosen(args):
        yield from rows_of(case, ways, warm)
        torch.cuda.empty_cache()
        torch.compiler.reset()  # flex compiles anew for each shape, and gives up after a few


if __name__ == "__main__":
    main()
