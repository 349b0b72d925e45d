"""specengine doctor: what a model runs on here, how near that is to its limits, and whether speculation pays.

specengine calibrate: the times alone, of all parts of a cycle.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from specengine.cli import given
from specengine.cli.inspection import (
    OPENINGS,
    cache_state,
    devices,
    entry_lines,
    model_facts,
    versions,
)
from specengine.cli.terminal import Progress, as_json, say
from specengine.cli.verdict import Seen, break_even, verdict
from specengine.costs import measuring
from specengine.costs.measuring import processor_times, share_of_others, stored
from specengine.engine import Engine
from specengine.errors import install_command
from specengine.models.extension import NOT_BUILT, is_built, thread_count
from specengine.records import Stats
from specengine.replicas import cores

if TYPE_CHECKING:
    from specengine.costs import PassCosts, Points


EXTRAS = {  # what a user may miss, and the packages of each
    "chat": ("prompt_toolkit", "rich"),
    "grammar": ("llguidance",),
    "serve": ("fastapi", "prometheus_client", "uvicorn"),
    "ray": ("ray",),
}
COMPILERS = ("c++", "g++", "clang++")
ROWS = (1, 2, 4, 8, 16, 32)
READS, SMALLEST, LARGEST = 7, 64 << 20, 1 << 30  # reads that are timed, and the bytes of one
OPENING_TOKENS, ROUNDS = 48, 3  # of the answers that are timed
SECONDS = 6.0  # after which no further one is begun


def run(arguments: argparse.Namespace) -> int:
    before = processor_times()
    progress = Progress(4)
    with progress.step("Loading"):
        options = given.load_options(arguments) | {"draft_options": dict(arguments.draft_option)}
        engine = Engine.from_pretrained(arguments.model, arguments.draft, **options)
    with progress.step("Measuring what drafting and verifying cost"):
        costs = stored.find(engine.target, engine.drafter, engine.drivers.own.captured, fresh=True)
    with progress.step("Measuring the memory"):
        memory = _memory(engine, costs.plain)
    with progress.step("Answering, with and without the draft"):
        averages = _seen(engine)
    passes = averages.passes if averages else 0.0
    others = share_of_others(before)
    name = arguments.model or engine.target.name
    facts: dict[str, Any] = {
        "versions": versions(),
        "devices": devices(),
        "model": model_facts(name, engine),
        "draft": _draft(engine),
        "threads": f"{thread_count()} of {cores()} processors",
        "memory": memory,
        "rows": [
            {
                "rows": n,
                "cost": round((costs.cycle(n, ()) - costs.overhead) / costs.plain, 3),
                "tokens to pay": round(break_even(costs, n, passes), 2),
            }
            for n in ROWS
        ],
        "draft passes": round(passes, 2),
        "observed": None
        if averages is None
        else {field: round(value, 3) for field, value in averages._asdict().items()},
        "missing": [*_missing(), *_missing_head(engine, name)],
        "load": others,
        "verdict": verdict(engine.target.device.type, costs, averages, others),
    }
    print(as_json(facts, default=str) if arguments.json else "\n".join(_lines(facts)))
    return 0


# ---- memory


def _memory(engine: Engine, plain: float) -> dict[str, Any]:
    """Return the bandwidth of memory, and the share of it that one plain forward reaches.

    plain: seconds of that forward. Each forward reads the weights once; they are all counted, though of an embedding
    table without use in the head one row is read.
    """
    target: Any = engine.target
    weights = target.lm.weight_bytes
    size = min(max(weights, SMALLEST), LARGEST)
    measured = bandwidth(size, engine.target.device)
    reached = weights / plain
    return {
        "weights": f"{weights / 1e6:.0f} MB",
        "bandwidth": f"{measured / 1e9:.1f} GB/s, reading {size / 1e6:.0f} MB",
        "plain forward": f"{1e3 * plain:.2f} ms, {reached / 1e9:.1f} GB/s",
        "share of bandwidth": round(reached / measured, 3),
    }


def bandwidth(size: int, device: torch.device) -> float:
    """Return the bytes per second of reading that many bytes, the best of several times."""
    numbers = torch.ones(size // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(READS):
        began = time.perf_counter()
        numbers.sum().item()
        seconds.append(time.perf_counter() - began)
    return size / min(seconds)


# ---- drafts


def _seen(engine: Engine) -> Seen | None:
    """Return averages over answers to a few openings, each timed with and without the draft."""
    if engine.drafter is None:
        return None
    options = {"temperature": 0.0, "max_new_tokens": OPENING_TOKENS}
    for policy in ("plain", None):  # the first run loads what it needs
        engine.generate(OPENINGS[0], policy=policy, **options | {"max_new_tokens": 8})
    answers = list[Stats]()
    rates: dict[
        tuple[str, str | None], float
    ] = {}  # the best by opening and policy: others may use this machine
    began = time.perf_counter()
    for opening in OPENINGS * ROUNDS:
        for policy in ("plain", None):
            stats = engine.generate(opening, policy=policy, **options).stats
            rates[opening, policy] = max(rates.get((opening, policy), 0.0), _rate(stats))
        answers.append(stats)
        if time.perf_counter() - began > SECONDS:
            break
    gains = [
        rates[opening, None] / rate
        for (opening, policy), rate in rates.items()
        if policy == "plain" and rate
    ]
    return Seen.of(answers, statistics.median(gains) if gains else None)


def _rate(stats: Stats) -> float:
    """Return the tokens per second after the prompt."""
    seconds = stats.elapsed_s - stats.ttft_s
    return stats.num_generated_tokens / seconds if seconds > 0 else 0.0


def _draft(engine: Engine) -> dict[str, Any]:
    if engine.drafter is None:
        return {"name": "none"}
    return {"name": engine.drafter.name, "policy": str(engine.policy), "notes": engine.notes}


# ---- what is missing


def _missing() -> list[str]:
    """Return a line for each part that is not there, with the command that brings it."""
    lines = []
    if not is_built():
        lines.append(NOT_BUILT)
    if not any(map(shutil.which, (os.environ.get("CXX") or COMPILERS[0], *COMPILERS))):
        lines.append("a C++17 compiler, which builds the C++ forward")
    state = cache_state()
    lines += [
        f"{name}: {value}" for name, value in state.items() if name != "folder" and value != "ready"
    ]
    for extra, packages in EXTRAS.items():
        if absent := [name for name in packages if importlib.util.find_spec(name) is None]:
            lines.append(f"{', '.join(absent)}, of the extra `{extra}`: {install_command(extra)}")
    return lines


def _missing_head(engine: Engine, model: str) -> list[str]:
    if engine.drafter is None or not engine.drafter.name.startswith(("recycling", "ngram")):
        return []
    return [f"a draft head for this model: specengine train draft FOLDER --target {model}"]


# ---- the report


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    for title in ("versions", "devices", "model", "draft"):
        yield title
        for name, value in facts[title].items():
            if value != []:
                yield from entry_lines(name, value)
    yield "speed"
    yield from entry_lines("threads", facts["threads"])
    share = (
        "not known" if facts["load"] is None else f"{facts['load']:.0%} of the processors meanwhile"
    )
    yield from entry_lines("other programs", share)
    for name, value in facts["memory"].items():
        yield from entry_lines(name, f"{100 * value:.0f} %" if name.startswith("share") else value)
    yield "rows of a forward"
    yield f"  {'rows':>6}{'time':>10}{'tokens to pay':>16}   with {facts['draft passes']:.1f} draft passes"
    for row in facts["rows"]:
        yield f"  {row['rows']:>6}{row['cost']:>8.2f} x{row['tokens to pay']:>16.2f}"
    if facts["observed"] is not None:
        observed = facts["observed"]
        yield "observed"
        yield from entry_lines("tokens per pass", f"{observed['tokens']:.2f}")
        yield from entry_lines("verified tokens", f"{observed['nodes']:.1f} per pass")
        yield from entry_lines("draft passes", f"{observed['passes']:.1f} per pass")
        yield from entry_lines("speed", f"{observed['gain']:.2f} times plain decoding")
    if facts["missing"]:
        yield "missing"
        yield from (f"  {line}" for line in facts["missing"])
    yield f"\n{facts['verdict']}"


# ---- calibrate


def run_calibrate(arguments: argparse.Namespace) -> int:
    engine = Engine.from_pretrained(
        arguments.model,
        arguments.draft,
        draft_options=dict(arguments.draft_option),
        **given.load_options(arguments),
    )
    target, drafter, driver = engine.target, engine.drafter, engine.drivers.own.captured
    costs = stored.find(target, drafter, driver, fresh=True)
    key = stored.identity(target, drafter, driver)
    if arguments.json:
        print(as_json({"key": key, "costs": costs.to_dict()}))
    else:
        facts = (
            key["model"],
            key["dtype"],
            key["backend"],
            key["device"],
            f"draft {key['draft'] or 'none'}",
        )
        print(", ".join(facts))
        print("\n".join(_cost_lines(costs, measuring.contexts(target), drafts=drafter is not None)))
    if costs.doubt is not None:
        say(
            f"specengine: note: these costs are provisional, {costs.doubt}; they are measured again on a quiet machine"
        )
    say(
        f"specengine: note: {costs.source}"
        if "," in costs.source
        else f"kept in {stored.path(key)}"
    )
    return 0


def _cost_lines(costs: PassCosts, contexts: tuple[int, int], *, drafts: bool) -> Iterator[str]:
    behind = list(dict.fromkeys(contexts)) if costs.verify_growth else [costs.context]
    yield from _table(
        "verified nodes", behind, _milliseconds(costs, costs.verify, behind, drafting=False)
    )
    if drafts:
        yield from _table(
            "drafted from", behind, _milliseconds(costs, costs.draft, behind, drafting=True)
        )
    yield f"{'rest of a cycle':<16}{1e3 * costs.overhead:>9.2f} ms"
    if costs.padded:
        yield "captured: every verification takes what the largest tree's does"


def _milliseconds(
    costs: PassCosts, points: Points, contexts: list[int], *, drafting: bool
) -> Iterator[tuple[int, list[float]]]:
    for count in sorted(points):
        sizes = (1, count) if drafting else (count, 1)
        yield (
            count,
            [1e3 * float(costs.table(*sizes, context)[drafting][-1]) for context in contexts],
        )


def _table(
    title: str, contexts: list[int], rows: Iterable[tuple[int, list[float]]]
) -> Iterator[str]:
    yield f"{title:<16}" + "".join(f"{f'at {context} tokens':>18}" for context in contexts)
    first: list[float] = []
    for count, times in rows:
        first = first or times
        shown = zip(times, first, strict=True)
        yield f"{count:>14}  " + "".join(
            f"{time:>9.2f} ms {time / one:>4.2f} x" for time, one in shown
        )
