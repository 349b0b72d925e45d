"""specengine calibrate: what the parts of a cycle take on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from specengine.cli import given
from specengine.cli.terminal import as_json, say
from specengine.costs import measuring
from specengine.costs.measuring import stored
from specengine.engine import Engine

if TYPE_CHECKING:
    from specengine.costs import PassCosts, Points


def run(arguments: argparse.Namespace) -> int:
    engine = Engine.from_pretrained(
        arguments.model, arguments.draft, draft_options=dict(arguments.draft_option), **given.load_options(arguments)
    )
    target, drafter, driver = engine.target, engine.drafter, engine.drivers.own.captured
    costs = stored.find(target, drafter, driver, fresh=True)
    key = stored.identity(target, drafter, driver)
    if arguments.json:
        print(as_json({"key": key, "costs": costs.to_dict()}))
    else:
        facts = (key["model"], key["dtype"], key["backend"], key["device"], f"draft {key['draft'] or 'none'}")
        print(", ".join(facts))
        print("\n".join(_lines(costs, measuring.contexts(target), drafts=drafter is not None)))
    if costs.doubt is not None:
        say(f"specengine: note: these costs are provisional, {costs.doubt}; they are measured again on a quiet machine")
    say(f"specengine: note: {costs.source}" if "," in costs.source else f"kept in {stored.path(key)}")
    return 0


def _lines(costs: PassCosts, contexts: tuple[int, int], *, drafts: bool) -> Iterator[str]:
    behind = list(dict.fromkeys(contexts)) if costs.verify_growth else [costs.context]
    yield from _table("verified nodes", behind, _milliseconds(costs, costs.verify, behind, drafting=False))
    if drafts:
        yield from _table("drafted from", behind, _milliseconds(costs, costs.draft, behind, drafting=True))
    yield f"{'rest of a cycle':<16}{1e3 * costs.overhead:>9.2f} ms"
    if costs.padded:
        yield "captured: every verification takes what the largest tree's does"


def _milliseconds(
    costs: PassCosts, points: Points, contexts: list[int], *, drafting: bool
) -> Iterator[tuple[int, list[float]]]:
    for count in sorted(points):
        sizes = (1, count) if drafting else (count, 1)
        yield count, [1e3 * float(costs.table(*sizes, context)[drafting][-1]) for context in contexts]


def _table(title: str, contexts: list[int], rows: Iterable[tuple[int, list[float]]]) -> Iterator[str]:
    yield f"{title:<16}" + "".join(f"{f'at {context} tokens':>18}" for context in contexts)
    first: list[float] = []
    for count, times in rows:
        first = first or times
        shown = zip(times, first, strict=True)
        yield f"{count:>14}  " + "".join(f"{time:>9.2f} ms {time / one:>4.2f} x" for time, one in shown)
