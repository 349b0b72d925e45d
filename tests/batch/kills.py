"""Stop `specengine batch` at random moments; after it has gone on, every file is as an uninterrupted run writes it.

python -m tests.batch.kills [--stops 14] [--seed 0] [--prompts 28] [--default-model]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from specengine.batch.files import beside
from specengine.cli import main
from tests.batch import files

PARALLEL = (1, 2, 8)
DRAFTS = ((), ("--draft", "recycling"), ("--draft", "none"))
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LOADING = 0.15  # share of the stops
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["specengine.cli.batch", "specengine.engine", "tests.batch.files"])


def started(prompts: Path, out: Path, more: tuple[str, ...]) -> BaseProcess:
    """Start the command in a process of its own."""
    process = processes.Process(target=_run, args=(prompts, out, more))
    process.start()
    return process


def _run(prompts: Path, out: Path, more: tuple[str, ...]) -> None:
    # which a shell lets what runs in the background ignore
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(["batch", str(prompts), "--out", str(out), *more]))


def ended(process: BaseProcess) -> None:
    process.join()
    assert process.exitcode == 1, (
        f"status {process.exitcode}; some lines cannot be answered, so 1 is expected"
    )


def length(file: Path) -> int:
    """Return the number of whole lines; 0 where there is no file."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def is_same(out: Path, whole: Path) -> bool:
    """Return whether the answers are the same bytes, with figures for each and the three lines above these."""
    return out.read_bytes() == whole.read_bytes() and length(beside(out)) == length(whole) + 3


def tried(
    folder: Path, model: tuple[str, ...], stops: int, draw: random.Random, count: int = 28
) -> Iterator[tuple[str, bool]]:
    """Yield what was done to a file and whether it became the same bytes, until there were so many stops."""
    prompts = files.write(folder / "prompts.jsonl", files.lines(count))
    ways = list(itertools.product(PARALLEL, DRAFTS))
    draw.shuffle(ways)
    for number, (parallel, draft) in enumerate(itertools.cycle(ways)):
        more = ("--parallel", str(parallel), *draft, "--max-new-tokens", "60", *model)
        whole, out = (folder / f"{number}.{name}.jsonl" for name in ("whole", "stopped"))
        ended(started(prompts, whole, more))
        deeds = list(_stopped(prompts, out, more, draw, min(stops, 2)))
        stops -= len(deeds)
        yield (
            f"{' '.join(more[: 2 + len(draft)])}: {', '.join(deeds) or 'over before'}",
            is_same(out, whole),
        )
        if not stops:
            return


def _stopped(
    prompts: Path, out: Path, more: tuple[str, ...], draw: random.Random, most: int
) -> Iterator[str]:
    """Write a file. Stop the command at most so often, mostly at some line, now and then while it loads the model."""
    for _ in range(most):
        process = started(prompts, out, more)
        line = 0 if draw.random() < LOADING else draw.uniform(length(out), length(prompts))
        while process.exitcode is None and length(out) < line:
            time.sleep(0.001)
        process.join(draw.uniform(0.0, 0.03 if line else 1.0))
        if process.exitcode is not None:
            break
        number = draw.choice(SIGNALS)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join()
        yield f"{signal.Signals(number).name} at {length(out)}"
    ended(started(prompts, out, more))


def attempt() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stops", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--default-model", action="store_true", help="instead of a tiny one")
    arguments = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = (
            () if arguments.default_model else ("--model", str(files.make_model(folder / "tiny")))
        )
        draw = random.Random(arguments.seed)
        for done, same in tried(folder, model, arguments.stops, draw, arguments.prompts):
            wrong += not same
            print(f"{done}: {'the same bytes' if same else 'DIFFERENT'}", flush=True)
    print(f"{arguments.stops} stops, {wrong} files differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(attempt())
