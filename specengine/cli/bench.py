"""specengine bench: ways of decoding against each other on this machine, losslessness checked along the way."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specengine.cli import given
from specengine.cli.commands import DEFAULT_WAYS, PLAIN
from specengine.cli.terminal import say
from specengine.cli.verdict import Seen, known_costs, verdict
from specengine.costs.measuring import processor_times, share_of_others
from specengine.errors import require, require_minimum

if TYPE_CHECKING:
    from specengine.benchmark.choice import Comparison
    from specengine.benchmark.records import Table
    from specengine.benchmark.workloads import Workload
    from specengine.engine import Engine


def run(arguments: argparse.Namespace) -> int:
    from specengine.benchmark.choice import Comparison, sampling
    from specengine.benchmark.measuring import Run
    from specengine.benchmark.provenance import provenance
    from specengine.benchmark.records import Log
    from specengine.benchmark.report import tables
    from specengine.benchmark.workloads import read

    require_minimum(
        arguments, per_set=0, turns=1, max_new_tokens=1, rounds=1, temperature=0, seed=0
    )
    items = read(arguments.prompts, arguments.per_set or None, set_by=arguments.set_by)
    choice = Comparison(
        arguments.way or list(DEFAULT_WAYS),
        arguments.model,
        arguments.draft,
        arguments.assistant,
        arguments.gguf,
        arguments.peers,
        {**given.load_options(arguments), "draft_options": dict(arguments.draft_option)},
        sampling(arguments.temperature, arguments.seed),
    )
    origin = provenance("specengine", sys.argv[1:])
    log = Log(arguments.out, origin, _settings(arguments, choice.names, items))
    before = processor_times()
    if log.resumed:
        answers = sum(record["record"] == "answer" for record in log.records)
        say(f"{arguments.out}: {answers} answers are there already, the run goes on behind them")
        log.add({"record": "resumed"})
    first = choice.engine()
    if not any(record["record"] == "model" for record in log.records):
        log.add(_model(first))
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
        others = share_of_others(before)
        log.add({"record": "load", "others": others})
    _print(tables(log.records))
    print(_verdict(log.records, choice, first, others))
    return int(run_.faults > 0)


def _verdict(
    records: list[dict[str, Any]], choice: Comparison, first: Engine, others: float | None
) -> str:
    """Return whether the fastest way that drafts pays, by its own name."""
    from specengine.benchmark.summaries import ALL, summaries

    drafted = [
        summary
        for summary in summaries(records)
        if summary["set"] == ALL
        and summary["way"] in choice.specs
        and summary["way"] != PLAIN
        and "speed_total" in summary
    ]
    device = first.target.device.type
    if not drafted:
        return verdict(device, None, None)
    best = max(drafted, key=lambda summary: float(summary["speed_total"]))
    averages = Seen(best["tau"], best["verified"], best["delta"], best["speed_total"])
    has_first_draft = choice.specs[best["way"]].draft is None
    return f"{best['way']}: {verdict(device, known_costs(first) if has_first_draft else None, averages, others)}"


def run_report(arguments: argparse.Namespace) -> int:
    from specengine.benchmark.records import read
    from specengine.benchmark.report import draw_speeds, source, tables
    from specengine.benchmark.summaries import ALL

    runs = {file: read(file) for file in arguments.file}
    for file, records in runs.items():
        sets = sorted({record["set"] for record in records if record["record"] == "row"})
        accepted = f"in {file.name} {', '.join(sets) or 'none yet'}"
        require("set", repr(arguments.set), accepted, arguments.set in (None, *sets))
        print(source(file.name, records), end="\n\n")
        _print(tables(records, arguments.set or ALL))
        if arguments.plot is not None:
            picture = arguments.plot / f"{file.stem}.svg"
            draw_speeds(records, picture)
            say(f"{picture}: drawn")
    return 0


def _print(all_tables: list[Table]) -> None:
    for table in all_tables:
        print(table.markdown(), end="\n\n")


def _settings(
    arguments: argparse.Namespace, names: list[str], items: list[Workload]
) -> dict[str, Any]:
    """Return the settings that decide what is measured. A run with the same settings continues the file."""
    from specengine.benchmark.provenance import public
    from specengine.benchmark.workloads import digest

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
    sets = list(dict.fromkeys(item.set for item in items))
    return {
        "record": "settings",
        **texts,
        "ways": public(names),
        "sets": sets,
        "prompts": len(items),
        "of_prompts": digest(items),
    }


def _model(first: Engine) -> dict[str, Any]:
    name = first.target.name or type(first.target).__name__
    return {
        "record": "model",
        "name": Path(name).name if Path(name).is_dir() else name,
        "dtype": str(first.target.dtype).removeprefix("torch."),
        "backend": first.target.backend,
    }
