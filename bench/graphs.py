"""Captured against eager: plain decoding and policies with CUDA graphs and without, beside transformers' own decoding.

Ways: transformers' `generate`, the same with a static cache (which transformers compiles on a CUDA device), plain
decoding here, and each policy, the last two eagerly and as graphs, with every loop that the policy can run in (see
specengine/resident.py). Every way answers the first prompt once before
anything is timed: kernels are compiled and graphs captured then. After that every way answers every prompt once per
round, in turn; a prompt's figure is the median over rounds. Answers are greedy; those that differ from plain decoding's
are counted, as half precision may flip near-ties. With --strict plain decoding and the policies also run with strict
verification, where none may differ from strict plain decoding. On a CUDA device the profiler counts, over one more
answer of each way, how often the host waited for the device.

    python -m bench.graphs --device cuda --out FILE
    python -m bench.inflate --shape 8b --out build/8b && python -m bench.graphs --device cuda --model build/8b \\
        --draft build/8b/head --out FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from specengine import Engine, models, ops, resident

POLICIES = ("eagle", "talon", "salf", "chain")
STRICT = ", strict"
PARTS = ("draft", "policy", "verify", "walk", "commit")


@dataclass
class Answer:
    """Token ids, and per cycle: tokens committed, milliseconds of each part (as the host sees them)."""

    tokens: list[int]
    length: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


Way = Callable[[list[int]], Answer]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.graphs", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--draft", help="default: the model's best")
    parser.add_argument("--policy", action="append", help=f"repeatable; default: {', '.join(POLICIES)}")
    parser.add_argument(
        "--loop", action="append", help="read, ahead or while; repeatable; default: all that a policy can"
    )
    parser.add_argument("--strict", action="store_true", help="graphs with strict verification as well")
    parser.add_argument("--prompts", type=Path, help="folder of .jsonl prompt sets; default: a few built-in prompts")
    parser.add_argument("--per-set", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    engines, ways = _ways(args)
    items = workloads.read(args.prompts, args.per_set)
    prompts = [engines["plain"].stream(item.text, max_new_tokens=1).prompt for item in items]
    for way in ways.values():
        way(prompts[0])
    rows = [
        _measure(ways, item, prompt, args.rounds) | {"set": item.set}
        for item, prompt in zip(items, prompts, strict=True)
    ]
    waits = {name: _host_waits(way, prompts[0]) for name, way in ways.items()} if args.device != "cpu" else {}
    result = [_setting(args), *_captures(engines), _summary(rows) | {"host_waits": waits}, *rows]
    for row in result[: -len(rows)]:
        print(json.dumps(row, indent=1))
    if args.out:
        provenance.write(args.out, result)


def _ways(args: argparse.Namespace) -> tuple[dict[str, Engine], dict[str, Way]]:
    path, dtype = models.resolve(args.model), getattr(torch, args.dtype)
    untouched, model = (AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(args.device) for _ in range(2))
    engines = {"plain": Engine.from_pretrained(model, policy="plain")}
    for loop in ("host", "read"):
        engines[f"plain, graphs, {loop}"] = Engine.from_pretrained(model, policy="plain", graphs=True, loop=loop)
    for policy in args.policy or POLICIES:
        engines[policy] = Engine.from_pretrained(model, args.draft, policy, lookup=False)
        captured = Engine.from_pretrained(model, args.draft, policy, graphs=True, loop="host")
        engines[f"{policy}, graphs, host"] = captured
        for loop in args.loop or _loops(captured, args.device):
            engine = Engine.from_pretrained(model, args.draft, policy, graphs=True, loop=loop)
            engines[f"{policy}, graphs, {loop}"] = engine
    if args.strict:
        for policy in ("plain", *(args.policy or POLICIES)):
            engines[f"{policy}, graphs{STRICT}"] = Engine.from_pretrained(
                model, None if policy == "plain" else args.draft, policy, graphs=True, strict=True
            )
    length = args.max_new_tokens
    ways: dict[str, Way] = {
        "transformers": _transformers(untouched, length),
        "transformers, static cache": _transformers(untouched, length, cache_implementation="static"),
    }
    return engines, ways | {name: _engine(engine, length) for name, engine in engines.items()}


def _loops(engine: Engine, device: str) -> list[str]:
    """The loops on the device that these parts can run in; where trees never end early, two of them are the same."""
    if resident.why_not(engine.target, engine.drafter, engine.policy):
        return []
    captured = device.startswith("cuda") and "cuda" in ops.backends(device)["walk"].available
    return ["read", *(["ahead"] if engine.policy.levels().ends_early else []), *(["while"] if captured else [])]


def _transformers(model: Any, length: int, **options: Any) -> Way:
    def run(prompt: list[int]) -> Answer:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **options
        )
        return Answer(out[0, len(prompt) :].tolist())

    return run


def _engine(engine: Engine, length: int) -> Way:
    def run(prompt: list[int]) -> Answer:
        result = engine.generate(prompt, max_new_tokens=length, temperature=0.0)
        stats = result.stats
        cycles = max(1, stats.num_spec_steps)
        parts = {part: 1e3 * getattr(stats, f"time_{part}_s") / cycles for part in PARTS}
        return Answer(result.token_ids, stats.mean_acceptance_length, parts)

    return run


def _measure(ways: dict[str, Way], item: workloads.Workload, prompt: list[int], rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, Answer] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            answers[name] = way(prompt)
            seconds[name].append(time.perf_counter() - began)
    rates = {name: round(len(answers[name].tokens) / statistics.median(spent), 2) for name, spent in seconds.items()}
    print(item.set, item.id, rates, file=sys.stderr, flush=True)
    plain = {False: answers["plain"].tokens}
    if f"plain, graphs{STRICT}" in answers:
        plain[True] = answers[f"plain, graphs{STRICT}"].tokens
    return {
        "record": "row",
        "id": item.id,
        "prompt_tokens": len(prompt),
        "new_tokens": {name: len(answer.tokens) for name, answer in answers.items()},
        "tokens_per_second": rates,
        "mean_acceptance_length": {name: round(answer.length, 3) for name, answer in answers.items() if answer.length},
        "cycle_ms": {
            name: {part: round(value, 3) for part, value in answer.parts.items()}
            for name, answer in answers.items()
            if answer.parts
        },
        "differs_from_plain": [
            name for name, answer in answers.items() if answer.tokens != plain[name.endswith(STRICT)]
        ],
    }


def _host_waits(way: Way, prompt: list[int]) -> dict[str, int]:
    """How often each call of the CUDA runtime on which the host waits was made for one answer."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        way(prompt)
        torch.cuda.synchronize()
    waiting = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    return {event.key: event.count for event in profile.key_averages() if event.key in waiting}


