"""Policies against each other: the same draft, target and prompts under every policy, interleaved, plain decoding too.

Without --policy and --sweep every policy takes part, with its default options and, where it has one, its preset for
CPUs. Counters come from the first round, times from all of them; a history that a policy keeps goes on from prompt to
prompt. A policy that cannot run with the draft at hand is listed with the reason. Rows are written as they come, to
FILE.rows, and the whole becomes FILE at the end; `python -m bench.report` makes tables of either.

    python -m bench.policies --prompts FOLDER --per-set 5 --rounds 3 --out FILE
    python -m bench.policies --policy talon --policy talon/cpu,mu=0.05 --policy fixed,branching=3,2,1
    python -m bench.policies --policy auto --policy ngram:eagle,width=4,expansions=9,budget=12 --policy recycling:auto
    python -m bench.policies --sweep salf-threshold --sweep talon-mu/cpu --sweep c2t-beta,layer=10
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, report, workloads
from specengine import Engine, drafters, policies
from specengine import checkpoints as models
from specengine.drafters import Drafter
from specengine.drafters.lookup import Lookup
from specengine.drafters.recycling import Recycling
from specengine.errors import InputError, SpecEngineError
from specengine.modeling.load_options import LoadOptions
from specengine.policies import TreePolicy
from specengine.records import Cycle

WARM_UP_TOKENS = 16
CPU_PRESET = "cpu"
DEFAULT_GROUP = "policies"


class Sweep(NamedTuple):
    """One option of one policy over several values."""

    policy: str
    option: str
    values: tuple[Any, ...]


SWEEPS = {
    "salf-threshold": Sweep("salf", "threshold", (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),
    "talon-mu": Sweep("talon", "mu", (0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.2, 0.4)),
    "talon-budget": Sweep("talon", "budget", (8, 12, 16, 24, 32, 48, 60, 72, 96)),
    "talon-robust": Sweep("talon", "robust_layers", (0, 1, 2, 3)),
    "c2t-beta": Sweep("c2t", "beta", (0.1, 0.3, 0.4, 0.5, 0.65, 0.75, 0.85)),
    "c2t-layer": Sweep("c2t", "layer", (3, 5, 10, 15, 20, 25, 30, "none")),
}
# DynaTree's ablation; its options, if given, go to its own three steps.
DYNATREE = {
    "fixed tree D5B2": "fixed,branching=2,2,2,2,2",
    "+ breadth": "dynatree/breadth",
    "+ depth": "dynatree/breadth-depth",
    "+ history": "dynatree",
}


@dataclass
class Way:
    """A policy as it was asked for, and in which tables it stands: (group, value) pairs."""

    spec: str
    places: list[tuple[str, str]]
    make: Callable[[], TreePolicy | None]
    draft: str | None = None  # another one than all others have
    engine: Engine = field(init=False, repr=False)


class Figures(NamedTuple):
    """What is read from a cycle; seconds of its parts and of the whole."""

    emitted: int
    passes: int
    verified: int
    drafted: int
    draft: float
    policy: float
    verify: float
    total: float


class Answer(NamedTuple):
    tokens: list[int]
    prompt_tokens: int
    seconds: float
    cycles: list[Figures]


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    model = AutoModelForCausalLM.from_pretrained(models.resolve(args.model), dtype=getattr(torch, args.dtype))
    first = Engine.from_pretrained(model.to(args.device), args.draft, strict=args.strict, lookup=args.lookup)
    items = workloads.read(args.prompts, args.per_set)
    settings = _settings(args, items, first)
    table = Table(first, args.ways, _options(args), settings)
    records = list(provenance.kept(table.run(items), args.out))
    records += report.summaries(records)
    for rendered in report.tables(records):
        print(rendered.markdown(), end="\n\n")
    if args.out:
        provenance.write(args.out, records)
    return int(table.faults > 0)


# ---------------------------------------------------------------------------------------------------- command line


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="A way is [DRAFT:]NAME[/PRESET][,option=value...]; sweeps: " + ", ".join([*SWEEPS, "dynatree"]),
    )
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--draft", default=None, help="default: the model's best")
    parser.add_argument("--prompts", type=Path, help="folder of .jsonl prompt sets; default: a few built-in prompts")
    parser.add_argument("--per-set", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of sampling, the same for every way")
    parser.add_argument("--policy", action="append", default=[], metavar="WAY", help="repeatable")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="WAY", help="a sweep's name and base; repeatable"
    )
    parser.add_argument(
        "--lookup", action=argparse.BooleanOptionalAction, help="copies in the draft, or the head alone"
    )
    parser.add_argument("--strict", action="store_true", help="the same bits in every tree: no answer may diverge")
    parser.add_argument("--counters-only", action="store_true", help="one round, no times")
    parser.add_argument(
        "--no-plain", action="store_true", help="with --counters-only: no plain decoding, answers are not compared"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.no_plain and not args.counters_only:
        parser.error("--no-plain: times are told against plain decoding's, give --counters-only as well")
    try:
        args.ways = ways(args.policy, args.sweep)[args.no_plain :]
    except InputError as error:
        parser.error(str(error))
    if args.counters_only:
        args.rounds = 1
    return args


def ways(given: list[str], sweeps: list[str]) -> list[Way]:
    """What to compare, plain decoding first; InputError for what is asked for by name and cannot be made."""
    places: dict[str, list[tuple[str, str]]] = {}
    for spec in given if given or sweeps else _defaults():
        places.setdefault(spec, []).append((DEFAULT_GROUP, ""))
    for sweep in sweeps:
        group, points = sweep_points(sweep)
        for value, spec in points.items():
            places.setdefault(spec, []).append((group, value))
    places.pop("plain", None)
    found = [Way("plain", [(DEFAULT_GROUP, "")], lambda: None)]
    for spec, where in places.items():
        draft, colon, own = spec.rpartition(":")
        name, options = parse(own)
        policies.find(name.partition("/")[0])
        if given or sweeps:
            policies.make(name, **options)
        make = partial(policies.make, name, **options)
        found.append(Way(spec, where, make, draft if colon else None))
    return found


def _defaults() -> list[str]:
    presets, names = policies.presets(), [name for name in policies.names() if name != "plain"]
    return [*names, *(small for name in names if (small := f"{name}/{CPU_PRESET}") in presets)]


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """NAME[/PRESET][,option=value...] as a name and options; a value may hold commas."""
    name, *parts = spec.split(",")
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if equals:
            options[key] = value
        elif options:
            options[list(options)[-1]] += "," + part
        else:
            raise InputError(f"{spec}: {part!r} is no option=value")
    return name, options


def sweep_points(spec: str) -> tuple[str, dict[str, str]]:
    """The sweep's group and, by value, the ways it is made of."""
    name, _, base = spec.partition(",")
    base = base and "," + base
    name, slash, preset = name.partition("/")
    if name == "dynatree" and not preset:
        own = {value: way + base if way.startswith(name) else way for value, way in DYNATREE.items()}
        return spec, own
    if name not in SWEEPS:
        known = ", ".join([*SWEEPS, "dynatree"])
        raise InputError(f"sweep: unknown name {name + slash + preset!r}, known are {known}")
    policy, option, values = SWEEPS[name]
    return spec, {str(value): f"{policy}{slash}{preset}{base},{option}={value}" for value in values}


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    if args.temperature > 0:
        options |= {"seed": args.seed, "top_k": 0, "top_p": 1.0}
    return options


