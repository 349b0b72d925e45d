"""specengine train learn, and learning during chat and serve: the draft's head trains on this user's own texts."""

import argparse
import contextlib
import functools
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from specengine.cli import given, terminal
from specengine.cli.terminal import say
from specengine.errors import InputError, require

# between two looks, and without a request before learning begins or goes on
CHECK_SECONDS, IDLE_SECONDS = 0.5, 10.0
NEW = 16  # texts that make it worth to begin again


def run(arguments: argparse.Namespace) -> int:
    require("minutes", f"{arguments.minutes:g}", "above 0", 0 < arguments.minutes < math.inf)
    _stand_back()
    from specengine.train.draft.use import Learner

    rounds = Learner(
        given.recipe(arguments, learn=str(arguments.folder)).load(), progress=say
    ).learn(60 * arguments.minutes)
    print(f"{sum(each.swapped for each in rounds)} of {len(rounds)} rounds gave a better head")
    return 0


@contextlib.contextmanager
def beside(recipe: given.EngineArguments, idle: Callable[[], bool]) -> Iterator[None]:
    """Learn in another process, of the lowest priority, while nothing is answered. Does nothing without `learn`.

    idle: says whether no answer is under way; called from a thread.
    """
    folder = recipe.options.get("learn")
    if folder is None:
        yield
        return
    with terminal.beside(functools.partial(_watch, recipe, Path(folder), idle)):
        yield


def _watch(
    recipe: given.EngineArguments, folder: Path, idle: Callable[[], bool], ended: threading.Event
) -> None:
    """Begin to learn where there are new texts and nothing was asked for long, and let it wait where there is."""
    child: Any = None
    pipe: Connection | None = None
    quiet, going, last = 0.0, True, ""
    while not ended.wait(CHECK_SECONDS):
        quiet = quiet + CHECK_SECONDS if idle() else 0.0
        if child is not None and not child.is_alive():
            child = pipe = None
        if (
            child is None
            and quiet >= IDLE_SECONDS
            and len(
                new := [
                    file.name for file in (folder / "texts").glob("[0-9]*.json") if file.name > last
                ]
            )
            >= NEW
        ):
            context = multiprocessing.get_context("spawn")
            theirs, pipe = context.Pipe(duplex=False)
            child = context.Process(target=_learn, args=(recipe, theirs), daemon=True)
            child.start()
            theirs.close()
            going, last = True, max(new)
        elif pipe is not None and going != (quiet >= IDLE_SECONDS):
            going = not going
            with contextlib.suppress(OSError):  # it has just ended
                pipe.send(going)
    if child is not None:
        child.terminate()  # which does no harm, wherever it is
        child.join()


def _learn(recipe: given.EngineArguments, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the answer
    _stand_back()
    from specengine.train.draft.use import Learner

    with contextlib.suppress(
        InputError, EOFError
    ):  # too few texts, learnt elsewhere, or there is nobody to learn for
        Learner(recipe.load(), turn=functools.partial(_turn, pipe)).learn(math.inf)


def _turn(pipe: Connection) -> None:
    """Wait as long as was said last. EOFError where its sender has gone."""
    going = True
    while pipe.poll() or not going:
        going = pipe.recv()


def _stand_back() -> None:
    """Leave the processors to everybody else. Where others run, two threads mostly wait for each other."""
    torch.set_num_threads(1)
    if hasattr(os, "nice"):
        os.nice(19)
