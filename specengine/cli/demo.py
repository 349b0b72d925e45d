"""specengine demo: one streamed answer, one of its trees, and the same answer timed three ways in one run."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.checking import Flip, flips, huggingface_tokens, near_tie_logits
from specengine.cli import given
from specengine.cli.generate import DraftColours, Paint, plain_text
from specengine.cli.terminal import say, why_no_colours, write
from specengine.cli.trace import print_tree
from specengine.cli.verdict import SAME, Seen, known_costs, verdict
from specengine.costs.measuring import processor_times, share_of_others
from specengine.engine import Engine
from specengine.errors import InputError, UnsupportedModelError
from specengine.records import Stats
from specengine.request.options import GenerationOptions
from specengine.request.text import Decoder
from specengine.trace import TracedCycle
from specengine.trace.writer import traced

WARM_UP_TOKENS, MIN_TOKENS = 8, 16
MAX_TIMING_SECONDS = 25.0  # of timing: no further round is begun that would end after them
MIN_TIMED_TOKENS = 48  # over all rounds
MAX_DRAWN_NODES = 24  # of the tree that is drawn


@dataclass
class TimedWay:
    """One way of decoding, and its runs: new tokens, seconds, statistics where it is our own."""

    name: str
    decode: Callable[[int], tuple[list[int], Stats | None]]  # of max_new_tokens
    tokens: list[int] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, max_new_tokens: int) -> None:
        began = time.perf_counter()
        self.tokens, stats = self.decode(max_new_tokens)
        self.seconds.append(time.perf_counter() - began)
        self.stats += [] if stats is None else [stats]

    @property
    def acceptance(self) -> float:
        """Return the tokens per verification of the last run."""
        return self.stats[-1].mean_acceptance_length if self.stats else 1.0

    @property
    def speed(self) -> float:
        """Return the median tokens per second, prefill included."""
        return len(self.tokens) / statistics.median(self.seconds)


def run(arguments: argparse.Namespace) -> int:
    if arguments.rounds < 1:
        raise InputError(f"rounds: got {arguments.rounds}, accepted 1 or more")
    GenerationOptions.check(_greedy(arguments.max_new_tokens))
    engine = _load(arguments)
    plain = Engine(engine.target, None, None, engine.tokenizer)

    say(f"\n{arguments.prompt}\n")
    drawn = _stream_answer(engine, arguments)
    if drawn is not None:
        print("One cycle: a tree of drafted tokens, verified by one pass of the model.")
        print_tree(drawn)
        print()

    ways = _ways(plain, engine, arguments.prompt)
    arguments.max_new_tokens = _affordable(ways, arguments.max_new_tokens)
    before = processor_times()
    _time(ways, arguments)
    others = share_of_others(before)
    _print_table(ways, plain, engine, arguments)
    print(f"\n{_verdict(ways, engine, others)}")
    return 0


def _load(arguments: argparse.Namespace) -> Engine:
    """Return the engine, strict where the model and the device allow it, so that both ways give the same bits."""
    if arguments.strict is not None:
        return given.load_engine(arguments)
    try:
        return given.load_engine(arguments, strict=True)
    except UnsupportedModelError as error:
        if not str(error).startswith("strict:"):
            raise
        say(
            f"specengine: note: {error}; at near-ties, trees and plain decoding may choose different tokens"
        )
        return given.load_engine(arguments, strict=False)


def _stream_answer(engine: Engine, arguments: argparse.Namespace) -> TracedCycle | None:
    """Print the answer as it comes. The cycle worth drawing, if any: the one that accepted most."""
    paint: Paint = plain_text
    if why_no_colours() is None:
        say(DraftColours.LEGEND)
        paint = DraftColours(engine).paint
    best: TracedCycle | None = None
    decode = Decoder(engine.tokenizer, special=True)
    for piece in engine.stream(arguments.prompt, **_greedy(arguments.max_new_tokens)):
        write(paint(piece))
        cycle = traced(piece.cycle, piece.text, lambda token: decode([token]))
        if 1 < len(cycle.kept) <= MAX_DRAWN_NODES and (
            best is None or _worth(cycle) > _worth(best)
        ):
            best = cycle
    write("\n\n")
    return best


def _worth(cycle: TracedCycle) -> tuple[bool, int, int]:
    branches = any(len(children) > 1 for children in cycle.children)
    return branches, len(cycle.accepted), len(cycle.kept)


def _ways(plain: Engine, engine: Engine, prompt: str) -> list[TimedWay]:
    def ours(one: Engine) -> Callable[[int], tuple[list[int], Stats | None]]:
        def decode(max_new_tokens: int) -> tuple[list[int], Stats | None]:
            result = one.generate(prompt, **_greedy(max_new_tokens))
            return result.token_ids, result.stats

        return decode

    def theirs(max_new_tokens: int) -> tuple[list[int], Stats | None]:
        return huggingface_tokens(plain, prompt, **_greedy(max_new_tokens)), None

    return [
        TimedWay("transformers generate", theirs),
        TimedWay("plain decoding", ours(plain)),
        TimedWay("speculative decoding", ours(engine)),
    ]


def _greedy(max_new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens, "temperature": 0.0}


def _affordable(ways: list[TimedWay], requested: int) -> int:
    """Warm up, and return how many tokens this machine can time in half of the seconds."""
    slowest = 0.0
    for way in ways:
        for _ in range(2):  # the first run loads what it needs
            way.run(min(WARM_UP_TOKENS, requested))
        slowest = max(slowest, way.seconds[-1] / max(1, len(way.tokens)))
        way.seconds.clear()
        way.stats.clear()
    tokens = min(requested, max(MIN_TOKENS, int(MAX_TIMING_SECONDS / 2 / slowest)))
    if tokens < requested:
        say(f"This machine takes its time: {tokens} tokens instead of {requested} are timed")
    return tokens


def _time(ways: list[TimedWay], arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    for number in range(arguments.rounds):
        gone = time.perf_counter() - began
        if number and gone + gone / number > MAX_TIMING_SECONDS:
            say(f"This machine takes its time: {number} of {arguments.rounds} rounds have to do")
            break
        say(f"Timing, round {number + 1} of {arguments.rounds}")
        for way in ways:
            way.run(arguments.max_new_tokens)


def _print_table(
    ways: list[TimedWay], plain: Engine, engine: Engine, arguments: argparse.Namespace
) -> None:
    _, ours, _ = ways
    compared = [(way, *_compared(way, ours, plain, arguments)) for way in ways]
    print(
        f"{'':<24}{'tokens':>7}{'tokens/s':>10}{'acceptance length':>19}   identical to plain decoding"
    )
    for way, same, _ in compared:
        print(
            f"{way.name:<24}{len(way.tokens):>7}{way.speed:>10.1f}{way.acceptance:>19.2f}   {same}"
        )
    dtype = str(engine.target.dtype).removeprefix("torch.")
    drafted = (
        f"{engine.drafter.name}, {engine.policy}" if engine.drafter is not None else "no draft"
    )
    print(
        f"\nspeculative decoding: {drafted}\nmedian of {len(ours.seconds)} interleaved rounds, {dtype} on "
        f"{engine.target.device}, {torch.get_num_threads()} threads, prompt processing included"
    )
    for way, _, differences in compared:
        for line in differences:
            print(f"{way.name}: {line}")


def _verdict(ways: list[TimedWay], engine: Engine, others: float | None) -> str:
    """Return what was measured, and why: plain decoding over transformers, drafts over that.

    others: share of the processors that other programs took meanwhile.
    """
    theirs, plain, drafted = ways
    timed = min(len(way.tokens) * len(way.seconds) for way in ways)
    if timed < MIN_TIMED_TOKENS:
        return f"{timed} tokens per way are too few for a verdict, {MIN_TIMED_TOKENS} are enough."
    device = engine.target.device.type
    kind = device.replace("cpu", "CPU").replace("cuda", "GPU")
    text = f"On this {kind} plain decoding here is {_times(plain.speed / theirs.speed)} transformers' generate"
    if engine.drafter is None:
        return f"{text}, and no draft was asked for."
    averages = Seen.of(drafted.stats, drafted.speed / plain.speed)
    return f"{text}. {verdict(device, known_costs(engine), averages, others)}"


def _times(ratio: float) -> str:
    return "as fast as" if abs(ratio - 1) <= SAME else f"{ratio:.2f} times as fast as"


def _compared(
    way: TimedWay, ours: TimedWay, plain: Engine, arguments: argparse.Namespace
) -> tuple[str, list[str]]:
    """Return whether the answer is plain decoding's, in a word, and each token that is not the model's own choice."""
    if way is ours:
        return "-", []
    if way.tokens == ours.tokens:
        return "yes", []
    differing = flips(plain, arguments.prompt, way.tokens, **_greedy(arguments.max_new_tokens))
    tolerance = near_tie_logits(plain.target)
    faults = sum(flip.gap > tolerance for flip in differing)
    ties = len(differing) - faults
    if faults or not differing:
        return "no", list(_explained(differing, plain, tolerance)) or ["it ends elsewhere"]
    return f"up to {ties} near-tie{'s' if ties > 1 else ''}", list(
        _explained(differing, plain, tolerance)
    )


def _explained(differing: list[Flip], plain: Engine, tolerance: float) -> Iterator[str]:
    decode = Decoder(plain.tokenizer, special=True)
    for flip in differing:
        token, expected = (decode([token]) for token in (flip.token, flip.wanted))
        verdict = "near-tie" if flip.gap <= tolerance else "mismatch"
        yield (
            f"{verdict} at token {flip.position}, {token!r} instead of {expected!r}, logit gap {flip.gap:.4f} "
            f"(up to {tolerance:g} counts as rounding)"
        )
