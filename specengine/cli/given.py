"""Turn arguments that several commands share into engines, prompts and generation options."""

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specengine import registry
from specengine.benchmark.workloads import entry_of
from specengine.checkpoints import eagle, embedded
from specengine.cli.parser import LOADING, flag
from specengine.cli.terminal import Progress, say, tell
from specengine.costs.measuring import stored
from specengine.engine import Engine, TextGeneration
from specengine.errors import (
    NAMES,
    Declaration,
    InputError,
    UnsupportedModelError,
    declared_in,
    require,
    require_input,
)
from specengine.files import MARK, cache_problem, lines_of, read_text
from specengine.records import StreamPiece
from specengine.replicas import Scale
from specengine.request.declared import flags
from specengine.request.options import GenerationOptions
from specengine.request.prompts import Prompt
from specengine.trace import TraceWriter

LONG_TOKENS = 256  # of what is added to a prompt: reading them takes a while


@dataclass(frozen=True)
class EngineArguments:
    """The arguments of Engine.from_pretrained.

    threads         of torch and the forward; None leaves them
    prefer_strict   load with `strict` where the model can, without where it cannot
    """

    model: str | None = None
    draft: str | None = None
    policy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    prefer_strict: bool = False

    def load(self) -> Engine:
        """Return the engine. The costs that its policy reads are measured first, if they are not known."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        engine = self._loaded()
        if problem := cache_problem():
            say(f"specengine: note: nothing is kept from run to run: {problem}")
        if engine.policy is not None and engine.policy.plan().reads_costs:
            parts = engine.target, engine.drafter, engine.drivers.own.captured
            if not stored.is_stored(stored.identity(*parts)):
                tell("Measuring what drafting and verifying cost here, once")
            with contextlib.suppress(
                UnsupportedModelError
            ):  # graphs that cannot be captured: an answer says so
                stored.find(*parts)
        return engine

    def _loaded(self) -> Engine:
        options = dict(self.options)
        if self.prefer_strict and not options.get("strict"):
            try:
                return Engine.from_pretrained(
                    self.model, self.draft, self.policy, **options | {"strict": True}
                )
            except UnsupportedModelError as error:
                if not str(error).startswith("strict:"):
                    raise
                say(f"specengine: note: {error}; at near-ties it may choose other tokens")
        return Engine.from_pretrained(self.model, self.draft, self.policy, **options)


def open_trace(
    arguments: argparse.Namespace, engine: Engine
) -> contextlib.AbstractContextManager[TraceWriter | None]:
    return TraceWriter(arguments.trace, engine) if arguments.trace else contextlib.nullcontext()


@contextlib.contextmanager
def follow(
    generation: TextGeneration, trace: TraceWriter | None, cached: int = 0
) -> Iterator[Iterator[StreamPiece]]:
    """Return the pieces of `generation`, which are also written to the trace if there is one.

    While the first one is waited for, a terminal shows how much of a long prompt has been read. cached: tokens of
    the prompt that caches hold already.
    """
    with contextlib.closing(generation if trace is None else trace.follow(generation)) as pieces:
        if (count := len(generation.prompt) - cached) < LONG_TOKENS:
            yield pieces
            return
        with Progress(1).step(f"reading {count:,} tokens", lambda: generation.prompt_read):
            first = list(itertools.islice(pieces, 1))
        yield itertools.chain(first, pieces)


def load_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return options of Engine.from_pretrained that say how models are loaded."""
    return {
        name: dict(value) if LOADING[name].reader is NAMES else value
        for name, value in values_of(LOADING, arguments).items()
    }


