"""End to end: speculative decoding against the baselines that users have, interleaved in one run.

Baselines: transformers' `generate`, its prompt-lookup decoding, and this engine's own plain decoding. Every way
answers every prompt once per round, in turn, as in `specengine bench`; --tree adds trees of the eagle policy, and what
verifying and drafting cost. `python -m bench.report` makes tables of FILE, and of FILE.rows while it grows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import provenance, report, workloads
from specengine.benchmark.baselines import GENERATE, LOOKUP
from specengine.benchmark.choice import Choice, sampling
from specengine.benchmark.measuring import Run
from specengine.benchmark.summaries import summaries
from specengine.costs import measured


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--prompts", type=Path, help="folder of .jsonl prompt sets; default: a few built-in prompts")
    parser.add_argument("--per-set", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default=None)
    parser.add_argument("--draft", default=None, help="default: the model's best")
    parser.add_argument("--lookup", action=argparse.BooleanOptionalAction, help="copies in the draft, or the head")
    parser.add_argument("--policy", action="append", default=[], help="repeatable; default: auto")
    parser.add_argument(
        "--tree",
        type=_tree,
        action="append",
        default=[],
        metavar="WIDTHxEXPANSIONSxBUDGET",
        help="the eagle policy with this tree, repeatable; also measures what verifying and drafting cost",
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)

    load = {name: getattr(args, name) for name in ("dtype", "device", "lookup")}
    names = [GENERATE, LOOKUP, *args.tree, *(args.policy or ([] if args.tree else ["auto"]))]
    choice = Choice(names, args.model, args.draft, load=load, options=sampling(0.0, 0))
    records = list(provenance.kept(_records(args, choice), args.out))
    records += summaries(records)
    for table in report.tables(records):
        print(table.markdown(), end="\n\n")
    if args.out:
        provenance.write(args.out, records)
    return int(any(record.get("fault") for record in records))


def _records(args: argparse.Namespace, choice: Choice) -> Iterator[dict[str, Any]]:
    first = choice.engine()
    items = workloads.read(args.prompts, args.per_set)
    named = ("dtype", "max_new_tokens", "per_set", "rounds")
    settings = {name: getattr(args, name) for name in named} | {"temperature": 0.0, "prompts": len(items)}
    assert first.drafter is not None
    yield {"record": "settings", "model": first.target.name, "draft": first.drafter.name, **settings}
    if args.tree:
        yield measured.measure(first.target, first.drafter).record()
    ways = choice.ways(first, items, args.max_new_tokens)
    for way in ways:
        way.facts["places"] = [(report.POLICIES, "")]
    run = Run(choice.plain(first), ways, choice.options, length=args.max_new_tokens, rounds=args.rounds, say=_say)
    yield from (record for record in run.records(items) if record["record"] != "answer")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tree(text: str) -> str:
    width, expansions, budget = map(int, text.split("x"))
    return f"eagle,width={width},expansions={expansions},budget={budget}"


if __name__ == "__main__":
    sys.exit(main())