def _settings(args: argparse.Namespace, items: list[workloads.Workload], engine: Engine) -> dict[str, Any]:
    if engine.drafter is None:
        raise SystemExit("draft: one is needed, plain decoding takes part anyway")
    named = ("dtype", "device", "temperature", "seed", "max_new_tokens", "per_set", "rounds", "counters_only", "strict")
    return {
        "record": "settings",
        "model": args.model or models.embedded.NAME,
        "draft": engine.drafter.name,
        **{name: getattr(args, name) for name in named},
        "sets": list(dict.fromkeys(item.set for item in items)),
        "prompts": len(items),
    }


# ---------------------------------------------------------------------------------------------------- measuring


class Table:
    """The run of all ways over all prompts, on the target and the drafter of `first`."""

    def __init__(self, first: Engine, found: list[Way], options: dict[str, Any], settings: dict[str, Any]) -> None:
        self.first, self.ways, self.options, self.settings = first, found, options, settings
        self.faults = 0

    def run(self, items: list[workloads.Workload]) -> Iterator[dict[str, Any]]:
        """All records but the summaries."""
        yield self.settings
        yield from self._start(items[0].text)
        for number, item in enumerate(items):
            answers: dict[str, list[Answer]] = {}
            for round_ in range(self.settings["rounds"]):
                for way in _rotated(self.ways, number + round_):
                    try:
                        answers.setdefault(way.spec, []).append(_answer(way.engine, item.text, self.options))
                    except Exception as error:
                        yield self._dropped(way, error, item)
            yield from self._rows(item, answers)
            self._progress(number, len(items), item, answers)

    def _start(self, prompt: str) -> Iterator[dict[str, Any]]:
        """Make the engines and try them: what a policy or draft lacks shows in its first cycles."""
        short = self.options | {"max_new_tokens": min(WARM_UP_TOKENS, self.options["max_new_tokens"])}
        for way in list(self.ways):
            try:
                _answer(self._engine(way), prompt, short)
                way.engine = self._engine(way)  # with no history
            except Exception as error:
                yield self._dropped(way, error)
            else:
                policy = "plain decoding" if way.engine.policy is None else repr(way.engine.policy)
                yield {"record": "way", "way": way.spec, "places": way.places, "policy": policy}

    def _engine(self, way: Way) -> Engine:
        policy = way.make()
        drafter = None if policy is None else self._drafter(way)
        return Engine(self.first.target, drafter, policy, self.first.tokenizer)

    def _drafter(self, way: Way) -> Drafter:
        """Of this way alone where it remembers more than one answer: what others said is no news to be recycled."""
        drafter = cast(Drafter, self.first.drafter)
        if way.draft is not None:
            made = drafters.maker(way.draft, LoadOptions())(self.first.target, self.first.tokenizer)
            return Lookup(made) if made.lookup else made
        if not isinstance(drafter, Lookup):
            return drafter
        return Lookup(Recycling()) if isinstance(drafter.drafter, Recycling) else Lookup(drafter.drafter, Recycling())

    def _dropped(self, way: Way, error: Exception, item: workloads.Workload | None = None) -> dict[str, Any]:
        """It takes no further part. An error that is not specengine's own is a fault, which the exit status tells."""
        if way.spec == "plain":
            raise error
        fault = not isinstance(error, SpecEngineError)
        self.faults += fault
        self.ways = [other for other in self.ways if other is not way]
        reason = f"{type(error).__name__}: {error}"
        where = {} if item is None else {"set": item.set, "id": item.id}
        print(f"{way.spec} {'failed' if fault else 'cannot run'}: {reason}", file=sys.stderr, flush=True)
        return {"record": "not run", "way": way.spec, "places": way.places, "reason": reason, "fault": fault, **where}

    def _rows(self, item: workloads.Workload, answers: dict[str, list[Answer]]) -> Iterator[dict[str, Any]]:
        for way in self.ways:
            row = _row(way, item, answers[way.spec])
            if "plain" in answers:
                row["diverges_at"] = self._divergence(answers["plain"][0].tokens, answers[way.spec])
            if self.settings["counters_only"]:
                row = {name: value for name, value in row.items() if name not in report.TIMES}
            yield row

    def _divergence(self, expected: list[int], answers: list[Answer]) -> int | None:
        """Where the first of these answers leaves the expected one; a fault where none may."""
        positions = [_first_difference(expected, answer.tokens) for answer in answers]
        first = min((place for place in positions if place is not None), default=None)
        if first is not None and (self.settings["strict"] or self.settings["dtype"] == "float32"):
            self.faults += 1
        return first

    def _progress(self, number: int, total: int, item: workloads.Workload, answers: dict[str, list[Answer]]) -> None:
        rates = {name: f"{len(runs[0].tokens) / runs[0].seconds:.1f}" for name, runs in answers.items()}
        print(f"{number + 1}/{total} {item.set} {item.id} tokens/s {rates}", file=sys.stderr, flush=True)


