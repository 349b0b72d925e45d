"""What arguments that several commands share become: engines, prompts, generation options."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from specengine.cli.arguments.parser import flag
from specengine.cli.arguments.shared import GENERATION_OPTIONS
from specengine.cli.terminal import say, tell
from specengine.costs import measured
from specengine.engine import Engine, TextGeneration
from specengine.errors import InputError
from specengine.files import MARK
from specengine.records import StreamPiece
from specengine.replicas.recipe import Recipe
from specengine.request.options import GenerationOptions
from specengine.request.prompts import Prompt
from specengine.trace import TraceWriter

SAMPLING_ONLY = ("top_k", "top_p", "min_p", "seed")


def open_trace(arguments: argparse.Namespace, engine: Engine) -> contextlib.AbstractContextManager[TraceWriter | None]:
    return TraceWriter(arguments.trace, engine) if arguments.trace else contextlib.nullcontext()


def follow(
    generation: TextGeneration, trace: TraceWriter | None
) -> contextlib.AbstractContextManager[Iterator[StreamPiece]]:
    """The pieces of `generation`, which go into the trace as well where there is one."""
    return contextlib.closing(generation if trace is None else trace.follow(generation))


def load_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of Engine.from_pretrained that say how models are loaded."""
    names = (
        "dtype",
        "device",
        "graphs",
        "compile_blocks",
        "lookup",
        "backend",
        "quantize",
        "pack",
        "strict",
        "tp_plan",
        "offline",
        "trust_remote_code",
    )
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def load_engine(arguments: argparse.Namespace, **changes: Any) -> Engine:
    """The engine asked for, ready to answer: what its policy reads of costs is measured, if need be.

    changes: options of Engine.from_pretrained instead of those on the command line.
    """
    engine = Engine.from_pretrained(
        arguments.model,
        arguments.draft,
        arguments.policy,
        draft_options=dict(arguments.draft_option),
        policy_options=dict(arguments.policy_option),
        **load_options(arguments) | changes,
    )
    if engine.policy is not None and engine.policy.plan().reads_costs:
        if not _costs_known(engine):
            tell("Measuring what drafting and verifying cost here, once")
        measured.find(engine.target, engine.drafter)
    return engine


def recipe(arguments: argparse.Namespace, *, threads: int | None = None, strict: bool = False) -> Recipe:
    """How a replica loads the engine asked for; strict: with `strict` where the model can, even unasked."""
    named = {"draft_options": dict(arguments.draft_option), "policy_options": dict(arguments.policy_option)}
    options = load_options(arguments) | named
    return Recipe(arguments.model, arguments.draft, arguments.policy, options, threads, strict)


def wants_gpu(arguments: argparse.Namespace) -> bool:
    """Whether each replica takes a GPU of its own."""
    return torch.cuda.is_available() if arguments.device is None else str(arguments.device).startswith("cuda")


def _costs_known(engine: Engine) -> bool:
    return measured.place(measured.identity(engine.target, engine.drafter)).is_file()


def generation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of Engine.generate, checked; what was not given is left to the model's own defaults."""
    names = [name for name, _, _ in GENERATION_OPTIONS]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    for name in ("allow_special_text", "coupled"):  # on unless turned off
        if not getattr(arguments, name):
            given[name] = False
    if arguments.stop:
        given["stop_strings"] = arguments.stop
    if getattr(arguments, "raw", False):
        given["raw"] = True
    GenerationOptions.check(given)
    return given


def note_idle_options(arguments: argparse.Namespace, generation: TextGeneration) -> None:
    """Say which given options cannot matter because the answer is greedy."""
    idle = [flag(name) for name in SAMPLING_ONLY if getattr(arguments, name) is not None]
    if idle and not generation.options.samples:
        verb = "change" if len(idle) > 1 else "changes"
        say(f"specengine: note: decoding is greedy, so {', '.join(idle)} {verb} nothing; sample with --temperature 1")


def messages(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """The messages before the first turn."""
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def as_prompt(before: list[dict[str, str]], text: str, *, raw: bool) -> Prompt:
    """The turn `text` behind the messages before it; the bare text where there are none."""
    if before and raw:
        raise InputError("raw: system messages and further turns need the chat template, leave out --raw")
    return [*before, {"role": "user", "content": text}] if before else text


def read_prompt(given: str | None) -> str:
    """The prompt on the command line; `-`, or none with something piped in, reads standard input."""
    if given == "-" or (given is None and not sys.stdin.isatty()):
        try:
            return sys.stdin.read().removeprefix(MARK).removesuffix("\n")
        except UnicodeDecodeError as error:
            place = f"{error.reason} at byte {error.start}"
            raise InputError(f"prompt: standard input is not UTF-8 ({place}); write it as UTF-8") from error
    if given is None:
        raise InputError("prompt: none was given; pass one, or - to read it from standard input")
    return given
