"""specengine demo: one streamed answer, then the same answer timed three ways in one run."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.checking import Certificate, certify, huggingface_tokens
from specengine.cli import given
from specengine.cli.colours import DraftColours, PlainText
from specengine.cli.terminal import say, why_no_colours, write
from specengine.engine import Engine
from specengine.errors import InputError

PROMPT = "Explain how a rainbow forms, and why its colours always stand in the same order."
WARM_UP_TOKENS = 16
ENOUGH_SECONDS = 40.0  # of timing; no further round is begun after that


@dataclass
class Way:
    """One way of decoding, and its runs: new tokens, seconds, tokens per verification."""

    name: str
    decode: Callable[[int], tuple[list[int], float]]  # max_new_tokens -> tokens, acceptance length
    tokens: list[int] = field(default_factory=list)
    acceptance: float = 1.0
    seconds: list[float] = field(default_factory=list)

    def run(self, max_new_tokens: int) -> None:
        began = time.perf_counter()
        self.tokens, self.acceptance = self.decode(max_new_tokens)
        self.seconds.append(time.perf_counter() - began)

    @property
    def speed(self) -> float:
        """Median tokens per second, prefill included."""
        return len(self.tokens) / statistics.median(self.seconds)


def run(arguments: argparse.Namespace) -> int:
    if arguments.rounds < 1:
        raise InputError(f"rounds: got {arguments.rounds}, accepted 1 or more")
    say("Loading the model")
    engine = given.load_engine(arguments)
    plain = Engine(engine.target, None, None, engine.tokenizer)

    say(f"\n{arguments.prompt}\n")
    _stream_answer(engine, arguments)

    ways = _ways(plain, engine, arguments.prompt)
    for way in ways:
        way.run(min(WARM_UP_TOKENS, arguments.max_new_tokens))
        way.seconds.clear()
    began = time.perf_counter()
    for number in range(arguments.rounds):
        if number and time.perf_counter() - began > ENOUGH_SECONDS:
            say(f"This machine takes its time: {number} of {arguments.rounds} rounds have to do")
            break
        say(f"Timing, round {number + 1} of {arguments.rounds}")
        for way in ways:
            way.run(arguments.max_new_tokens)
    _print_table(ways, plain, engine, arguments)
    return 0


def _stream_answer(engine: Engine, arguments: argparse.Namespace) -> None:
    view: PlainText | DraftColours = PlainText()
    if why_no_colours() is None:
        say(DraftColours.LEGEND)
        view = DraftColours(engine)
    for piece in engine.stream(arguments.prompt, **_greedy(arguments.max_new_tokens)):
        write(view.paint(piece))
    write("\n\n")


def _ways(plain: Engine, engine: Engine, prompt: str) -> list[Way]:
    def ours(one: Engine) -> Callable[[int], tuple[list[int], float]]:
        def decode(max_new_tokens: int) -> tuple[list[int], float]:
            result = one.generate(prompt, **_greedy(max_new_tokens))
            return result.token_ids, result.stats.mean_acceptance_length

        return decode

    def theirs(max_new_tokens: int) -> tuple[list[int], float]:
        return huggingface_tokens(plain, prompt, **_greedy(max_new_tokens)), 1.0

    return [
        Way("transformers generate", theirs),
        Way("plain decoding", ours(plain)),
        Way("speculative decoding", ours(engine)),
    ]


def _greedy(max_new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens, "temperature": 0.0}


def _print_table(ways: list[Way], plain: Engine, engine: Engine, arguments: argparse.Namespace) -> None:
    _, ours, _ = ways
    print(f"{'':<24}{'tokens':>7}{'tokens/s':>10}{'acceptance length':>19}   identical to plain decoding")
    for way in ways:
        same = "-" if way is ours else "yes" if way.tokens == ours.tokens else "no"
        print(f"{way.name:<24}{len(way.tokens):>7}{way.speed:>10.1f}{way.acceptance:>19.2f}   {same}")
    dtype = str(engine.target.dtype).removeprefix("torch.")
    drafted = f"{engine.drafter.name}, {engine.policy}" if engine.drafter is not None else "no draft"
    print(
        f"\nspeculative decoding: {drafted}\nmedian of {len(ours.seconds)} interleaved rounds, {dtype} on "
        f"{engine.target.device}, {torch.get_num_threads()} threads, prompt processing included"
    )
    for line in _differences(ways, plain, engine, arguments):
        print(line)


def _differences(ways: list[Way], plain: Engine, engine: Engine, arguments: argparse.Namespace) -> Iterator[str]:
    """What the checker says about answers that are not plain decoding's."""
    theirs, ours, speculative = ways
    options = _greedy(arguments.max_new_tokens)
    if speculative.tokens != ours.tokens:
        found = certify(plain, engine, arguments.prompt, reference=ours.tokens, **options)
        yield f"speculative against plain decoding: {_explain(found, engine)}"
    if theirs.tokens != ours.tokens:
        found = certify(plain, plain, arguments.prompt, reference=theirs.tokens, **options)
        yield f"plain decoding against transformers: {_explain(found, engine)}"


def _explain(found: Certificate, engine: Engine) -> str:
    flip = found.flip
    if flip is None:
        return found.verdict
    texts = [engine.tokenizer.decode([token]) for token in (flip.token, flip.wanted)]
    return (
        f"{found.verdict} at token {flip.position}, {texts[0]!r} instead of {texts[1]!r}, logit gap {flip.gap:.4f} "
        f"(up to {found.tolerance:g} counts as rounding)"
    )
