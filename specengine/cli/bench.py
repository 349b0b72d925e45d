"""specengine bench: ways of decoding against each other on this machine, losslessness checked along the way."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specengine.benchmark.choice import Comparison, sampling
from specengine.benchmark.measuring import Run
from specengine.benchmark.records import Log, Record, provenance, public, read
from specengine.benchmark.report import draw_speeds, source, tables
from specengine.benchmark.summaries import ALL
from specengine.benchmark.ways import GENERATE, EngineDecoder, Engines, Way, baseline
from specengine.benchmark.workloads import Workload, digest, read as read_prompts
from specengine.cli import given
from specengine.cli.commands import DEFAULT_WAYS, PLAIN
from specengine.cli.terminal import say
from specengine.cli.verdict import Seen, known_costs, verdict
from specengine.costs.measuring import processor_times, share_of_others
from specengine.engine import Engine
from specengine.errors import require, require_minimum
from specengine.options import LoadOptions

MIN_TIMED_TOKENS = 48  # over all prompts and rounds: fewer give no ratio
SPECULATIVE = "speculative"  # of a run of one engine: its own draft and policy


def run(arguments: argparse.Namespace) -> int:
    require_minimum(
        arguments, per_set=0, turns=1, max_new_tokens=1, rounds=1, temperature=0, seed=0
    )
    items = read_prompts(arguments.prompts, arguments.per_set or None, set_by=arguments.set_by)
    choice = Comparison(
        arguments.way or list(DEFAULT_WAYS),
        arguments.model,
        arguments.draft,
        arguments.assistant,
        arguments.gguf,
        arguments.peers,
        given.load_options(arguments),
        sampling(arguments.temperature, arguments.seed),
    )
    log = Log(
        arguments.out,
        provenance("specengine", sys.argv[1:]),
        _settings(arguments, choice.names, items),
    )
    before = processor_times()
    if log.resumed:
        answers = sum(record["record"] == "answer" for record in log.records)
        say(f"{arguments.out}: {answers} answers are there already, the run goes on behind them")
        log.add({"record": "resumed"})
    first = choice.engine()
    if not any(record["record"] == "model" for record in log.records):
        log.add(model_record(first))
    run_ = Run(
        choice.plain(first),
        choice.ways(first, items, arguments.max_new_tokens, arguments.turns),
        choice.options,
        length=arguments.max_new_tokens,
        rounds=arguments.rounds,
        turns=arguments.turns,
        compares=not choice.samples,
        say=say,
    )
    others = next(
        (record["others"] for record in reversed(log.records) if record["record"] == "load"), None
    )
    count = len(log.records)
    for record in run_.records(items, list(log.records)):
        log.add(record)
    if len(log.records) > count:
        # other engines would be counted among the other programs
        others = None if choice.other_engines else share_of_others(before)
        log.add({"record": "load", "others": others})
    ways = {name: spec.draft is None for name, spec in choice.specs.items() if name != PLAIN}
    report(log.records, ways, first, others)
    return int(run_.faults > 0)


def run_of(
    engine: Engine,
    *,
    length: int,
    rounds: int,
    generate: bool = False,
) -> Run:
    """Return a greedy run of one engine: plain decoding, and its own draft and policy, if it has any.

    generate: transformers' generate takes part between them.
    """
    greedy, load = sampling(0, 0), LoadOptions()
    engines = Engines(engine, load)
    plain = engines.make(None)
    ways = [Way(PLAIN, lambda: EngineDecoder(plain, greedy))]
    if generate:
        ends = plain.stream([0], max_new_tokens=1).options.eos_token_ids
        ways.append(baseline(GENERATE, plain, greedy, ends, "", load))
    if engine.drafter is not None:
        ways.append(Way(SPECULATIVE, lambda: EngineDecoder(engines.make(engine.policy), greedy)))
    return Run(plain, ways, greedy, length=length, rounds=rounds, say=say)


def report(
    records: list[Record],
    ways: Mapping[str, bool],
    engine: Engine,
    others: float | None,
    set_: str = ALL,
) -> None:
    """Print the tables of a run and, by its own name, whether the fastest way that drafts pays.

    ways: those that draft, and whether it is by the engine's draft, whose costs may be known; others: as of `verdict`.
    """
    _print_tables(records, set_)
    averages = Seen.of_ways(records, ways)
    device = engine.target.device.type
    if not averages:
        print(verdict(device, None, None))
        return
    best = next(iter(averages))
    answers = (record for record in records if record["record"] == "answer")
    timed = sum(len(answer["tokens"]) for answer in answers if answer["way"] == best)
    if timed < MIN_TIMED_TOKENS:
        print(f"{timed} tokens per way are too few for a verdict, {MIN_TIMED_TOKENS} are enough.")
        return
    costs = known_costs(engine) if ways[best] else None
    print(f"{best}: {verdict(device, costs, averages[best], others)}")


def run_report(arguments: argparse.Namespace) -> int:
    runs = {file: read(file) for file in arguments.file}
    for file, records in runs.items():
        sets = sorted({record["set"] for record in records if record["record"] == "row"})
        accepted = f"in {file.name} {', '.join(sets) or 'none yet'}"
        require("set", repr(arguments.set), accepted, arguments.set in (None, *sets))
        print(source(file.name, records), end="\n\n")
        _print_tables(records, arguments.set or ALL)
        if arguments.plot is not None:
            picture = arguments.plot / f"{file.stem}.svg"
            draw_speeds(records, picture)
            say(f"{picture}: drawn")
    return 0


def _print_tables(records: list[Record], set_: str) -> None:
    for table in tables(records, set_):
        print(table.markdown(), end="\n\n")


def _settings(
    arguments: argparse.Namespace, names: list[str], items: list[Workload]
) -> dict[str, Any]:
    """Return the settings that decide what is measured. A run with the same settings continues the file."""

    apart = (
        "run",
        "goes_on",
        "loads",
        "debug",
        "out",
        "way",
        "prompts",
        "peers",
        "set_by",
        "per_set",
        "command",
    )
    texts = {
        name: public([str(value)])[0] if isinstance(value, str | Path) else value
        for name, value in vars(arguments).items()
        if name not in apart
    }
    return {
        "record": "settings",
        **texts,
        "ways": public(names),
        "sets": list(dict.fromkeys(item.set for item in items)),
        "prompts": len(items),
        "of_prompts": digest(items),
    }


def model_record(first: Engine) -> dict[str, Any]:
    return {
        "record": "model",
        "name": given.target_name(first),
        "dtype": str(first.target.dtype).removeprefix("torch."),
        "backend": first.target.backend,
    }
