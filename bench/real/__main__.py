"""Speculation and other engines on model files of the size that people run.

    make bench-real                                         # all files, temperatures and ways; hours, resumable
    python -m bench.real --only qwen2.5-coder-0.5b --per-set 1 --rounds 1 --max-new-tokens 16
    python -m bench.real --prompts FOLDER --head qwen2.5-coder-0.5b=my-head

Each file is measured at temperature 0, beside other engines, and at 0.7 by `specengine bench`: tokens per second, time
to the first token, tau, and whether each answer is plain decoding's. Then each way answers one prompt in a process of
its own, for its peak of memory. A run goes on behind the answers that its file in --out has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.real import files
from specengine.benchmark.peers import engine_of, python_of
from specengine.benchmark.workloads import read
from specengine.cli.parser import key_value

EDITS = Path(__file__).parent / "edits.jsonl"
TEMPERATURES = (0.0, 0.7)
WAYS = ("auto", "recycling:auto", "ngram:auto", "ngram:eagle,width=4,expansions=9,budget=12")
SMALLER = {"qwen2.5-coder-1.5b": "qwen2.5-coder-0.5b"}  # models that draft for larger ones
PEERS = (
    "peer:llama.cpp",
    "peer:llama.cpp/prompt-lookup",
    "peer:openvino",
    "peer:openvino/prompt-lookup",
)
MEMORY_TOKENS = 64


class Measurement(NamedTuple):
    """A call of `specengine bench`: its arguments without those of the prompts, and the file of its records."""

    model: Path
    ways: tuple[str, ...]
    temperature: float
    out: Path


def ways_of(name: str, folder: Path, head: str | None) -> tuple[str, ...]:
    """Return this engine's ways on a file; head: the folder of a trained head, if there is one."""
    small = (f"{folder / files.FILES[SMALLER[name]].file.name}:auto",) if name in SMALLER else ()
    trained = () if head is None else (f"{head}:auto", f"{head}:eagle")
    return (*WAYS, *small, *trained)


def measurements(name: str, folder: Path, args: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the runs of a file; other engines take part greedily, where their environments are there."""
    model = folder / files.FILES[name].file.name
    own = ways_of(name, folder, dict(args.head).get(name))
    for temperature in TEMPERATURES:
        ways = (*own, *(there(args.peers, peers_of(name, folder)) if temperature == 0 else ()))
        yield Measurement(model, ways, temperature, args.out / f"{name}-t{temperature:g}.jsonl")


def peers_of(name: str, folder: Path) -> tuple[str, ...]:
    """Return the other engines' ways on a file, with a smaller model as their draft where there is one."""
    if name not in SMALLER:
        return PEERS
    small = folder / files.FILES[SMALLER[name]].file.name
    return (*PEERS, *(f"{engine}/draft={small}" for engine in PEERS if "/" not in engine))


def there(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the ways whose environments `make peers` has made; engines without one are named."""
    installed = [name for name in names if python_of(name, folder).is_file()]
    missing = sorted({engine_of(name) for name in names} - {engine_of(name) for name in installed})
    if missing:
        print(
            f"bench.real: {folder} has no {', '.join(missing)}: left out (make peers)",
            file=sys.stderr,
        )
    return installed


def command(of: Measurement, args: argparse.Namespace) -> list[str]:
    """Return the call of `specengine bench`."""
    prompts = [option for place in (*args.prompts, EDITS) for option in ("--prompts", str(place))]
    counts = [
        "--per-set",
        str(args.per_set),
        "--rounds",
        str(args.rounds),
        "--max-new-tokens",
        str(args.max_new_tokens),
    ]
    ways = [option for way in of.ways for option in ("--way", way)]
    peers = ["--peers", str(args.peers)] if any(way.startswith("peer:") for way in of.ways) else []
    where = ["--model", str(of.model), "--temperature", str(of.temperature), "--out", str(of.out)]
    return [sys.executable, "-m", "specengine", "bench", *where, *prompts, *counts, *ways, *peers]


def memory(of: Measurement, out: Path) -> list[dict[str, Any]]:
    """Measure the peak of memory of each own way in a process of its own; rows that are there are kept.

    Rows are those of `bench.real.memory`.
    """
    rows = (
        [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        if out.is_file()
        else []
    )
    known = {row["way"] for row in rows}
    prompt = read([EDITS], 1)[0].text
    for way in ("plain", *(way for way in of.ways if not way.startswith("peer:"))):
        if way in known:
            continue
        arguments = [str(of.model), way, prompt, str(MEMORY_TOKENS)]
        result = subprocess.run(
            [sys.executable, "-m", "bench.real.memory", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise RuntimeError(f"memory of {way}: {result.stderr.strip()[-500:]}")
        rows.append(json.loads(result.stdout))
        with out.open("a", encoding="utf-8") as log:
            log.write(json.dumps(rows[-1]) + "\n")
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.real", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(files.FILES),
        help="a file; repeatable (default: all)",
    )
    parser.add_argument(
        "--folder", type=Path, default=files.default_folder(), help="of the files (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/results/real"), help="folder of the records"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        action="append",
        default=[],
        help="as of specengine bench, beside the code edits",
    )
    parser.add_argument(
        "--head",
        type=key_value,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a trained head of a file",
    )
    parser.add_argument(
        "--peers", type=Path, default=Path(".peers"), help="environments of `make peers`"
    )
    parser.add_argument(
        "--per-set", type=int, default=12, metavar="N", help="prompts per set (default 12)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default 256")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    try:
        for name in args.only or files.FILES:
            for needed in (name, *([SMALLER[name]] if name in SMALLER else [])):
                files.ready(needed, args.folder)
            for measurement in measurements(name, args.folder, args):
                failed += subprocess.run(command(measurement, args), check=False).returncode != 0
                if measurement.temperature == 0:
                    for row in memory(measurement, args.out / f"{name}-memory.jsonl"):
                        print(
                            f"{name}, {row['way']}: {row['peak_bytes'] / row['file_bytes']:.2f} times the file"
                        )
    except RuntimeError as error:
        print(f"bench.real: {error}", file=sys.stderr)
        return 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
