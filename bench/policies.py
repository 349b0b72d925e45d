"""Compare policies: the same draft, target and prompts under every policy and plain decoding, interleaved.

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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bench import provenance, report, workloads
from bench.arguments import add_arguments
from bench.costs_record import costs_record
from specengine import Engine, policies
from specengine.benchmark.choice import Comparison, sampling
from specengine.benchmark.measuring import Run
from specengine.benchmark.records import Record, public
from specengine.benchmark.summaries import summaries
from specengine.benchmark.ways import PLAIN
from specengine.benchmark.workloads import Workload
from specengine.checkpoints import embedded
from specengine.costs import measuring
from specengine.errors import InputError

CPU_PRESET = "cpu"


class Sweep(NamedTuple):
    """A sweep over several values of one option of a policy."""

    policy: str
    option: str
    values: tuple[Any, ...]


SWEEPS = {
    "salf-threshold": Sweep(
        "salf", "threshold", (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    ),
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


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    first = args.choice.engine()
    items = workloads.read(args.prompts, args.per_set)
    all_ways = args.choice.ways(first, items, args.max_new_tokens)
    ways = [
        replace(way, facts={"places": args.places[way.name]})
        for way in all_ways
        if way.name in args.places
    ]
    run = Run(
        Comparison.plain(first),
        ways,
        args.choice.options,
        length=args.max_new_tokens,
        rounds=args.rounds,
        say=_say,
    )
    for table in report.tables(list(provenance.keep(_records(args, first, items, run), args.out))):
        print(table.markdown(), end="\n\n")
    return int(run.faults > 0)


def _records(
    args: argparse.Namespace, first: Engine, items: Sequence[Workload], run: Run
) -> Iterator[Record]:
    """Yield rows without what `way` records hold, and where counters are all that is wanted, without times."""
    yield _settings(args, first, items)
    if args.costs:
        yield costs_record(
            measuring.measure(first.target, first.drafter, first.drivers.own.captured)
        )
    done = []
    for record in run.records(items):
        if record["record"] == "row" and args.counters_only:
            record = {name: value for name, value in record.items() if name not in report.TIMES}
        if record["record"] != "answer":
            done.append(record)
            yield record
    yield from summaries(done)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- command line


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="A way is [DRAFT:]NAME[/PRESET][,option=value...]; sweeps: "
        + ", ".join([*SWEEPS, "dynatree"]),
    )
    add_arguments(
        parser,
        "model",
        "draft",
        "prompts",
        "per_set",
        "max_new_tokens",
        "dtype",
        "device",
        "out",
        rounds=1,
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of sampling, the same for all methods"
    )
    parser.add_argument("--policy", action="append", default=[], metavar="WAY", help="repeatable")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="WAY",
        help="a sweep's name and base; repeatable",
    )
    parser.add_argument(
        "--lookup", action=argparse.BooleanOptionalAction, help="let the draft copy, or not"
    )
    parser.add_argument("--numerics", default="auto", help="of a native model: bfloat16 or integer")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="strict verification: no answer may differ from plain decoding",
    )
    parser.add_argument(
        "--costs", action="store_true", help="also measure the costs of verifying and drafting"
    )
    parser.add_argument("--counters-only", action="store_true", help="one round, no times")
    parser.add_argument(
        "--no-plain",
        action="store_true",
        help="with --counters-only: skip plain decoding, and do not compare answers",
    )
    args = parser.parse_args(argv)
    if args.no_plain and not args.counters_only:
        parser.error(
            "--no-plain: times are told against plain decoding's, give --counters-only as well"
        )
    if args.counters_only:
        args.rounds = 1
    load = {
        name: getattr(args, name) for name in ("dtype", "device", "strict", "lookup", "numerics")
    }
    try:
        args.places = places(args.policy, args.sweep)
        options = sampling(args.temperature, args.seed)
        args.choice = Comparison(
            list(args.places), args.model, args.draft, load=load, options=options
        )
    except InputError as error:
        parser.error(str(error))
    if args.no_plain:
        del args.places[PLAIN]
    return args


def places(given: list[str], sweeps: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the ways to compare, plain decoding first, each with the tables it stands in: (group, value) pairs."""
    found: dict[str, list[tuple[str, str]]] = {PLAIN: [(report.POLICIES, "")]}
    for spec in given if given or sweeps else _defaults():
        if spec != PLAIN:
            found.setdefault(spec, []).append((report.POLICIES, ""))
    for sweep in sweeps:
        group, points = sweep_points(sweep)
        for value, spec in points.items():
            found.setdefault(spec, []).append((group, value))
    return found


def _defaults() -> list[str]:
    presets, names = policies.presets(), [name for name in policies.names() if name != "plain"]
    return [*names, *(small for name in names if (small := f"{name}/{CPU_PRESET}") in presets)]


def sweep_points(spec: str) -> tuple[str, dict[str, str]]:
    """Return the sweep's group and, by value, its ways."""
    name, _, base = spec.partition(",")
    base = base and "," + base
    name, slash, preset = name.partition("/")
    if name == "dynatree" and not preset:
        own = {
            value: way + base if way.startswith(name) else way for value, way in DYNATREE.items()
        }
        return spec, own
    if name not in SWEEPS:
        known = ", ".join([*SWEEPS, "dynatree"])
        raise InputError(f"sweep: unknown name {name + slash + preset!r}, known are {known}")
    policy, option, values = SWEEPS[name]
    return spec, {str(value): f"{policy}{slash}{preset}{base},{option}={value}" for value in values}


def _settings(args: argparse.Namespace, first: Engine, items: Sequence[Workload]) -> Record:
    named = (
        "dtype",
        "device",
        "temperature",
        "seed",
        "max_new_tokens",
        "per_set",
        "rounds",
        "counters_only",
        "strict",
    )
    return {
        "record": "settings",
        "model": public([args.model or embedded.NAME])[0],
        "draft": "a draft for each way" if first.drafter is None else first.drafter.name,
        **{name: getattr(args, name) for name in named},
        "sets": list(dict.fromkeys(item.set for item in items)),
        "prompts": len(items),
    }


if __name__ == "__main__":
    sys.exit(main())
