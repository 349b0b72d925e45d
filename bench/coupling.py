"""What it is worth that drafts of sampled text know the noise of the draws: with it and without, and plain decoding.

All ways answer each prompt in turn, with the same seed, for each way of sampling; every answer is compared with plain
decoding's.

    python -m bench.coupling --prompts FOLDER --per-set 4 --out FILE
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import provenance, workloads
from specengine import Engine

SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "temperature 0.6, top-p 0.95, top-k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "temperature 0.7, top-p 0.8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
}
PLAIN = "plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--draft", help="default: the model's")
    parser.add_argument("--policy", action="append", help="repeatable; default: auto and salf/cpu")
    parser.add_argument("--prompts", type=Path, help="folder of .jsonl prompt sets; default: a few built-in prompts")
    parser.add_argument("--per-set", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    provenance.show(measure(args), args.out)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    items = workloads.read(args.prompts, args.per_set)
    names = args.policy or ["auto", "salf/cpu"]
    ways = [Way(PLAIN, False, args), *(Way(name, knows, args) for name in names for knows in (True, False))]
    for way in ways:
        way.answer(items[0].text, max_new_tokens=16, temperature=1.0)  # all is loaded and measured
    for sampling, options in SAMPLINGS.items():
        sums = [[0, 0, 0.0] for _ in ways]
        other = [0] * len(ways)
        for item in items:
            wanted: list[int] = []
            for place, way in enumerate(ways):
                began = time.perf_counter()
                found = way.answer(item.text, max_new_tokens=args.max_new_tokens, **options)
                sums[place][2] += time.perf_counter() - began
                sums[place][0] += found.stats.num_generated_tokens
                sums[place][1] += found.stats.num_spec_steps
                wanted = wanted or found.token_ids
                other[place] += found.token_ids != wanted
        plain = sums[0][0] / sums[0][2]
        for way, (tokens, cycles, seconds), differs in zip(ways, sums, other, strict=True):
            yield {
                "record": "coupling",
                "sampling": sampling,
                "policy": way.policy,
                "coupled": way.knows,
                "prompts": len(items),
                "tau": round(tokens / max(cycles, 1), 3),
                "tokens_per_s": round(tokens / seconds, 1),
                "over_plain": round(tokens / seconds / plain, 3),
                "answers_other_than_plain": differs,
            }


class Way:
    """A policy, with a draft of its own, whose history is of its own answers alone."""

    def __init__(self, policy: str, knows: bool, args: argparse.Namespace) -> None:
        self.policy, self.knows, self._seed = policy, knows, args.seed
        self._engine = Engine.from_pretrained(args.model, args.draft, policy)

    def answer(self, text: str, **options: Any) -> Any:
        return self._engine.generate(text, **options, seed=self._seed, coupled=self.knows)


if __name__ == "__main__":
    main()
