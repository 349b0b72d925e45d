"""Random schedules of answers at once, each compared with the answer that is given alone.

    python -m tests.engine.schedules [--count 10000] [--first SEED] [--default-model] [--seconds SECONDS] [--out FILE]

A seed says which tiny model (or the default one), numbers and policy there are, which requests come, how many are
answered at once, at which forward each of them begins, whether it goes on in the caches of an earlier one, after how
many tokens its client leaves, and whether one loop steps all answers or each has a thread. Tokens and log-probabilities
are compared, bit for bit. The first schedule that differs ends the run with its seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specengine import Engine
from specengine.benchmark.records import provenance
from specengine.cycle import result_of
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.engine import Pool, TextGeneration
from specengine.engine.scheduler import Task, run_tasks
from specengine.models.native import NativeLM, NativeTarget
from tests.models.native_engines import native_lm
from tests.toy import VOCABULARY, byte_tokenizer, policy_for, tiny

FAMILIES = ("llama", "llama", "gemma3_text", "lfm2")  # full attention, windows, recurrent layers
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "int8": {"quantize": "int8", "numerics": "integer"},
}
WAYS = ("plain", "eagle", "chain", "auto", "ngram")
DEFAULT = "default"
LONG = (1000, 2000)  # of prompts, with the default model
LENGTHS = (3, 5, 12, 40, 63, 64, 65, 90, 130, 400)  # of prompts; some are run in several pieces
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {"repetition_penalty": 1.2}],
    "sampled": [
        {"do_sample": True, "temperature": 0.9},
        {"do_sample": True, "top_p": 0.8, "temperature": 1.3},
    ],
    "constrained": [
        {"grammar": "start: /[a-z]{2,9}( [a-z]{2,9}){1,4}/"},
        {"json_schema": {"type": "integer"}},
    ],
}
CATALOGUE = 24  # requests of one setting, whose answers alone are kept
BLOCK = 400  # seeds that share them
MOST_SECONDS = 120.0  # of a schedule: one that takes longer hangs


class Setting(NamedTuple):
    """What all requests of a schedule have in common."""

    family: str
    kind: str
    way: str
    block: int


class Answer(NamedTuple):
    """Tokens, and their log-probabilities where the request asks for them."""

    tokens: list[int]
    logprobs: list[Any]

    def begins(self, other: Answer) -> bool:
        """Return whether another answer goes on where this one ends."""
        same = other.tokens[: len(self.tokens)] == self.tokens
        return same and other.logprobs[: len(self.logprobs)] == self.logprobs


@dataclass
class Known:
    """A request, and the answer that it gets alone."""

    kind: str
    prompt: list[int]
    options: dict[str, Any]
    answer: Answer


class Coming(NamedTuple):
    """A request of a schedule: when it begins, in forwards, and after how many tokens its client leaves, or None."""

    known: Known
    at: int
    leaves: int | None
    reuses: bool


def run(seed: int, family: str | None = None) -> Counter[str]:
    """Run the schedule of a seed, and count its requests by kind. AssertionError where an answer differs."""
    chance = random.Random(seed)
    drawn, kind = chance.choice(FAMILIES), chance.choice(list(KINDS))
    setting = Setting(
        family or drawn, "file" if family else kind, chance.choice(WAYS), seed // BLOCK
    )
    pool = Pool(_engine(setting), chance.randint(2, 5))
    coming = []
    for _ in range(chance.randint(3, 9)):
        known = _known(setting, chance.randrange(CATALOGUE))
        leaves = (
            chance.randrange(0, 1 + len(known.answer.tokens)) if chance.random() < 0.3 else None
        )
        coming.append(
            Coming(
                known, chance.choice([0, 0, chance.randrange(60)]), leaves, chance.random() < 0.6
            )
        )
    found = _answered(pool, coming, threads=chance.random() < 0.3)
    for number, one in enumerate(coming):
        answer, right = found[number], one.known.answer
        same = answer == right if one.leaves is None else answer.begins(right)
        assert same, (
            f"seed {seed}, {setting}, request {number} ({one.known.kind}): {answer} for {right}"
        )
    return Counter(one.known.kind if one.leaves is None else "left" for one in coming)


def run_all(seeds: Iterable[int]) -> Counter[str]:
    """Run the schedules of several seeds."""
    return sum(map(run, seeds), Counter[str]())


def _answered(pool: Pool, coming: list[Coming], *, threads: bool) -> dict[int, Answer]:
    """Return the answers, from the loop that steps them all, or from a thread for each."""
    order = deque(sorted(range(len(coming)), key=lambda number: coming[number].at))
    return _of_threads(pool, coming, order) if threads else _of_one_loop(pool, coming, order)


def _of_one_loop(pool: Pool, coming: list[Coming], order: deque[int]) -> dict[int, Answer]:
    def take(idle: list[Engine], wait: bool) -> tuple[Engine, Task] | None:
        if order and (wait or coming[order[0]].at <= pool.scheduler.forwards):
            number = order.popleft()
            return idle[-1], task(idle[-1], number)
        return None

    def task(engine: Engine, number: int) -> Task:
        found = yield from _answer(engine, coming[number])
        return number, found

    return dict(run_tasks(pool.engines, pool.scheduler, take))


def _of_threads(pool: Pool, coming: list[Coming], order: deque[int]) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    errors: list[BaseException] = []

    def work(engine: Engine) -> None:
        try:
            while not errors:
                number = order.popleft()
                _await(pool, coming[number].at)
                found[number] = result_of(_answer(engine, coming[number], waits=False))
        except IndexError:
            pass
        except BaseException as error:  # raised by the thread that waits
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(engine,), daemon=True) for engine in pool.engines
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + MOST_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        raise AssertionError(f"a schedule was not over after {MOST_SECONDS:.0f} s")
    if errors:
        raise errors[0]
    return found


def _await(pool: Pool, forwards: int) -> None:
    """Wait until so many forwards were run, or none comes any more."""
    last, since = -1, time.monotonic()
    while pool.scheduler.forwards < forwards and time.monotonic() - since < 0.01:
        if pool.scheduler.forwards != last:
            last, since = pool.scheduler.forwards, time.monotonic()
        time.sleep(0.0003)


def _answer(engine: Engine, one: Coming, *, waits: bool = True) -> Generator[None, None, Answer]:
    """Answer as a task; waits: for steps of the loop, instead of running them."""
    tokens, logprobs = list[int](), list[Any]()
    with TextGeneration(
        engine, one.known.prompt, one.known.options, reuse_cache=one.reuses
    ) as pieces:
        while one.leaves is None or len(tokens) < max(one.leaves, 1):
            if waits and not pieces.is_ready:
                yield
            elif (piece := next(pieces, None)) is None:
                break
            else:
                tokens += piece.cycle.tokens
                logprobs += piece.cycle.logprobs or ()
    return Answer(tokens, logprobs)


@lru_cache(maxsize=32)
def _lm(family: str, kind: str) -> NativeLM:
    model = tiny(family, max_position_embeddings=512)
    return native_lm(model if kind == "float32" else model.bfloat16(), **KINDS[kind])


@lru_cache(maxsize=32)
def _alone(setting: Setting) -> Engine:
    return _engine(setting)


def _engine(setting: Setting) -> Engine:
    if setting.family == DEFAULT:
        whole = _default()
        lm, drafter, tokenizer = whole.target.lm, whole.drafter, whole.tokenizer
    else:
        lm, drafter, tokenizer = _lm(setting.family, setting.kind), Recycling(), byte_tokenizer()
    target = NativeTarget(lm)
    if setting.way == "plain":
        return Engine(target, None, None, tokenizer)
    drafter = NGram() if setting.way == "ngram" else drafter
    return Engine(
        target, drafter, policy_for("eagle" if setting.way == "ngram" else setting.way), tokenizer
    )


@lru_cache(maxsize=1)
def _default() -> Any:
    return Engine.from_pretrained(None)


@lru_cache(maxsize=8192)
def _known(setting: Setting, number: int) -> Known:
    """Return a request of the setting, and what plain decoding answers to it alone. Some prompts begin alike."""
    stem = random.Random(repr(setting)).choices(range(32, 127), k=max(LENGTHS + LONG))
    chance = random.Random(repr((setting, number)))
    kind = ("greedy", "sampled", "constrained", "greedy", "sampled")[number % 5]
    length = chance.choice(LENGTHS + LONG if setting.family == DEFAULT else LENGTHS)
    shared = chance.choice([0, length // 2, length - 1])
    prompt = stem[:shared] + chance.choices(range(VOCABULARY), k=length - shared)
    options = {"max_new_tokens": chance.choice([1, 7, 25, 40]), "eos_token_id": []} | chance.choice(
        OPTIONS[kind]
    )
    if kind == "sampled":
        options["seed"] = chance.randrange(1 << 32)
    if chance.random() < 0.5:
        options["logprobs"] = 2
    if kind == "constrained":
        options["eos_token_id"] = [VOCABULARY - 1]
        if setting.family == DEFAULT:
            del options["eos_token_id"]
    alone = _alone(setting._replace(way="plain", block=0)).generate(prompt, **options)
    return Known(kind, prompt, options, Answer(alone.token_ids, alone.logprobs or []))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.engine.schedules", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument(
        "--default-model", action="store_const", const=DEFAULT, help="not tiny ones"
    )
    parser.add_argument("--seconds", type=float, help="end after so long")
    parser.add_argument(
        "--every", type=int, default=500, help="schedules after which figures are written"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, counts = time.monotonic(), Counter[str]()
    for seed in range(args.first, args.first + args.count):
        counts += run(seed, args.default_model) + Counter(schedules=1)
        spent = time.monotonic() - began
        over = args.seconds is not None and spent > args.seconds
        if over or counts["schedules"] % args.every == 0 or counts["schedules"] == args.count:
            row = {
                "record": "schedules",
                "first": args.first,
                "seconds": round(spent),
                **counts,
                "different": 0,
            }
            print(json.dumps(row), flush=True)
            if args.out:
                rows = [provenance("python -m tests.engine.schedules", sys.argv[1:]), row]
                args.out.write_text("".join(json.dumps(one) + "\n" for one in rows))
        if over:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
