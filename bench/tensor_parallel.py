"""The default model split over ranks on this machine: one process with 1 and 2 threads, and 2 ranks of one thread.

Each way answers the built-in prompts with the recycling draft, in an order that turns from round to round, and decodes
them plainly too. All run the model's own modules: the forward for CPUs is for one process.

    python -m bench.tensor_parallel --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from bench import provenance
from bench.arguments import add_arguments
from specengine import Engine
from specengine.benchmark import workloads

WAYS = {
    "1 process, 1 thread": (1, 1),
    "1 process, 2 threads": (1, 2),
    "2 ranks, 1 thread each": (2, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "model", "dtype", "out", max_new_tokens=32, rounds=2)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        _answer(args)
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            found[way].append(_run(*WAYS[way], sys.argv[1:]))
    provenance.show([_record(way, rounds) for way, rounds in found.items()], args.out)


def _run(ranks: int, threads: int, arguments: list[str]) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        "29551",
    ]
    if ranks == 1:
        command = [sys.executable]
    own = os.environ | {"OMP_NUM_THREADS": str(threads)}
    run = subprocess.run(
        [*command, "-m", "bench.tensor_parallel", *arguments, "--rank"],
        stdout=subprocess.PIPE,
        env=own,
        check=True,
    )
    return dict(json.loads(run.stdout.splitlines()[-1]))


def _answer(args: argparse.Namespace) -> None:
    plan = "auto" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    engine = Engine.from_pretrained(
        args.model,
        "recycling",
        tp_plan=plan,
        backend="huggingface",
        dtype=args.dtype,
        offline=True,
        memory="off",
    )
    found: dict[str, Any] = {}
    answers: dict[str, list[list[int]]] = {"plain": [], "auto": []}
    chosen = workloads.read(None)[: args.prompts]
    engine.generate("Say hello.", max_new_tokens=8)  # what is measured or captured once
    for policy in answers:
        rates = []
        for item in chosen:
            result = engine.generate(
                item.text, policy=policy, temperature=0.0, max_new_tokens=args.max_new_tokens
            )
            rates.append(result.stats.num_generated_tokens / result.stats.elapsed_s)
            answers[policy].append(result.token_ids)
        found[policy] = statistics.median(rates)
    found["same_as_plain"] = sum(a == b for a, b in zip(*answers.values(), strict=True))
    print(json.dumps(found), flush=True)


def _record(way: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    rates = {
        name: round(statistics.median(each[name] for each in rounds), 1)
        for name in ("plain", "auto")
    }
    ranks, threads = WAYS[way]
    own = {
        "way": way,
        "ranks": ranks,
        "threads": threads,
        "same_as_plain": rounds[0]["same_as_plain"],
    }
    return (
        {"record": "row"}
        | own
        | {f"{name}_tokens_per_second": rate for name, rate in rates.items()}
    )


if __name__ == "__main__":
    main()
