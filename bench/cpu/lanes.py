"""Measure answers at once: tokens per second of several texts in one forward, plain and with drafts.

Every round asks the same prompts of all ways in turn, so that load on the machine meets all of them.

    python -m bench.cpu.lanes [--lanes 1 2 4 8 16] [--prompts FOLDER]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench import provenance, workloads
from bench.arguments import add_arguments
from specengine import Engine
from specengine.engine import Pool

Record = dict[str, Any]
WAYS = ("plain", "auto")


def pools(lanes: list[int], model: str | None) -> dict[tuple[str, int], Pool]:
    """Return a pool of every way and size, on one model's weights."""
    engine = Engine.from_pretrained(model, memory="off")
    plain = Engine(engine.target, None, None, engine.tokenizer)
    return {
        (way, count): Pool(plain if way == "plain" else engine, count)
        for way in WAYS
        for count in lanes
    }


def run(pool: Pool, prompts: list[str], tokens: int) -> tuple[float, float, list[list[int]]]:
    """Return tokens per second, rows per forward, and the answers."""
    before = pool.scheduler.forwards, pool.scheduler.rows
    began = time.perf_counter()
    results = pool.generate(prompts, max_new_tokens=tokens, eos_token_id=[])
    spent = time.perf_counter() - began
    forwards, rows = pool.scheduler.forwards - before[0], pool.scheduler.rows - before[1]
    return (
        sum(len(result.token_ids) for result in results) / spent,
        rows / forwards,
        [r.token_ids for r in results],
    )


def records(args: argparse.Namespace) -> Iterator[Record]:
    torch.set_num_threads(args.threads)
    prompts = [item.text for item in workloads.read(args.prompts, args.per_set)]
    prompts = [
        prompts[number % len(prompts)] for number in range(max(args.answers, max(args.lanes)))
    ]
    made = pools(args.lanes, args.model)
    backend = next(iter(made.values())).engines[0].target.backend
    yield {
        "record": "settings",
        "backend": backend,
        "threads": args.threads,
        "answers": len(prompts),
    }
    rates: dict[tuple[str, int], list[float]] = {}
    rows: dict[tuple[str, int], list[float]] = {}
    answers: dict[tuple[str, int], list[list[int]]] = {}
    for pool in made.values():
        run(pool, prompts[: len(pool.engines)], 8)
    gc.collect()
    gc.freeze()  # as the server does
    for turn in range(args.rounds):
        for key in list(made) if turn % 2 == 0 else list(made)[::-1]:
            rate, width, answers[key] = run(made[key], prompts, args.max_new_tokens)
            rates.setdefault(key, []).append(rate)
            rows.setdefault(key, []).append(width)
    alone = {turn: rates["plain", min(args.lanes)][turn] for turn in range(args.rounds)}
    first = answers["plain", min(args.lanes)]
    for way, count in made:
        found = rates[way, count]
        yield {
            "record": "lanes",
            "way": way,
            "lanes": count,
            "tokens_per_second": round(statistics.median(found), 1),
            "over_plain_alone": round(
                statistics.median(rate / alone[turn] for turn, rate in enumerate(found)), 3
            ),
            "rows_per_forward": round(statistics.median(rows[way, count]), 2),
            "same_answers": sum(
                one == other for one, other in zip(answers[way, count], first, strict=True)
            ),
        }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.lanes", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--lanes", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="answers at once"
    )
    parser.add_argument("--answers", type=int, default=32, help="of each way and round")
    parser.add_argument("--model", help="a model's name or path; default: the embedded one")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_arguments(parser, "prompts", "max_new_tokens", "out", per_set=2, rounds=2)
    args = parser.parse_args(arguments)
    args.lanes = sorted({1, *args.lanes})
    provenance.show(records(args), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
