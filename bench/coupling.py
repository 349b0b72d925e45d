"""Sampled text with drafts that know the sampler's noise, with drafts that do not, and plain decoding.

Methods are measured as in `specengine bench`, with the same seed, for each kind of sampling. Every answer is compared
with plain decoding.

    python -m bench.coupling --prompts FOLDER --per-set 4 --out FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench import provenance, workloads
from bench.arguments import add_arguments
from specengine.benchmark.choice import Comparison
from specengine.benchmark.measuring import Run
from specengine.benchmark.summaries import ALL, summaries
from specengine.benchmark.ways import PLAIN, EngineDecoder, Engines, Spec, Way
from specengine.engine import Engine
from specengine.options import LoadOptions

POLICIES = ("auto", "salf/cpu")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "temperature 0.6, top-p 0.95, top-k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "temperature 0.7, top-p 0.8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "model", "draft", "prompts", "out", per_set=4, max_new_tokens=96)
    parser.add_argument("--policy", action="append", help="repeatable; default: auto and salf/cpu")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    provenance.show(measure(args), args.out)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    items = workloads.read(args.prompts, args.per_set)
    first = Engine.from_pretrained(args.model, args.draft)
    asked = [
        (PLAIN, False),
        *((name, knows) for name in args.policy or POLICIES for knows in (True, False)),
    ]
    for sampling, options in SAMPLINGS.items():
        ways = {_name(*one): one for one in asked}
        run = Run(
            Comparison.plain(first),
            [
                Way(name, partial(_decoder, first, *one, options | {"seed": args.seed}))
                for name, one in ways.items()
            ],
            options | {"seed": args.seed},
            length=args.max_new_tokens,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        for found in summaries(run.records(items)):
            if found["set"] == ALL:
                policy, knows = ways[found["way"]]
                yield {
                    "record": "coupling",
                    "sampling": sampling,
                    "policy": policy,
                    "coupled": knows,
                    "prompts": found["prompts"],
                    "tau": round(found["tau"], 3),
                    "tokens_per_s": round(found["tokens_per_second"], 1),
                    "over_plain": round(found["speed_total"], 3),
                    "answers_other_than_plain": found["diverging"],
                }


def _name(policy: str, knows: bool) -> str:
    return policy if knows or policy == PLAIN else f"{policy}, not coupled"


def _decoder(first: Engine, policy: str, knows: bool, options: dict[str, Any]) -> EngineDecoder:
    engine = Engines(first, LoadOptions()).make(Spec.of(policy).make())
    return EngineDecoder(engine, options | {"coupled": knows})


if __name__ == "__main__":
    main()
