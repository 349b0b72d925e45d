"""specengine bench: ways of decoding against each other on this machine, losslessness checked along the way."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specengine.cli import arguments as shared
from specengine.cli.terminal import say
from specengine.errors import InputError, require_least

if TYPE_CHECKING:
    from specengine.benchmark.prompts import Workload
    from specengine.benchmark.tables import Table
    from specengine.engine import Engine

HELP = "measure policies and drafts beside transformers' and llama.cpp's decoding, on prompts of several kinds"
PLAIN, LLAMA_CPP, ASSISTED = "plain", "llama.cpp", "assisted"
DEFAULT_WAYS = (PLAIN, "auto", "generate", "prompt-lookup")
BASELINES = {
    "generate": "transformers' generate",
    "prompt-lookup": "its prompt lookup",
    ASSISTED: "its assisted decoding by --assistant",
    LLAMA_CPP: "llama.cpp on the model's GGUF file",
}
WAYS = (
    "POLICY or DRAFT:POLICY with ,option=value behind it, as talon/cpu,mu=0.05 or ngram:eagle; or "
    + ", ".join(f"{name} ({what})" for name, what in BASELINES.items())
    + f"; repeatable. {PLAIN} decoding always takes part (default: {', '.join(DEFAULT_WAYS)})"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    report = parser.add_subparsers(metavar="[report]", required=False).add_parser(
        "report", help="print the tables of what --out wrote", allow_abbrev=False
    )
    report.add_argument("file", nargs="+", type=Path, metavar="FILE")
    report.add_argument("--set", help="the prompt set of the first table (default: all)")
    report.add_argument("--plot", type=Path, metavar="DIR", help="draw each file's speeds as well (needs matplotlib)")
    report.set_defaults(run=run_report)
    group = parser.add_argument_group("what is measured")
    group.add_argument("--way", action="append", metavar="WAY", help=WAYS)
    group.add_argument(
        "--prompts", type=Path, action="append", metavar="FILE",
        help='.jsonl with a {"question_id": ..., "category": ..., "turns": [...]} per line, as in Spec-Bench, or a '
        "folder of such files; repeatable (default: six small sets that ship)",
    )  # fmt: skip
    group.add_argument(
        "--set-by", choices=("file", "category"), default="file", help="what makes a set (default: a file is one)"
    )
    group.add_argument("--per-set", type=int, default=2, metavar="N", help="prompts of each set, 0 for all (default 2)")
    group.add_argument("--turns", type=int, default=1, metavar="N", help="turns of each conversation (default 1)")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer (default 128)")
    group.add_argument("--rounds", type=int, default=3, metavar="N", help="medians are taken over them (default 3)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default); above 0 all ways sample")
    group.add_argument("--seed", type=int, default=0, help="of sampling, the same for every way (default 0)")
    group.add_argument("--assistant", metavar="MODEL", help=f"id or path of the smaller model of way {ASSISTED}")
    group.add_argument("--gguf", type=Path, metavar="FILE", help=f"for way {LLAMA_CPP} (default: the model's own)")
    group.add_argument(
        "--out", type=Path, metavar="FILE", help="keep the records in this .jsonl; if it is there, the run goes on"
    )
    shared.add_model_arguments(parser)
    shared.add_draft(parser.add_argument_group("draft"))


def run(arguments: argparse.Namespace) -> int:
    from specengine.benchmark.choice import Choice, sampling
    from specengine.benchmark.log import Log
    from specengine.benchmark.measuring import Run
    from specengine.benchmark.prompts import read
    from specengine.benchmark.provenance import provenance
    from specengine.benchmark.report import tables

    require_least(arguments, per_set=0, turns=1, max_new_tokens=1, rounds=1, temperature=0, seed=0)
    items = read(arguments.prompts, arguments.per_set or None, by_category=arguments.set_by == "category")
    choice = Choice(
        arguments.way or list(DEFAULT_WAYS),
        arguments.model,
        arguments.draft,
        arguments.assistant,
        arguments.gguf,
        {**shared.load_options(arguments), "draft_options": dict(arguments.draft_option)},
        sampling(arguments.temperature, arguments.seed),
    )
    origin = provenance("specengine", sys.argv[1:])
    log = Log(arguments.out, origin, _settings(arguments, choice.names, items))
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
    for record in run_.records(items, list(log.records)):
        log.add(record)
    _print(tables(log.records))
    return int(run_.faults > 0)


def run_report(arguments: argparse.Namespace) -> int:
    from specengine.benchmark.log import read
    from specengine.benchmark.plots import draw
    from specengine.benchmark.report import source, tables
    from specengine.benchmark.summaries import ALL

    runs = {file: read(file) for file in arguments.file}
    for file, records in runs.items():
        sets = sorted({record["set"] for record in records if record["record"] == "row"})
        if arguments.set is not None and arguments.set not in sets:
            raise InputError(f"set: got {arguments.set!r}, accepted in {file.name} {', '.join(sets) or 'none yet'}")
        print(source(file.name, records), end="\n\n")
        _print(tables(records, arguments.set or ALL))
        if arguments.plot is not None:
            picture = arguments.plot / f"{file.stem}.svg"
            draw(records, picture)
            say(f"{picture}: drawn")
    return 0


def _print(found: list[Table]) -> None:
    for table in found:
        print(table.markdown(), end="\n\n")


def _settings(arguments: argparse.Namespace, names: list[str], items: list[Workload]) -> dict[str, Any]:
    """All that decides what is measured; another run with the same goes on with its file."""
    from specengine.benchmark.prompts import digest
    from specengine.benchmark.provenance import public

    apart = ("run", "debug", "out", "way", "prompts", "set_by", "per_set", "command")
    given = {name: value for name, value in vars(arguments).items() if name not in apart}
    texts = {name: public([str(value)])[0] if isinstance(value, str | Path) else value for name, value in given.items()}
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
