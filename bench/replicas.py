"""Throughput of replicas on this machine: 1, 2 and more engines that share its cores answer the built-in prompts.

Each setting uses Ray's processes as `specengine batch --replicas` does, loaded before the clock starts. The settings
alternate. One replica on all cores is the baseline.

    python -m bench.replicas --out FILE
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from ray.util import ActorPool

from bench import provenance
from bench.arguments import add_arguments
from specengine.batch.lines import Item
from specengine.batch.spread import LineReplica
from specengine.benchmark import workloads
from specengine.cli.given import EngineArguments
from specengine.replicas import Scale, cluster
from specengine.replicas.cluster import ray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "out", max_new_tokens=64, rounds=2)
    parser.add_argument(
        "--way", action="append", metavar="REPLICASxTHREADS", help="(default: 1x2, 1x1, 2x1, 4x1)"
    )
    args = parser.parse_args()
    ways = [tuple(map(int, way.split("x"))) for way in args.way or ["1x2", "1x1", "2x1", "4x1"]]
    built_in = workloads.read(None)
    options = {"temperature": 0.0, "max_new_tokens": args.max_new_tokens, "seed": 0}
    items = [Item(place, item.id, item.text, options) for place, item in enumerate(built_in)]
    rounds: dict[tuple[int, ...], list[dict[str, Any]]] = {way: [] for way in ways}
    lines: list[Any] = []
    with cluster.running(
        Scale(sum(count for count, _ in ways), threads=max(each for _, each in ways))
    ):
        loaded = {way: _load(*way) for way in ways}
        for number in range(args.rounds):
            for way in ways[:: -1 if number % 2 else 1]:
                found, answers = _measure(loaded[way], items)
                rounds[way].append(found)
                lines.append(answers)
    assert all(answers == lines[0] for answers in lines), "every way gives the same answers"
    first = statistics.median(found["tokens_per_second"] for found in rounds[ways[0]])
    records = [_record(way, found, first) for way, found in rounds.items()]
    records.append(
        {
            "record": "summary",
            "prompts": len(items),
            "same_answers": True,
            **vars(args) | {"out": None},
        }
    )
    provenance.show(records, args.out)


def _load(count: int, threads: int) -> list[Any]:
    """Load the replicas one after the other, so that they do not measure costs at the same time."""
    made: Any = ray.remote(LineReplica)
    options = cluster.needs(Scale(count, threads=threads))
    replicas = [
        made.options(**options).remote(EngineArguments(threads=threads).load) for _ in range(count)
    ]
    for replica in replicas:
        ray.get(replica.load.remote())
        ray.get(replica.answer.remote(Item(0, "warm", "Say hello.", {"max_new_tokens": 16})))
    return replicas


def _measure(replicas: list[Any], items: list[Item]) -> tuple[dict[str, Any], Any]:
    began = time.perf_counter()
    answers = list(
        ActorPool(replicas).map_unordered(lambda replica, item: replica.answer.remote(item), items)
    )
    seconds = time.perf_counter() - began
    tokens = sum(answered.stats[0]["num_generated_tokens"] for answered in answers)
    latency = statistics.median(answered.stats[0]["elapsed_s"] for answered in answers)
    lines = [answered.line for answered in sorted(answers, key=lambda answered: answered.place)]
    found = {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "median_answer_s": latency,
    }
    return found, lines


def _record(way: tuple[int, ...], rounds: list[dict[str, Any]], first: float) -> dict[str, Any]:
    median = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    rate = median["tokens_per_second"]
    return {
        "record": "row",
        "replicas": way[0],
        "threads": way[1],
        "tokens": median["tokens"],
        "seconds": round(median["seconds"], 2),
        "tokens_per_second": round(rate, 1),
        "per_replica": round(rate / way[0], 1),
        "over_first": round(rate / first, 3),
        "median_answer_s": round(median["median_answer_s"], 3),
        "rounds": [round(found["tokens_per_second"], 1) for found in rounds],
    }


if __name__ == "__main__":
    main()