def values_of(declared: Mapping[str, Declaration], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values on the command line of those of the declared options that the command has."""
    return {
        name: getattr(arguments, each.dest)
        for name, each in declared.items()
        if hasattr(arguments, each.dest)
    }


def recipe(
    arguments: argparse.Namespace,
    *,
    prefer_strict: bool = False,
    **changes: Any,
) -> EngineArguments:
    """Return how the engine of the command line is loaded. prefer_strict: with `strict` where the model can.

    changes: options of Engine.from_pretrained instead of those on the command line.
    """
    return EngineArguments(
        arguments.model,
        arguments.draft,
        arguments.policy,
        load_options(arguments) | changes,
        prefer_strict=prefer_strict,
    )


def load_head(folder: Path, arguments: argparse.Namespace) -> eagle.Checkpoint:
    """Return an EAGLE head, read by the draft's options of the command line."""
    options = registry.build(eagle.HeadOptions, dict(arguments.draft_option), "draft_options")
    return eagle.load_head(folder, producer=options.producer, layer_ids=options.layer_ids)


def model_name(model: str | None) -> str:
    """Return the last part of a model's path or id."""
    return os.path.basename((model or embedded.NAME).rstrip("/"))


def target_name(engine: Engine) -> str:
    """Return the target's name to record, without the folders of this machine."""
    name = engine.target.name or type(engine.target).__name__
    return Path(name).name if Path(name).is_dir() else name


def replicas(arguments: argparse.Namespace) -> Scale | None:
    """Return the number and place of replicas, or None for one engine in this process."""
    scale = Scale(
        **values_of(declared_in(Scale), arguments),
        gpu=torch.cuda.is_available()
        if arguments.device is None
        else str(arguments.device).startswith("cuda"),
    )
    return None if scale.most == 1 and scale.address is None else scale


def generation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return options of Engine.generate, checked; an option without a value is left to the model's own defaults."""
    options = {
        each.name: value
        for each in flags().values()
        if (value := getattr(arguments, each.dest)) is not None
        and not (isinstance(each.default, bool) and value == each.default)
    }
    if getattr(arguments, "raw", False):
        options["raw"] = True
    GenerationOptions.check(options)
    return options


def note_idle_options(arguments: argparse.Namespace, generation: TextGeneration) -> None:
    """Say which of the options given change nothing because the answer is greedy."""
    sampling = [
        each
        for each in flags().values()
        if (each.neutral and each.name != "temperature") or each.name == "seed"
    ]
    idle = [flag(each.name) for each in sampling if getattr(arguments, each.dest) is not None]
    if idle and not generation.options.samples:
        verb = "change" if len(idle) > 1 else "changes"
        say(
            f"specengine: note: decoding is greedy, so {', '.join(idle)} {verb} nothing; sample with --temperature 1"
        )


def messages(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Return the messages before the first turn."""
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def as_prompt(before: list[dict[str, str]], text: str, *, raw: bool) -> Prompt:
    """Return the turn `text` after the messages before it, or the text alone where there are none."""
    require_input(
        "raw: system messages and further turns need the chat template, leave out --raw",
        not (before and raw),
    )
    return [*before, {"role": "user", "content": text}] if before else text


def read_option(name: str, file: Path | None) -> str | None:
    """Return the text of an option's file, if there is one; InputError where it cannot be read."""
    try:
        return None if file is None else read_text(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: {file} cannot be read ({error})") from error


def read_prompt(argument: str | None) -> str:
    """Return the prompt of the command line. `-`, or none with a pipe, reads standard input."""
    if argument == "-" or (argument is None and not sys.stdin.isatty()):
        try:
            return sys.stdin.read().removeprefix(MARK).removesuffix("\n")
        except UnicodeDecodeError as error:
            place = f"{error.reason} at byte {error.start}"
            raise InputError(
                f"prompt: standard input is not UTF-8 ({place}); write it as UTF-8"
            ) from error
    if argument is None:
        raise InputError("prompt: none was given; pass one, or - to read it from standard input")
    return argument


Turns = Sequence[str]


def read_prompts(file: Path) -> Iterator[Turns]:
    """Yield the user's turns of each conversation in `file`; InputError for an unreadable line."""
    require("prompts", str(file), "a .txt or a .jsonl file", file.suffix in (".txt", ".jsonl"))
    for number, line in enumerate(lines_of(file), start=1):
        if line.strip():
            yield (
                [line]
                if file.suffix == ".txt"
                else entry_of(line, f"{file}, line {number}")["turns"]
            )