def _rotated(found: list[Way], turn: int) -> list[Way]:
    turn %= len(found)
    return found[turn:] + found[:turn]


def _answer(engine: Engine, prompt: str, options: dict[str, Any]) -> Answer:
    began = time.perf_counter()
    turn = engine.stream(prompt, **options)
    cycles = [_figures(piece.cycle) for piece in turn]
    seconds = time.perf_counter() - began
    assert turn.result is not None
    return Answer(turn.result.token_ids, len(turn.prompt), seconds, cycles)


def _figures(cycle: Cycle) -> Figures:
    seconds, tree = cycle.seconds, cycle.tree
    return Figures(
        len(cycle.tokens),
        int(tree.passes),
        len(tree),
        cycle.drafted,
        seconds.draft,
        seconds.policy,
        seconds.verify,
        seconds.total,
    )


def _row(way: Way, item: workloads.Workload, answers: list[Answer]) -> dict[str, Any]:
    counted = answers[0].cycles
    timed = [figures for answer in answers for figures in answer.cycles]
    parts = ("draft", "policy", "verify", "total")
    return {
        "record": "row",
        "way": way.spec,
        "set": item.set,
        "id": item.id,
        "prompt_tokens": answers[0].prompt_tokens,
        "new_tokens": len(answers[0].tokens),
        "cycles": len(counted),
        **{name: sum(getattr(figures, name) for figures in counted) for name in Figures._fields[:4]},
        "seconds": [round(answer.seconds, 4) for answer in answers],
        "median_ms": {
            part: round(1e3 * statistics.median(getattr(figures, part) for figures in timed), 4) for part in parts
        },
        "policy_share": round(sum(figures.policy for figures in timed) / sum(figures.total for figures in timed), 5),
    }


def _first_difference(expected: list[int], got: list[int]) -> int | None:
    if expected == got:
        return None
    pairs = zip(expected, got, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))


if __name__ == "__main__":
    sys.exit(main())
