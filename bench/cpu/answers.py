"""Whole answers: every way answers every prompt once per round, in turn; a prompt's figure is the median."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.cpu.ways import Answer, Given, LlamaCpp, Unavailable, Way, engine_way, generate
from bench.workloads import Workload
from specengine.benchmark.llama import LLAMA_CPP

GENERATE, LOOKUP = "generate", "generate, prompt lookup"
BASELINES = (GENERATE, LLAMA_CPP)
MEAN_OF_SETS = "mean of the sets"

Record = dict[str, Any]


def plain(given: Given, names: list[str], items: list[Workload], length: int, rounds: int) -> Iterator[Record]:
    """Without drafts, `length` tokens for every prompt."""

    def make(kind: str) -> Way:
        return engine_way(given.plain(kind), length, given.end_tokens, whole=True)

    baselines = {GENERATE: generate(given.transformers_model, length, whole=True)}
    yield from _answered("plain", given, baselines, names, make, items, length, rounds)


def default(given: Given, names: list[str], items: list[Workload], length: int, rounds: int) -> Iterator[Record]:
    """With the default draft and policy; answers end where the model ends them."""

    def make(kind: str) -> Way:
        return engine_way(given.engine(kind), length, given.end_tokens)

    model = given.transformers_model
    baselines = {GENERATE: generate(model, length), LOOKUP: generate(model, length, prompt_lookup_num_tokens=10)}
    yield from _answered("default", given, baselines, names, make, items, length, rounds)


def _answered(
    part: str,
    given: Given,
    ways: dict[str, Way],
    names: list[str],
    make: Callable[[str], Way],
    items: list[Workload],
    length: int,
    rounds: int,
) -> Iterator[Record]:
    """`ways` and those of `names` that can be had; `make` makes those of this engine."""
    plain_engine = given.plain("huggingface")
    prompts = [plain_engine.stream(item.text, max_new_tokens=1).prompt for item in items]
    for name in names:
        try:
            if name == LLAMA_CPP:
                llama = LlamaCpp.of(given, max(map(len, prompts)) + length, length, whole=part == "plain")
                yield {"record": LLAMA_CPP, "part": part, **llama.settings}
                ways[name] = llama
            else:
                ways[name] = make(name)
        except Unavailable as error:
            yield {"record": "skipped", "part": part, "way": name, "reason": str(error)}
    for way in ways.values():
        way(prompts[0])  # the first answer of a process is slower
    rows = []
    for item, prompt in zip(items, prompts, strict=True):
        rows.append(_row(part, ways, item, prompt, rounds))
        yield rows[-1]
    yield from summaries(rows)


def _row(part: str, ways: dict[str, Way], item: Workload, prompt: list[int], rounds: int) -> Record:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, Answer] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            answers[name] = way(prompt)
            seconds[name].append(time.perf_counter() - began)
    rates = {name: round(answers[name].tokens / statistics.median(values), 2) for name, values in seconds.items()}
    print(part, item.set, item.id, rates, file=sys.stderr, flush=True)
    return {
        "record": "answers",
        "part": part,
        "set": item.set,
        "id": item.id,
        "prompt_tokens": len(prompt),
        "new_tokens": {name: answer.tokens for name, answer in answers.items()},
        "tokens_per_second": rates,
        "acceptance_length": {
            name: round(answer.acceptance_length, 3) for name, answer in answers.items() if answer.acceptance_length
        },
    }


def summaries(rows: list[Record]) -> list[Record]:
    """Per set the means over its prompts; at the end the means of the sets, each set as much as any other."""
    names = dict.fromkeys(row["set"] for row in rows)
    by_set = [_of_set(name, [row for row in rows if row["set"] == name]) for name in names]
    whole = by_set[0] | {"set": MEAN_OF_SETS, "prompts": len(rows)}
    for figure in ("tokens_per_second", "acceptance_length", *(_over(baseline) for baseline in BASELINES)):
        if figure in by_set[0]:
            ways = by_set[0][figure]
            whole[figure] = {way: _mean([entry[figure][way] for entry in by_set]) for way in ways}
    return [*by_set, whole]


def _of_set(name: str, rows: list[Record]) -> Record:
    ways = rows[0]["tokens_per_second"]
    rates = {way: [row["tokens_per_second"][way] for row in rows] for way in ways}
    lengths = {way: _mean([row["acceptance_length"][way] for row in rows]) for way in rows[0]["acceptance_length"]}
    return {
        "record": "summary",
        "part": rows[0]["part"],
        "set": name,
        "prompts": len(rows),
        "tokens_per_second": {way: _mean(values) for way, values in rates.items()},
        "acceptance_length": lengths,
        **{
            _over(baseline): {way: _speedup(values, rates[baseline]) for way, values in rates.items()}
            for baseline in BASELINES
            if baseline in rates
        },
    }


def _over(baseline: str) -> str:
    return f"speedup_over_{baseline}"


def _speedup(rates: list[float], baseline: list[float]) -> float:
    return _mean([a / b for a, b in zip(rates, baseline, strict=True)])


def _mean(values: list[float]) -> float:
    return round(statistics.mean(values), 3)