def _setting(args: argparse.Namespace) -> dict[str, Any]:
    taken = {op: backend.name for op, backend in ops.backends(args.device).items()}
    named = ("dtype", "device", "max_new_tokens", "per_set", "rounds", "strict")
    return {"record": "settings", **{name: getattr(args, name) for name in named}, "backends_there": taken}


def _captures(engines: dict[str, Engine]) -> list[dict[str, Any]]:
    return [
        {"record": "captures", "way": name, **asdict(engine.warmup(1024))}
        for name, engine in engines.items()
        if ", graphs" in name
    ]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ways = rows[0]["tokens_per_second"]

    def mean_ratio(way: str, baseline: str) -> float:
        ratios = [row["tokens_per_second"][way] / row["tokens_per_second"][baseline] for row in rows]
        return round(statistics.mean(ratios), 3)

    return {
        "record": "summary",
        "prompts": len(rows),
        "tokens_per_second": {
            way: round(statistics.mean(row["tokens_per_second"][way] for row in rows), 2) for way in ways
        },
        "speedup_over_transformers": {way: mean_ratio(way, "transformers") for way in ways},
        "speedup_over_static_cache": {way: mean_ratio(way, "transformers, static cache") for way in ways},
        "speedup_over_plain_graphs": {way: mean_ratio(way, "plain, graphs, read") for way in ways},
        "answers_that_differ_from_plain": {way: sum(way in row["differs_from_plain"] for row in rows) for way in ways},
    }


if __name__ == "__main__":
    main()
