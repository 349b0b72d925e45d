"""specengine doctor: what a model runs on here, how near that is to its limits, and whether speculation pays.

specengine doctor --calibrate: the times alone, of all parts of a cycle.
"""

import argparse
import importlib.util
import os
import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from specengine.benchmark.workloads import Workload
from specengine.cli import given
from specengine.cli.bench import SPECULATIVE, run_of
from specengine.cli.inspection import (
    OPENINGS,
    cache_state,
    devices,
    model_facts,
    print_facts,
    versions,
)
from specengine.cli.terminal import Progress, say, tell
from specengine.cli.verdict import Seen, break_even, verdict
from specengine.costs.measuring import contexts, processor_times, share_of_others, stored
from specengine.engine import Engine
from specengine.errors import install_command
from specengine.models.extension import NOT_BUILT, is_built, thread_count
from specengine.replicas import cores

if TYPE_CHECKING:
    from specengine.costs import PassCosts

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
SECONDS = 6.0  # for them, as far as plain decoding tells
MEASURED = ("model", "dtype", "backend", "device", "draft")  # of the key of costs
OBSERVED = ("tokens per pass", "verified per pass", "draft passes", "times plain decoding")


def run(arguments: argparse.Namespace) -> int:
    before = processor_times()
    progress = Progress(3)
    with progress.step("Loading"):
        engine = _engine(arguments)
    with progress.step("Measuring what drafting and verifying cost"):
        costs = stored.find(engine.target, engine.drafter, engine.drivers.own.captured, fresh=True)
    with progress.step("Measuring the memory"):
        memory = _memory(engine, costs.plain)
    tell("Answering, with and without the draft")
    averages = _observed(engine, costs.plain)
    passes = averages.passes if averages else 0.0
    others = share_of_others(before)
    name = arguments.model or engine.target.name
    facts: dict[str, Any] = {
        "versions": versions(),
        "devices": devices(),
        "model": model_facts(name, engine),
        "draft": _draft(engine),
        "speed": {
            "threads": f"{thread_count()} of {cores()} processors",
            "other programs": "not known"
            if others is None
            else f"{others:.0%} of the processors meanwhile",
            **memory,
        },
        "rows of a forward": {
            str(n): {
                "time": round((costs.cycle(n, ()) - costs.overhead) / costs.plain, 2),
                "tokens to pay": round(break_even(costs, n, passes), 2),
            }
            for n in ROWS
        },
        "observed": dict(zip(OBSERVED, averages, strict=True)) if averages else {},
        "missing": _missing(engine, name),
        "verdict": verdict(engine.target.device.type, costs, averages, others),
    }
    print_facts(facts, in_json=arguments.json)
    return 0


def _engine(arguments: argparse.Namespace) -> Engine:
    return Engine.from_pretrained(arguments.model, arguments.draft, **given.load_options(arguments))


# ---- memory


def _memory(engine: Engine, plain: float) -> dict[str, Any]:
    """Return the bandwidth of memory, and the share of it that one plain forward reaches.

    plain: seconds of that forward. Each forward reads the weights in memory once; they are all counted, though of a
    packed embedding table without use in the head one row is read.
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


def _observed(engine: Engine, plain: float) -> Seen | None:
    """Return averages over answers to a few openings, each timed with and without the draft.

    plain: seconds of a forward, which say how many there is time for.
    """
    if engine.drafter is None:
        return None
    openings = [Workload("doctor", str(n), (text,)) for n, text in enumerate(OPENINGS, start=1)]
    pairs = SECONDS / (2 * OPENING_TOKENS * plain)
    rounds = min(ROUNDS, max(1, int(pairs / len(openings))))
    records = run_of(engine, length=OPENING_TOKENS, rounds=rounds).records(
        openings[: max(1, int(pairs))]
    )
    return Seen.of_ways(records, [SPECULATIVE]).get(SPECULATIVE)


def _draft(engine: Engine) -> dict[str, Any]:
    if engine.drafter is None:
        return {"name": "none"}
    return {"name": engine.drafter.name, "policy": str(engine.policy), "notes": engine.notes}


# ---- what is missing


def _missing(engine: Engine, model: str) -> list[str]:
    """Return a line for each part that is not there, with the command that brings it."""
    lines = []
    if not is_built():
        lines.append(NOT_BUILT)
    if not any(map(shutil.which, (os.environ.get("CXX") or COMPILERS[0], *COMPILERS))):
        lines.append("a C++17 compiler, which builds the C++ forward")
    lines += [
        f"{name}: {value}"
        for name, value in cache_state().items()
        if name != "folder" and value != "ready"
    ]
    for extra, packages in EXTRAS.items():
        if absent := [name for name in packages if importlib.util.find_spec(name) is None]:
            lines.append(f"{', '.join(absent)}, of the extra `{extra}`: {install_command(extra)}")
    if engine.drafter is not None and engine.drafter.name.startswith(("recycling", "ngram")):
        lines.append(f"a draft head for this model: specengine train draft FOLDER --target {model}")
    return lines


# ---- calibrate


def run_calibrate(arguments: argparse.Namespace) -> int:
    engine = _engine(arguments)
    target, drafter, driver = engine.target, engine.drafter, engine.drivers.own.captured
    costs = stored.find(target, drafter, driver, fresh=True)
    key = stored.identity(target, drafter, driver)
    print_facts(
        {"key": key, "costs": costs.to_dict()} if arguments.json else _tables(key, costs, engine),
        in_json=arguments.json,
    )
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


def _tables(key: Mapping[str, Any], costs: "PassCosts", engine: Engine) -> dict[str, Any]:
    """Return what was measured, and the time by number of nodes and by tokens before them."""
    before = contexts(engine.target) if costs.verify_growth else (costs.context,)

    def times(count: int, *, drafting: bool) -> dict[str, str]:
        sizes = (1, count) if drafting else (count, 1)
        each = {n: 1e3 * float(costs.table(*sizes, n)[drafting][-1]) for n in before}
        return {f"at {n} tokens": f"{time:.2f} ms" for n, time in each.items()}

    drafted = costs.draft if engine.drafter is not None else {}
    return {
        "measured": {name: key[name] or "none" for name in MEASURED},
        "verified nodes": {str(n): times(n, drafting=False) for n in sorted(costs.verify)},
        "drafted from": {str(n): times(n, drafting=True) for n in sorted(drafted)},
        "rest of a cycle": [f"{1e3 * costs.overhead:.2f} ms"],
        "captured": ["a verification takes what the next of these numbers of nodes does"]
        * costs.padded,
    }
