"""End to end: speculative decoding against the baselines that users have, interleaved in one run.

Baselines: Hugging Face `generate`, its prompt-lookup decoding, and this engine's own plain decoding. Every way
answers every prompt once per round, in turn; a prompt's figure is the median over rounds, a set's the mean over its
prompts of the per-prompt speed-up (and the ratio of the summed times).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from specengine import Engine, calibration, policies
from specengine import checkpoints as models

Way = Callable[[list[int]], tuple[int, float]]  # prompt -> new tokens, mean acceptance length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--prompts", type=Path, help="folder of .jsonl prompt sets; default: a few built-in prompts")
    parser.add_argument("--per-set", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default=None)
    parser.add_argument("--draft", default=None, help="default: the model's best")
    parser.add_argument("--lookup", action=argparse.BooleanOptionalAction, help="copies in the draft, or the head")
    parser.add_argument("--policy", action="append", help="repeatable; default: the draft's own")
    parser.add_argument(
        "--tree",
        type=_tree,
        action="append",
        default=[],
        metavar="WIDTHxEXPANSIONSxBUDGET",
        help="the eagle policy with this tree, repeatable; also measures what verifying and drafting cost",
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(models.resolve(args.model), dtype=getattr(torch, args.dtype))
    model = model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plain = Engine.from_pretrained(model, policy="plain")
    ways: dict[str, Way] = {
        "huggingface": _huggingface(model, args.max_new_tokens),
        "huggingface prompt lookup": _huggingface(model, args.max_new_tokens, prompt_lookup_num_tokens=10),
        "plain": _engine(plain, args.max_new_tokens),
    }
    shapes: list[tuple[str | None, dict[str, Any]]] = [("eagle", tree) for tree in args.tree]
    shapes += [(policy, {}) for policy in args.policy or ([] if shapes else [None])]
    first = Engine.from_pretrained(model, args.draft, lookup=args.lookup)
    for policy, options in shapes:
        shaped = policies.make(policy, **options) if policy else first.policy
        engine = Engine(plain.target, first.drafter, shaped, plain.tokenizer)
        ways[f"{first.drafter.name}, {shaped!r}"] = _engine(engine, args.max_new_tokens)  # type: ignore[union-attr]
    items = workloads.read(args.prompts, args.per_set)
    costs = [calibration.measure(first.target, first.drafter).record()] if args.tree else []
    measured = (_measure(plain, ways, item, args.rounds) for item in items)
    rows = list(provenance.kept(measured, args.out))
    result = [*costs, *_summaries(rows), *rows]
    for row in result:
        if row["record"] != "row":
            print(json.dumps(row, indent=1))
    if args.out:
        provenance.write(args.out, result)


def _tree(text: str) -> dict[str, int]:
    width, expansions, budget = map(int, text.split("x"))
    return {"width": width, "expansions": expansions, "budget": budget}


def _huggingface(model: Any, length: int, **options: Any) -> Way:
    def run(prompt: list[int]) -> tuple[int, float]:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **options
        )
        return out.shape[1] - len(prompt), 0.0

    return run


def _engine(engine: Engine, length: int) -> Way:
    def run(prompt: list[int]) -> tuple[int, float]:
        result = engine.generate(prompt, max_new_tokens=length)
        return len(result.token_ids), result.stats.mean_acceptance_length

    return run


def _measure(plain: Engine, ways: dict[str, Way], item: workloads.Workload, rounds: int) -> dict[str, Any]:
    prompt = plain.stream(item.text, max_new_tokens=1).prompt
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens, lengths = {}, {}
    for _ in range(rounds):
        for name, run in ways.items():
            began = time.perf_counter()
            tokens[name], lengths[name] = run(prompt)
            seconds[name].append(time.perf_counter() - began)
    rate = {name: tokens[name] / statistics.median(values) for name, values in seconds.items()}
    print(item.set, item.id, {name: round(value, 1) for name, value in rate.items()}, file=sys.stderr, flush=True)
    return {
        "record": "row",
        "set": item.set,
        "id": item.id,
        "prompt_tokens": len(prompt),
        "new_tokens": tokens,
        "tokens_per_second": {name: round(value, 2) for name, value in rate.items()},
        "mean_acceptance_length": {name: round(value, 3) for name, value in lengths.items() if value},
    }


def _summaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sets = dict.fromkeys(row["set"] for row in rows)
    groups = {name: [row for row in rows if row["set"] == name] for name in sets}
    if len(groups) > 1:
        groups["all"] = rows
    return [_summary(name, members) for name, members in groups.items()]


def _summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    ways = rows[0]["tokens_per_second"]
    rates = {way: [row["tokens_per_second"][way] for row in rows] for way in ways}

    def speedup(way: str, baseline: str) -> float:
        return round(statistics.mean(a / b for a, b in zip(rates[way], rates[baseline], strict=True)), 3)

    return {
        "record": "summary",
        "set": name,
        "prompts": len(rows),
        "tokens_per_second": {way: round(statistics.mean(values), 2) for way, values in rates.items()},
        "speedup_over_huggingface": {way: speedup(way, "huggingface") for way in ways},
        "speedup_over_plain": {way: speedup(way, "plain") for way in ways},
        "mean_acceptance_length": {
            way: round(statistics.mean(row["mean_acceptance_length"][way] for row in rows), 3)
            for way in rows[0]["mean_acceptance_length"]
        },
    }


if __name__ == "__main__":
    main()
