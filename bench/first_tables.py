"""What `auto` makes of wrong first tables of costs, and of costs that were measured on a busy machine.

tables        From each of some wrong tables: answers, interleaved with those of an engine that began with true costs.
calibrations  Costs as they are measured while busy loops run, against those of the machine as it is.
plain         `auto` over plain decoding: with costs of the machine as it is, and with ones measured beside busy loops.

Everything is interleaved, and nothing else should run on the machine. Where others take over a tenth of the
processors, the last record says so.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bench import provenance, workloads
from bench.arguments import add_arguments
from specengine import Engine, policies
from specengine.benchmark.measuring import rotated
from specengine.costs import PassCosts, Points, interpolated
from specengine.costs.measuring import processor_times, share_of_others, stored
from specengine.records import Stats

JUDGED = 3  # of a table's answers, the last ones
COPIED = "Write a Python class for a bank account with deposit, withdraw and transfer."
BUSY: dict[
    str, Points
] = {  # tables that were kept on busy machines, of the default model, in passes of one row
    "seen: 16 rows 10.8": {1: 1.0, 2: 1.15, 4: 1.44, 8: 3.63, 16: 10.8, 32: 13.1, 64: 20.0},
    "seen: 8 rows 2.24": {1: 1.0, 2: 1.6, 4: 2.21, 8: 2.24, 16: 4.0, 32: 8.0, 64: 16.0},
}
SHAPE = (8, 16)  # rows whose cost over that of one is compared
NOISE_TOKENS = 150  # of a prompt of noise
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(
        parser, "model", "draft", "prompts", "per_set", "out", max_new_tokens=200, rounds=1
    )
    parser.add_argument("part", choices=("tables", "calibrations", "plain"))
    parser.add_argument("--answers", type=int, default=8, help="per table")
    parser.add_argument("--table", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--calibrations", type=int, default=10, help="beside busy loops, and as many without"
    )
    parser.add_argument("--loops", type=int, default=2, help="busy loops that run at once")
    parser.add_argument(
        "--noise", type=int, default=6, help="prompts of noise, answered at temperature 2"
    )
    args = parser.parse_args()
    provenance.show(_records(args), args.out)


def _records(args: argparse.Namespace) -> Iterator[Record]:
    before = processor_times()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.from_pretrained(args.model, args.draft, memory="off")
        parts = {"tables": _tables, "calibrations": _calibrations, "plain": _over_plain}
        yield from parts[args.part](engine, args, Path(folder))
    yield {"record": "load", "others": share_of_others(before)}


# ---- tables


def _tables(engine: Engine, args: argparse.Namespace, folder: Path) -> Iterator[Record]:
    with _cache(folder):
        true = _measured(engine)
    yield {"record": "true costs", **true.to_dict()}
    prompts = _texts(engine, args)
    for name, costs in first_tables(true).items():
        if args.table and name not in args.table:
            continue
        for text, asked in prompts.items():
            for round_ in range(args.rounds):
                rates = _race(engine, {"true": true, "first": costs}, asked, args)
                last = {way: statistics.median(each[-JUDGED:]) for way, each in rates.items()}
                yield {
                    "record": "table",
                    "table": name,
                    "text": text,
                    "round": round_,
                    "tokens_per_second": {
                        way: [round(rate, 1) for rate in each] for way, each in rates.items()
                    },
                    "last_over_true": round(last["first"] / last["true"], 3),
                }


def first_tables(true: PassCosts) -> dict[str, PassCosts]:
    """Return wrong first tables by name, and as a control the true one; true: whose unit and draft passes they have."""

    def table(verify: Points, scale: float = true.plain) -> PassCosts:
        changed = {"verify": {n: scale * cost for n, cost in verify.items()}, "verify_growth": {}}
        return PassCosts(**vars(true) | changed)

    tables = {"true, a control": table(true.verify)}
    tables |= {name: table(points) for name, points in BUSY.items()}
    tables["constant"] = table({1: 1.0, 64: 1.0})
    tables["linear"] = table({1: 1.0, 64: 64.0})
    tables["10 times too dear"] = table(true.verify, 10.0)
    tables["10 times too cheap"] = table(true.verify, 0.1)
    for seed in range(10):
        draw = random.Random(seed)
        costs = sorted(20 ** draw.random() for _ in range(6))
        tables[f"rising {seed}"] = table(
            {1: 1.0, **dict(zip((2, 4, 8, 16, 32, 64), costs, strict=True))}
        )
    return tables


def _texts(engine: Engine, args: argparse.Namespace) -> dict[str, list[tuple[Any, dict[str, Any]]]]:
    """Return prompts and options of the answers by kind of text: copies of the prompt, and greedy and sampled chat."""
    answer = engine.generate(COPIED, policy="plain", max_new_tokens=args.max_new_tokens).text
    copied = f"{COPIED}\n\n{answer}\n\n{COPIED}"
    items = workloads.read(args.prompts, args.per_set)
    chat = [items[number % len(items)].turns[0] for number in range(args.answers)]
    return {
        "copies": [(copied, {"temperature": 0.0})] * args.answers,
        "greedy": [(prompt, {"temperature": 0.0}) for prompt in chat],
        "sampled": [
            (prompt, {"temperature": 0.8, "seed": seed}) for seed, prompt in enumerate(chat)
        ],
    }


def _race(
    engine: Engine,
    costs: dict[str, PassCosts],
    asked: list[tuple[Any, dict[str, Any]]],
    args: argparse.Namespace,
) -> dict[str, list[float]]:
    """Return tokens per second by first table, of answers that take turns."""
    ways = {
        name: Engine(engine.target, engine.drafter, policies.make("auto"), engine.tokenizer)
        for name in costs
    }
    rates: dict[str, list[float]] = {name: [] for name in costs}
    for number, (prompt, options) in enumerate(asked):
        for name in rotated(list(ways), number):
            with mock.patch.object(stored, "find", lambda *_, name=name, **__: costs[name]):
                rates[name].append(_rate(ways[name], prompt, args.max_new_tokens, options).rate)
    return rates


# ---- calibrations


def _calibrations(engine: Engine, args: argparse.Namespace, folder: Path) -> Iterator[Record]:
    shapes: dict[bool, list[dict[int, float]]] = {False: [], True: []}
    provisional: list[bool] = []
    for number in range(args.calibrations):
        for busy in (False, True):
            with _cache(folder), _loops(args.loops if busy else 0):
                costs = _measured(engine)
            shape = {n: interpolated(costs.verify, n) / costs.plain for n in SHAPE}
            shapes[busy].append(shape)
            if busy:
                provisional.append(costs.doubt is not None)
            told = {
                "shape": {str(n): round(cost, 3) for n, cost in shape.items()},
                "load": round(costs.load, 3),
            }
            yield {
                "record": "calibration",
                "number": number,
                "busy": busy,
                **told,
                "doubt": costs.doubt,
            }
    quiet = {n: statistics.median(shape[n] for shape in shapes[False]) for n in SHAPE}
    near = [all(abs(shape[n] / quiet[n] - 1) <= 0.15 for n in SHAPE) for shape in shapes[True]]
    yield {
        "record": "calibrations",
        "quiet_shape": {str(n): round(cost, 3) for n, cost in quiet.items()},
        "within_15_percent": sum(near),
        "provisional": sum(provisional),
        "either": sum(map(max, near, provisional)),
        "of": len(near),
    }


# ---- over plain decoding


def _over_plain(engine: Engine, args: argparse.Namespace, folder: Path) -> Iterator[Record]:
    caches = {"fresh": folder / "fresh", "filled beside load": folder / "loaded"}
    for name, cache in caches.items():
        with _cache(cache), _loops(0 if name == "fresh" else args.loops):
            costs = _measured(engine)
        yield {"record": "costs", "cache": name, **costs.to_dict(), "doubt": costs.doubt}
    ways = {
        name: Engine(engine.target, engine.drafter, policies.make("auto"), engine.tokenizer)
        for name in caches
    }
    ways["plain"] = Engine(engine.target, None, None, engine.tokenizer)
    draw = random.Random(0)
    size = engine.target.vocab_size
    noise = [[draw.randrange(size) for _ in range(NOISE_TOKENS)] for _ in range(args.noise)]
    asked: list[tuple[str, Any, dict[str, Any]]] = [
        (item.set, item.turns[0], {"temperature": 0.0})
        for item in workloads.read(args.prompts, args.per_set)
    ]
    asked += [
        ("noise", prompt, {"temperature": 2.0, "seed": seed}) for seed, prompt in enumerate(noise)
    ]
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number, (set_, prompt, options) in enumerate(asked):
        for round_ in range(args.rounds):
            timed = {}
            for name in rotated(list(ways), number + round_):
                with _cache(caches.get(name, folder)):
                    timed[name] = _rate(ways[name], prompt, args.max_new_tokens, options)
            yield {
                "record": "answers",
                "set": set_,
                "number": number,
                "seconds": {name: round(one.seconds, 4) for name, one in timed.items()},
                "first": {name: round(one.first, 4) for name, one in timed.items()},
                "tokens": {name: one.tokens for name, one in timed.items()},
            }
            for name in caches:
                ratios[set_, name].append(timed[name].whole_rate / timed["plain"].whole_rate)
    for (set_, name), each in ratios.items():
        spread = {
            "least": round(min(each), 3),
            "median": round(statistics.median(each), 3),
            "most": round(max(each), 3),
        }
        yield {"record": "over plain", "set": set_, "cache": name, "answers": len(each), **spread}


# ---- answers, costs and load


class _Timed:
    """The times of one answer."""

    def __init__(self, stats: Stats) -> None:
        self.tokens = stats.num_generated_tokens
        self.seconds = stats.elapsed_s
        self.first = stats.ttft_s

    @property
    def rate(self) -> float:
        """Tokens per second after the first ones."""
        return self.tokens / (self.seconds - self.first)

    @property
    def whole_rate(self) -> float:
        """Tokens per second, the prompt's time included."""
        return self.tokens / self.seconds


def _rate(engine: Engine, prompt: Any, tokens: int, options: dict[str, Any]) -> _Timed:
    return _Timed(engine.generate(prompt, max_new_tokens=tokens, eos_token_id=[], **options).stats)


def _measured(engine: Engine) -> PassCosts:
    return stored.find(engine.target, engine.drafter, engine.drivers.own.captured, fresh=True)


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"SPECENGINE_CACHE": str(folder)}):
        yield


@contextmanager
def _loops(count: int) -> Iterator[None]:
    """Keep so many processors busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    main()
