"""specengine bench --demo: one streamed answer, one of its trees, and the same answer timed three ways in one run."""

import argparse
from typing import Any

from specengine.benchmark.measuring import Run, tokens_of
from specengine.benchmark.workloads import Workload
from specengine.cli import given
from specengine.cli.bench import SPECULATIVE, model_record, report, run_of
from specengine.cli.generate import view
from specengine.cli.terminal import say, why_no_colours, write
from specengine.cli.trace import print_tree
from specengine.costs.measuring import processor_times, share_of_others
from specengine.engine import Engine
from specengine.errors import require_minimum
from specengine.request.options import GenerationOptions
from specengine.request.text import Decoder
from specengine.trace import TracedCycle
from specengine.trace.writer import traced

WARM_UP_TOKENS, MIN_TOKENS = 8, 16
MAX_TIMING_SECONDS = 20.0  # for all rounds of transformers' generate, the slowest way
MAX_DRAWN_NODES = 24  # of the tree that is drawn


def run(arguments: argparse.Namespace) -> int:
    require_minimum(arguments, rounds=1)
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "temperature": 0.0}
    GenerationOptions.check(options)
    engine = given.recipe(
        arguments, prefer_strict=arguments.strict is None, strict=bool(arguments.strict)
    ).load()  # then both ways give the same bits

    say(f"\n{arguments.prompt}\n")
    drawn = _stream_answer(engine, arguments.prompt, options)
    if drawn is not None:
        print("One cycle: a tree of drafted tokens, verified by one pass of the model.")
        print_tree(drawn)
        print()

    timed = run_of(engine, length=arguments.max_new_tokens, rounds=arguments.rounds, generate=True)
    _limit(timed, arguments.prompt)
    before = processor_times()
    item = Workload("demo", "1", (arguments.prompt,))
    settings = {
        "record": "settings",
        "prompts": 1,
        "rounds": timed.rounds,
        **options,
        "max_new_tokens": timed.length,
    }
    report(
        [settings, model_record(engine), *timed.records([item])],
        {SPECULATIVE: True},
        engine,
        share_of_others(before),
        item.set,
    )
    return int(timed.faults > 0)


def _stream_answer(engine: Engine, prompt: str, options: dict[str, Any]) -> TracedCycle | None:
    """Print the answer as it comes. The cycle worth drawing, if any: the one that accepted most."""
    paint = view(engine, draft=why_no_colours() is None)
    best: TracedCycle | None = None
    decode = Decoder(engine.tokenizer, special=True)
    for piece in engine.stream(prompt, **options):
        write(paint(piece))
        cycle = traced(piece.cycle, piece.text, lambda token: decode([token]))
        if 1 < len(cycle.kept) <= MAX_DRAWN_NODES and (
            best is None or _worth(cycle) > _worth(best)
        ):
            best = cycle
    write("\n\n")
    return best


def _worth(cycle: TracedCycle) -> tuple[bool, int, int]:
    return (
        any(len(children) > 1 for children in cycle.children),
        len(cycle.accepted),
        len(cycle.kept),
    )


def _limit(timed: Run, prompt: str) -> None:
    """Lower tokens and rounds to what this machine can time in the seconds for it."""
    decode = timed.ways[1].start()
    tokens = tokens_of(timed.plain, prompt)
    for _ in range(2):  # the first run loads what it needs
        answer = decode(tokens, min(WARM_UP_TOKENS, timed.length))
    seconds = answer.seconds / len(answer.tokens)
    length = min(timed.length, max(MIN_TOKENS, int(MAX_TIMING_SECONDS / 2 / seconds)))
    rounds = min(timed.rounds, max(1, int(MAX_TIMING_SECONDS / (length * seconds))))
    if (length, rounds) != (timed.length, timed.rounds):
        say(
            f"This machine takes its time: {rounds} of {timed.rounds} rounds, {length} tokens instead of "
            f"{timed.length} are timed"
        )
    timed.length, timed.rounds = length, rounds
    say(f"Timing three ways in turn, rounds: {rounds}, tokens: {length}")
