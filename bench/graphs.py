"""Captured against eager: plain decoding and policies with CUDA graphs and without, beside transformers' own decoding.

Ways: transformers' `generate`, the same with a static cache (which transformers compiles on a CUDA device), plain
decoding here, and each policy, the last two eagerly and as graphs. On a CUDA device all policies take part. A way that
is refused or fails is listed with the reason, and the others go on.

Every way answers the first prompt once before anything is timed: kernels are compiled and graphs captured then. After
that every way answers every prompt once per round, in turn; a prompt's figure is the median over rounds. Answers are
greedy; those that differ from plain decoding's are counted, as half precision may flip near-ties. With --strict plain
decoding and the policies also run with strict verification, where none may differ from strict plain decoding. On a CUDA
device the profiler counts, over one more answer of each way, how often the host waited for the device.
`python -m bench.report` makes tables of the file.

    python -m bench.graphs --device cuda --out FILE
    python -m research.inflate --shape 8b --out build/8b && python -m bench.graphs --device cuda --model build/8b \\
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
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from specengine import Engine, ops, policies
from specengine import captured as captured_driver
from specengine import checkpoints as models
from specengine.drafters.eagle import Eagle
from specengine.errors import is_fault

T = TypeVar("T")
POLICIES = ("eagle", "talon", "salf", "chain")
STRICT = ", strict"
NEEDED = ("transformers", "plain", "plain, graphs")  # what the others are told against
PARTS = ("draft", "policy", "verify", "walk", "commit")


@dataclass
class Answer:
    """Token ids, and per cycle: tokens committed, milliseconds of each part (as the host sees them) and of the whole.

    Parts are told where cycles are split into parts; the whole is the mean over cycles behind the first.
    """

    tokens: list[int]
    length: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


Way = Callable[[list[int]], Answer]


@dataclass
class Field:
    """The ways that run, the engines of those that have one, and a record of each way that does not run, or no more."""

    ways: dict[str, Way] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    dropped: list[dict[str, Any]] = field(default_factory=list)

    def attempt(self, name: str, function: Callable[[], T]) -> T | None:
        """What `function` returns; None where it fails, and then the way takes no further part.

        An error that is not specengine's own is a fault. Without the ways of NEEDED there is nothing to tell.
        """
        try:
            return function()
        except Exception as error:
            if name in NEEDED:
                raise
            self.ways.pop(name, None)
            self.engines.pop(name, None)
            fault, reason = is_fault(error), _reason(error)
            print(f"{name} {'failed' if fault else 'cannot run'}: {reason}", file=sys.stderr, flush=True)
            self.dropped.append({"record": "not run", "way": name, "reason": reason, "fault": fault})
            return None

    def add(self, name: str, length: int, *parts: Any, **options: Any) -> Engine | None:
        """An engine of these parts as a way; None where it is refused."""
        engine = self.attempt(name, lambda: Engine.from_pretrained(*parts, **options))
        if engine is not None:
            self._share_head(engine)
            self.engines[name], self.ways[name] = engine, _engine(engine, length)
        return engine

    def _share_head(self, engine: Engine) -> None:
        """On a device all engines read one copy of the head's weights: an 8B model's has 0.75 GB, and they are many."""
        if not isinstance(engine.drafter, Eagle) or engine.target.device.type == "cpu":  # there weights are packed
            return
        drafters = [other.drafter for other in self.engines.values()]
        first = next((other for other in drafters if isinstance(other, Eagle)), engine.drafter)
        for head, known in zip(engine.drafter.weights, first.weights, strict=True):
            for own, shared in zip(head.parameters(), known.parameters(), strict=True):
                own.data = shared.data


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.graphs", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--draft", help="default: the model's best")
    parser.add_argument(
        "--policy",
        action="append",
        help=f"repeatable; default: all on a CUDA device, elsewhere {', '.join(POLICIES)}",
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
    found = _ways(args)
    items = workloads.read(args.prompts, args.per_set)
    prompts = [found.engines["plain"].stream(item.text, max_new_tokens=1).prompt for item in items]
    for name, way in list(found.ways.items()):
        found.attempt(name, lambda way=way: way(prompts[0]))  # type: ignore[misc]
    measured = (
        _measure(found, item, prompt, args.rounds) | {"set": item.set}
        for item, prompt in zip(items, prompts, strict=True)
    )
    rows = [row for row in provenance.kept(chain([_setting(args)], measured), args.out) if row["record"] == "row"]
    summary = _summary(rows, list(found.ways))
    captures = []
    for name in list(found.ways):
        waits, captured = _last_looks(found, name, prompts[0], args.device)
        summary["host_waits"] |= waits
        captures += captured
    head = [_setting(args), *found.dropped, *captures, summary]
    for row in head:
        print(json.dumps(row, indent=1))
    if args.out:
        provenance.write(args.out, [*head, *rows])
    return int(any(record["fault"] for record in found.dropped))


def _ways(args: argparse.Namespace) -> Field:
    for policy in args.policy or ():
        policies.make(policy)  # what is asked for by a wrong name is refused at once
    path, dtype = models.resolve(args.model), getattr(torch, args.dtype)
    untouched, model = (AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(args.device) for _ in range(2))
    length, found = args.max_new_tokens, Field()
    found.ways["transformers"] = _transformers(untouched, length)
    found.ways["transformers, static cache"] = _transformers(untouched, length, cache_implementation="static")
    found.add("plain", length, model, policy="plain")
    found.add("plain, graphs", length, model, policy="plain", graphs=True)
    for policy in _policies(args):
        parts = (length, model, args.draft, policy)
        found.add(policy, *parts, lookup=False)
        found.add(f"{policy}, graphs", *parts, graphs=True)
    if args.strict:
        for policy in ("plain", *_policies(args)):
            draft = None if policy == "plain" else args.draft
            found.add(f"{policy}, graphs{STRICT}", length, model, draft, policy, graphs=True, strict=True)
    return found


def _policies(args: argparse.Namespace) -> list[str]:
    if args.policy or not args.device.startswith("cuda"):
        return args.policy or list(POLICIES)
    return [*POLICIES, *(name for name in policies.names() if name not in (*POLICIES, "plain"))]


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
        split = captured_driver.NOTE not in stats.notes
        parts = {part: 1e3 * getattr(stats, f"time_{part}_s") / cycles for part in PARTS if split}
        parts["total"] = 1e3 * (stats.elapsed_s - stats.ttft_s) / max(1, cycles - 1)
        return Answer(result.token_ids, stats.mean_acceptance_length, parts)

    return run


def _measure(found: Field, item: workloads.Workload, prompt: list[int], rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in found.ways}
    answers: dict[str, Answer] = {}
    for _ in range(rounds):
        for name, way in list(found.ways.items()):
            _finish()  # a cycle of the way before, whose record nobody waits for, is not this one's time
            began = time.perf_counter()
            answer = found.attempt(name, lambda way=way: way(prompt))  # type: ignore[misc]
            _finish()
            if answer is not None:
                seconds[name].append(time.perf_counter() - began)
                answers[name] = answer
    answers = {name: answers[name] for name in found.ways}
    seconds = {name: seconds[name] for name in found.ways}
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
            name
            for name, answer in answers.items()
            if name.endswith(STRICT) in plain and answer.tokens != plain[name.endswith(STRICT)]
        ],
    }


def _finish() -> None:
    """Wait for what a device, if there is one, still has to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _last_looks(found: Field, name: str, prompt: list[int], device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of one way: how often its host waits, and what its graphs hold; it is given up then, with the memory it holds."""
    way, engine = found.ways.pop(name), found.engines.pop(name, None)
    waits = {name: _or_reason(lambda: _host_waits(way, prompt))} if device != "cpu" else {}
    if engine is None or ", graphs" not in name:
        return waits, []
    captured = _or_reason(lambda: asdict(engine.warmup(1024)))
    return waits, [{"record": "captures", "way": name, **captured}]


def _or_reason(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured before is worth more than this: a failure becomes an entry."""
    try:
        return function()
    except Exception as error:
        return {"failed": _reason(error)}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def _host_waits(way: Way, prompt: list[int]) -> dict[str, int]:
    """How often each call of the CUDA runtime on which the host waits was made for one answer.

    The profiler itself waits for the device at its start and its end: as often as where nothing is asked.
    """
    own = _waits_within(lambda: None)
    calls = _waits_within(lambda: way(prompt))
    return {name: count - own.get(name, 0) for name, count in calls.items() if count > own.get(name, 0)}


def _waits_within(function: Callable[[], Any]) -> dict[str, int]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    _finish()
    with torch.profiler.profile(activities=activities) as profile:
        function()
        _finish()  # what is still under way belongs to it
    return {event.key: event.count for event in profile.key_averages() if event.key in WAITING}


def _setting(args: argparse.Namespace) -> dict[str, Any]:
    taken = {op: backend.name for op, backend in ops.backends(args.device).items()}
    named = ("dtype", "device", "max_new_tokens", "per_set", "rounds", "strict")
    model = Path(args.model).name if args.model else models.embedded.NAME
    return {
        "record": "settings",
        "model": model,
        **{name: getattr(args, name) for name in named},
        "backends_there": taken,
    }


def _summary(rows: list[dict[str, Any]], ways: list[str]) -> dict[str, Any]:
    static = "transformers, static cache"

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
        "speedup_over_static_cache": {way: mean_ratio(way, static) for way in ways if static in ways},
        "speedup_over_plain_graphs": {way: mean_ratio(way, "plain, graphs") for way in ways},
        "answers_that_differ_from_plain": {way: sum(way in row["differs_from_plain"] for row in rows) for way in ways},
        "host_waits": {},
    }


if __name__ == "__main__":
    sys.exit(main())
