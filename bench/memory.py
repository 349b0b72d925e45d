"""Memory of earlier texts: the same question again, a loop of similar requests, and fresh prompts.

    python -m bench.memory --prompts prompts --out bench/results/memory-amd.jsonl

Two engines on one model, which differ in their memory alone, answer greedily and by turns. `loop` are the twelve
requests of agent_loop.jsonl, in their order, from an empty memory on; `again` are the same requests a second time; and
`fresh` are prompts that no two alike are among, from an empty memory on. A record has what an engine took for one
request; the last records of a kind and round have the sums, and
the speed with a memory over that without: of all requests together, and the median over requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.arguments import add_arguments
from bench.provenance import Record, show
from specengine import Engine, policies
from specengine.benchmark import workloads
from specengine.benchmark.ways import without_memory
from specengine.checkpoints.texts import Memory
from specengine.drafters.lookup import backend

LOOP = Path(__file__).with_name("agent_loop.jsonl")
WITHOUT, WITH = "auto", "auto with memory"


def engines_on(first: Engine) -> dict[str, Engine]:
    """Return new engines on the model and the draft of one, without and with a memory that is empty."""
    engines = {}
    for name in (WITHOUT, WITH):
        assert first.drafter is not None
        drafter = without_memory(first.drafter)
        engines[name] = Engine(first.target, drafter, policies.make("auto"), first.tokenizer)
        engines[name].memory = None
        if name == WITH:
            engines[name].memory = Memory(backend().TextMemory, first.target.vocab_size)
    return engines


def answered(
    engines: dict[str, Engine], requests: list[list[dict[str, str]]], kind: str, tokens: int
) -> Iterator[Record]:
    """Yield a record per request and engine, then the sums of both."""
    sums = {name: {"tokens": 0, "passes": 0, "seconds": 0.0} for name in engines}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number, messages in enumerate(requests):
        order = list(engines) if number % 2 else list(reversed(engines))
        for name in order:
            result = engines[name].generate(messages, max_new_tokens=tokens, temperature=0.0)
            stats = result.stats
            figures = {
                "tokens": stats.num_generated_tokens,
                "passes": stats.num_spec_steps,
                "seconds": stats.elapsed_s - stats.ttft_s,
            }
            for field, value in figures.items():
                sums[name][field] += value
            speeds[name].append(figures["tokens"] / max(figures["seconds"], 1e-3))
            yield {"record": "answer", "kind": kind, "number": number, "way": name} | {
                field: round(value, 4) for field, value in figures.items()
            }
    for name, each in sums.items():
        yield {
            "record": "sum",
            "kind": kind,
            "way": name,
            "tokens": each["tokens"],
            "tokens_per_pass": round(each["tokens"] / each["passes"], 3),
            "tokens_per_second": round(each["tokens"] / each["seconds"], 2),
        }
    without, with_ = (sums[name]["seconds"] / sums[name]["tokens"] for name in (WITHOUT, WITH))
    ratios = [new / old for old, new in zip(speeds[WITHOUT], speeds[WITH], strict=True)]
    yield {
        "record": "ratio",
        "kind": kind,
        "speed": round(without / with_, 3),
        "median": round(statistics.median(ratios), 3),
    }


def records(args: argparse.Namespace) -> Iterator[Record]:
    first = Engine.from_pretrained(args.model, args.draft, memory="off")
    loop = [json.loads(line)["messages"] for line in LOOP.read_text("utf-8").splitlines()]
    for number in range(args.rounds + 1):
        engines = engines_on(first)
        for kind in ("loop", "again"):
            of_round = list(answered(engines, loop, kind, args.max_new_tokens))
            if number:  # the first round warms up
                yield from ({"round": number} | record for record in of_round)
    if args.prompts is not None:
        items = workloads.read([args.prompts], args.per_set)
        fresh = [[{"role": "user", "content": item.text}] for item in items]
        yield {"record": "prompts", "digest": workloads.digest(items), "count": len(items)}
        yield from answered(engines_on(first), fresh, "fresh", args.max_new_tokens)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description=(__doc__ or "").splitlines()[0]
    )
    add_arguments(parser, "model", "draft", "prompts", "per_set", "max_new_tokens", "out", rounds=2)
    args = parser.parse_args(argv)
    show(records(args), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
