"""Policies against each other: the same draft, target and prompts under every policy, interleaved, plain decoding too.

Without --policy and --sweep every policy takes part, with its default options and, where it has one, its preset for
CPUs. Counters come from the first round, times from all of them; a history that a policy or a draft keeps goes on from
prompt to prompt, for each round apart. A policy that cannot run with the draft at hand is listed with the reason. Rows
are written as they come, to FILE.rows, and the whole becomes FILE at the end; `python -m bench.report` makes tables of
either.

    python -m bench.policies --prompts FOLDER --per-set 5 --rounds 3 --out FILE
    python -m bench.policies --policy talon --policy talon/cpu,mu=0.05 --policy fixed,branching=3,2,1
    python -m bench.policies --policy auto --policy ngram:eagle,width=4,expansions=9,budget=12 --policy recycling:auto
    python -m bench.policies --sweep salf-threshold --sweep talon-mu/cpu --sweep c2t-beta,layer=10
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, report, workloads
from specengine import Engine, policies
from specengine import checkpoints as models
from specengine.benchmark.choice import Choice, sampling
from specengine.benchmark.measuring import Run
from specengine.benchmark.summaries import summaries
from specengine.benchmark.ways import Engines, Spec
from specengine.errors import InputError
from specengine.options import LoadOptions

CPU_PRESET = "cpu"


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
class Asked:
    """A policy as it was asked for, and in which tables it stands: (group, value) pairs."""

    spec: Spec
    places: list[tuple[str, str]]


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    model = AutoModelForCausalLM.from_pretrained(models.resolve(args.model), dtype=getattr(torch, args.dtype))
    load = {"strict": args.strict, "lookup": args.lookup}
    first = Engine.from_pretrained(model.to(args.device), args.draft, **load)
    items = workloads.read(args.prompts, args.per_set)
    settings, options = _settings(args, items, first), sampling(args.temperature, args.seed)
    engines = Engines(first, LoadOptions.of(load))
    made = [replace(engines.way(one.spec, options), facts={"places": one.places}) for one in args.ways]
    run = Run(Choice.plain(first), made, options, length=args.max_new_tokens, rounds=args.rounds, say=_say)
    records = list(provenance.kept(_kept(settings, run.records(items)), args.out))
    records += summaries(records)
    for rendered in report.tables(records):
        print(rendered.markdown(), end="\n\n")
    if args.out:
        provenance.write(args.out, records)
    return int(run.faults > 0)


def _kept(settings: dict[str, Any], records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Without what stands in the rows already, and where counters are all that is wanted, without times."""
    yield settings
    for record in records:
        if record["record"] == "row" and settings["counters_only"]:
            yield {name: value for name, value in record.items() if name not in report.TIMES}
        elif record["record"] != "answer":
            yield record


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


def ways(given: list[str], sweeps: list[str]) -> list[Asked]:
    """What to compare, plain decoding first; InputError for what is asked for by name and cannot be made."""
    places: dict[str, list[tuple[str, str]]] = {}
    for spec in given if given or sweeps else _defaults():
        places.setdefault(spec, []).append((report.POLICIES, ""))
    for sweep in sweeps:
        group, points = sweep_points(sweep)
        for value, spec in points.items():
            places.setdefault(spec, []).append((group, value))
    found = [Asked(Spec.of(text), where) for text, where in ({"plain": [(report.POLICIES, "")]} | places).items()]
    if given or sweeps:
        for asked in found:
            asked.spec.check(LoadOptions())
    return found


def _defaults() -> list[str]:
    presets, names = policies.presets(), [name for name in policies.names() if name != "plain"]
    return [*names, *(small for name in names if (small := f"{name}/{CPU_PRESET}") in presets)]


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


if __name__ == "__main__":
    sys.exit(main())
