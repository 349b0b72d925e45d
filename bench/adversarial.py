"""Prompts that are hard to draft for: the default engine compared with its own plain decoding, interleaved.

Random tokens, temperature 2, other languages, contexts of 2,000 tokens. Both methods answer each
prompt in turn, for several rounds. The figure of a prompt is the ratio of the median times.

    python -m bench.adversarial --out FILE
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from typing import Any

from bench import provenance
from bench.arguments import add_arguments
from specengine import Engine

LANGUAGES = {
    "german": "Erkläre einem Kind in drei Sätzen, warum der Himmel am Abend rot wird.",
    "french": "Décris en quelques phrases une journée de marché dans un petit village de montagne.",
    "japanese": "日本の四季について、短い文章を書いてください。",
    "russian": "Напиши короткий рассказ о кошке, которая живёт на маяке.",
    "finnish": "Kerro lyhyesti, miten leipä leivotaan ja miksi taikinan täytyy nousta.",
}


def cases(vocabulary: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return prompts and options by name."""
    draw = random.Random(0)

    def noise(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    found: dict[str, tuple[Any, dict[str, Any]]] = {
        f"random tokens {i}": (noise(40), {}) for i in range(4)
    }
    found |= {
        f"random tokens, temperature 2, {i}": (noise(40), {"temperature": 2.0}) for i in range(3)
    }
    story = "Write a short story about a lighthouse keeper who finds a letter in a bottle."
    found |= {f"temperature 2, {i}": (story, {"temperature": 2.0}) for i in range(3)}
    found |= {name: (text, {}) for name, text in LANGUAGES.items()}
    found |= {f"2,000 random tokens {i}": (noise(2000), {}) for i in range(2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "max_new_tokens", "rounds", "out")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    args = parser.parse_args()
    provenance.show(measure(args), args.out)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ours = Engine.from_pretrained(dtype=args.dtype, memory="off")
    plain = Engine(ours.target, None, None, ours.tokenizer)
    rows = []
    for name, case in cases(ours.target.vocab_size).items():
        rows.append(_measure(ours, plain, name, *case, args))
        yield rows[-1]
    worst = min(row["over_plain"] for row in rows)
    overhead = statistics.mean(row["policy_share"] for row in rows)
    yield {"record": "summary", "worst_over_plain": worst, "mean_policy_share": round(overhead, 4)}


def _measure(
    ours: Engine,
    plain: Engine,
    name: str,
    prompt: Any,
    options: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    settings = {
        "temperature": 0.0,
        **options,
        "max_new_tokens": args.max_new_tokens,
        "eos_token_id": [],
        "seed": 0,
    }
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    results = {}
    for number in range(args.rounds):
        for way, engine in [("ours", ours), ("plain", plain)][:: 1 if number % 2 else -1]:
            results[way] = engine.generate(prompt, **settings)
            stats = results[way].stats
            times[way].append(stats.elapsed_s - stats.ttft_s)
    stats = results["ours"].stats
    return {
        "record": "row",
        "case": name,
        "over_plain": round(
            statistics.median(times["plain"]) / statistics.median(times["ours"]), 3
        ),
        "rounds": [round(b / a, 3) for a, b in zip(times["ours"], times["plain"], strict=True)],
        "tau": round(stats.mean_acceptance_length, 3),
        "plain_steps": stats.num_plain_steps,
        "steps": stats.num_spec_steps,
        "draft_passes": stats.num_draft_passes,
        "policy_share": round(stats.time_policy_s / stats.elapsed_s, 4),
        "same_tokens": results["ours"].token_ids == results["plain"].token_ids,
    }


if __name__ == "__main__":
    main()
