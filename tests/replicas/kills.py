"""Kill workers and drivers of `specengine batch` at random moments; every file ends as one process would write it.

python -m tests.replicas.kills [--times 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from specengine.batch.files import beside
from tests.batch import files
from tests.replicas.clusters import cluster, workers

REPLICAS = (1, 2, 4)
PROMPTS = 84


def drive(prompts: Path, out: Path, model: Path, more: tuple[str, ...]) -> None:
    """Run in a process of its own."""
    sys.exit(files.batch(prompts, out, model, *more))


def interrupted(folder: Path, model: Path, prompts: Path, address: str, number: int, draw: random.Random) -> str:
    """Write one file through one to three kills; returns what was done."""
    replicas = REPLICAS[number % len(REPLICAS)]
    out = folder / f"{number}.jsonl"
    more = () if replicas == 1 else ("--replicas", str(replicas), "--threads", "1", "--ray-address", address)
    more += ("--max-new-tokens", "60")
    left, deeds = draw.randint(1, 3), list[str]()
    while True:
        driver = multiprocessing.Process(target=drive, args=(prompts, out, model, more))
        driver.start()
        killed = False
        while driver.is_alive() and left:
            early, pause = draw.random() < 0.1, draw.uniform(0.0, 1.5)
            begun = _lines(out)
            while driver.is_alive() and not early and _lines(out) == begun:
                time.sleep(0.02)  # mostly it is answering, now and then it loads the model
            time.sleep(pause)
            if not driver.is_alive():
                break
            left -= 1
            victims = workers(address, "Answering") if replicas > 1 else []
            if victims and draw.random() < 0.6:
                draw.choice(victims).send_signal(signal.SIGKILL)
                deeds.append(f"worker at {_lines(out)}")
            else:
                driver.kill()
                deeds.append(f"driver at {_lines(out)}")
                killed = True
                break
        driver.join()
        if not killed:
            assert driver.exitcode == 1, f"status {driver.exitcode}; some lines cannot be answered, so 1 is expected"
            return f"{replicas} replicas: {', '.join(deeds) or 'over before'}"


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["specengine.cli.batch", "specengine.engine", "tests.batch.files"])
    draw, wrong = random.Random(arguments.seed), 0
    with tempfile.TemporaryDirectory() as name, cluster(max(REPLICAS)) as address:
        folder = Path(name)
        model = files.make_model(folder / "tiny")
        prompts = files.write(folder / "prompts.jsonl", files.lines(PROMPTS))
        whole = folder / "whole.jsonl"
        files.batch(prompts, whole, model, "--max-new-tokens", "60")
        for number in range(arguments.times):
            done = interrupted(folder, model, prompts, address, number, draw)
            out = folder / f"{number}.jsonl"
            same = out.read_bytes() == whole.read_bytes() and _lines(beside(out)) == PROMPTS + 3
            wrong += not same
            print(f"{number + 1}: {done}: {'the same bytes' if same else 'DIFFERENT'}", flush=True)
    print(f"{arguments.times} files, {wrong} differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
