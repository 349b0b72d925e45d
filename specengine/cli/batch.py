"""specengine batch: answer a file of prompts."""

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any

import torch
import transformers

import specengine
from specengine.batch import answering, lines
from specengine.batch.files import Files, Stream, opened
from specengine.benchmark.records import provenance
from specengine.cli import given
from specengine.cli.terminal import say, why_no_colours
from specengine.errors import require
from specengine.replicas import Scale

EVERY_SECONDS = 30  # a line of progress, where standard error is no terminal


def run(arguments: argparse.Namespace) -> int:
    scale = given.replicas(arguments)  # refused before anything is read
    if arguments.parallel is not None:
        require("parallel", arguments.parallel, "1 or more", arguments.parallel >= 1)
        require(
            "parallel",
            arguments.parallel,
            "1 with replicas",
            1 in (arguments.parallel, arguments.replicas),
        )
    options = given.generation_options(arguments)
    seed = options.pop("seed", 0)
    requests = lines.read(arguments.prompts, options, seed=seed, system=arguments.system)
    settings = settings_of(
        arguments, requests, options | {"seed": seed, "system": arguments.system}
    )
    _say_other_models(requests.items, given.model_name(arguments.model))
    origin = provenance("specengine", sys.argv[1:])
    with opened(arguments.out, requests.items, origin, settings, [arguments.prompts]) as files:
        if not isinstance(files, Files):
            say(
                f"specengine: note: {files} is no file: no figures are kept, and a run that is stopped begins anew"
            )
        if remaining := requests.items[files.done :]:
            if files.done:
                say(f"Going on after the first {files.done} of {len(requests.items)} answers")
            progress = AnswersDone(len(remaining))
            with contextlib.closing(_answers(arguments, scale, remaining, files)) as answers:
                for answered in answers:
                    files.add(answered)
                    progress.count(answered)
            progress.end(str(files))
        if files.failures:
            say(
                f"specengine: note: {files.failures} of {files.done} answers are errors, as their lines say"
            )
        return 1 if files.failures else 0


def _say_other_models(items: Sequence[lines.Item], name_here: str) -> None:
    """Say which other models the requests name."""
    names = [item.request.model for item in items if item.request is not None]
    if others := sorted({name for name in names if name is not None} - {name_here}):
        count = sum(name in others for name in names)
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        say(
            f"specengine: note: {count} requests name another model ({shown}); {name_here} answers them"
        )


def settings_of(
    arguments: argparse.Namespace, requests: lines.Prompts, options: dict[str, Any]
) -> dict[str, Any]:
    """Return all settings that answers or their figures may depend on, JSON-ready."""
    loading = {
        name: value for name, value in given.load_options(arguments).items() if name != "offline"
    }
    return {
        "record": "settings",
        "format": 1,
        "prompts": len(requests.items),
        "digest": requests.digest,
        "model": arguments.model,
        "draft": arguments.draft,
        "policy": arguments.policy,
        **loading,
        "options": options,
        "specengine": specengine.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def _answers(
    arguments: argparse.Namespace, scale: Scale | None, items: Sequence[lines.Item], files: Stream
) -> Generator[answering.Answered, None, None]:
    recipe = given.recipe(arguments, prefer_strict=True)
    if scale is None:
        yield from answering.answered(recipe.load, items, files.loaded, arguments.parallel)
        return
    from specengine.replicas import cluster  # MissingExtraError without Ray

    with cluster.running(scale):
        from specengine.batch import spread

        load = dataclasses.replace(recipe, threads=cluster.threads(scale)).load
        yield from spread.in_order(
            spread.Spread(load, scale, files.loaded).answered(items), items[0].place
        )


class AnswersDone:
    """On standard error: a line that is written over at a terminal, one now and then elsewhere, and a summary."""

    def __init__(self, count: int) -> None:
        self._count, self._done, self._failed, self._tokens = count, 0, 0, 0
        self._began = self._said = time.monotonic()
        self._terminal = why_no_colours("stderr") is None

    def count(self, answered: answering.Answered) -> None:
        self._done += 1
        self._failed += answered.failed
        self._tokens += sum(turn["num_generated_tokens"] for turn in answered.stats)
        now = time.monotonic()
        if self._terminal:
            print(f"\r{self}\x1b[K", end="", file=sys.stderr, flush=True)
        elif now - self._said >= EVERY_SECONDS:
            self._said = now
            say(str(self))

    def end(self, place: str) -> None:
        say(f"{chr(13) if self._terminal else ''}{self}; {place}")

    def __str__(self) -> str:
        seconds = time.monotonic() - self._began
        failed = f" ({self._failed} failed)" if self._failed else ""
        rate = self._tokens / seconds if seconds else 0.0
        return f"{self._done} of {self._count} answers{failed}, {self._tokens} tokens in {seconds:.1f} s, {rate:.1f}/s"
