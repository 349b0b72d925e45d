"""Whole answers, measured as `specengine bench` does; a prompt's figure is the median."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.cpu.ways import KINDS, Given
from bench.workloads import Workload
from specengine.benchmark import peers
from specengine.benchmark.measuring import Run, longest
from specengine.benchmark.ways import (
    LOOKUP_TOKENS,
    EngineDecoder,
    Generate,
    Way,
    WayDecoder,
    without_memory,
)
from specengine.engine import Engine
from specengine.files import cache_dir

GENERATE, LOOKUP = "generate", "generate, prompt lookup"
LLAMA_CPP = "llama.cpp"
BASELINES = (GENERATE, LLAMA_CPP)
PEERS = Path(".peers")  # where `make peers` puts environments
MEAN_OF_SETS = "mean of the sets"

Record = dict[str, Any]


def plain(
    given: Given, names: list[str], items: list[Workload], length: int, rounds: int
) -> Iterator[Record]:
    """Answer every prompt with `length` tokens, without drafts."""
    whole = partial(
        Generate, given.transformers_model, {"temperature": 0.0}, [], min_new_tokens=length
    )
    yield from _answered("plain", given, [Way(GENERATE, whole)], names, items, length, rounds)


def default(
    given: Given, names: list[str], items: list[Workload], length: int, rounds: int
) -> Iterator[Record]:
    """Answer with the default draft and policy; answers end where the model ends them."""
    generate = partial(
        Generate, given.transformers_model, {"temperature": 0.0}, sorted(given.end_tokens)
    )
    lookup = partial(generate, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    yield from _answered(
        "default",
        given,
        [Way(GENERATE, generate), Way(LOOKUP, lookup)],
        names,
        items,
        length,
        rounds,
    )


def _answered(
    part: str,
    given: Given,
    ways: list[Way],
    names: list[str],
    items: list[Workload],
    length: int,
    rounds: int,
) -> Iterator[Record]:
    """Measure `ways` and those of `names` that can be had."""
    first = given.plain("huggingface")
    ends = [] if part == "plain" else sorted(given.end_tokens)
    options = {"temperature": 0.0, "eos_token_id": ends}

    def start(name: str) -> WayDecoder:
        if name in KINDS:
            return EngineDecoder(
                given.plain(name) if part == "plain" else fresh(given.engine(name)), options
            )
        files = peers.Model(given.gguf_file(), None, None, cache_dir())
        return peers.way(
            peers.PREFIX + name, PEERS, files, ends, longest(first, items, length)
        ).start()

    ways = [*ways, *(Way(name, partial(start, name)) for name in names)]
    run = Run(
        first,
        ways,
        options,
        length=length,
        rounds=rounds,
        say=lambda line: print(part, line, file=sys.stderr),
    )
    rows: list[Record] = []
    for (kind, *_), group in groupby(
        run.records(items), lambda r: (r["record"], r.get("set"), r.get("id"))
    ):
        records = list(group)
        if kind == "row":
            rows.append(_row(part, records))
            yield rows[-1]
        for record in records:
            if kind == "not run":
                yield {
                    "record": "skipped",
                    "part": part,
                    "way": record["way"],
                    "reason": record["reason"],
                }
            elif record["way"] == LLAMA_CPP and kind == "way":
                yield record | {"record": LLAMA_CPP, "part": part}
    through = {way.name for way in run.ways}
    yield from summaries(
        [{name: _of(through, value) for name, value in row.items()} for row in rows]
    )


def _of(ways: set[str], value: Any) -> Any:
    """Return of figures by way those of these ways, anything else as it is."""
    return (
        {way: figure for way, figure in value.items() if way in ways}
        if isinstance(value, dict)
        else value
    )


def fresh(engine: Engine) -> Engine:
    """Return an engine on the same model and draft whose policy and draft have seen no prompt."""
    assert engine.drafter is not None
    policy: Any = engine.policy
    return Engine(engine.target, without_memory(engine.drafter), replace(policy), engine.tokenizer)


def _row(part: str, rows: list[Record]) -> Record:
    """Return one record of the ways' rows of one prompt."""
    return {
        "record": "answers",
        "part": part,
        **{name: rows[0][name] for name in ("set", "id", "prompt_tokens")},
        "new_tokens": {row["way"]: row["new_tokens"] for row in rows},
        "tokens_per_second": {
            row["way"]: round(row["new_tokens"] / statistics.median(row["seconds"]), 2)
            for row in rows
        },
        "acceptance_length": {
            row["way"]: round(row["emitted"] / row["cycles"], 3)
            for row in rows
            if part == "default" and "cycles" in row
        },
    }


def summaries(rows: list[Record]) -> list[Record]:
    """Return per set the means over its prompts, and last the means over sets, equally weighted."""
    names = dict.fromkeys(row["set"] for row in rows)
    by_set = [_of_set(name, [row for row in rows if row["set"] == name]) for name in names]
    whole = by_set[0] | {"set": MEAN_OF_SETS, "prompts": len(rows)}
    for figure in (
        "tokens_per_second",
        "acceptance_length",
        *(_over(baseline) for baseline in BASELINES),
    ):
        if figure in by_set[0]:
            ways = by_set[0][figure]
            whole[figure] = {way: _mean([entry[figure][way] for entry in by_set]) for way in ways}
    return [*by_set, whole]


def _of_set(name: str, rows: list[Record]) -> Record:
    ways = rows[0]["tokens_per_second"]
    rates = {way: [row["tokens_per_second"][way] for row in rows] for way in ways}
    lengths = {
        way: _mean([row["acceptance_length"][way] for row in rows])
        for way in rows[0]["acceptance_length"]
    }
    return {
        "record": "summary",
        "part": rows[0]["part"],
        "set": name,
        "prompts": len(rows),
        "tokens_per_second": {way: _mean(values) for way, values in rates.items()},
        "acceptance_length": lengths,
        **{
            _over(baseline): {
                way: _speedup(values, rates[baseline]) for way, values in rates.items()
            }
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
