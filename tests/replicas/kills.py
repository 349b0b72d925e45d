"""Kill workers and drivers of `specengine batch` at random moments; every file ends as one process would write it.

python -m tests.replicas.kills [--times 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from specengine.batch.spread import LineReplica
from tests.batch import files, kills
from tests.replicas.clusters import cluster, workers

REPLICAS = (1, 2, 4)
PROMPTS = 84


def interrupted(
    folder: Path, model: Path, prompts: Path, address: str, number: int, draw: random.Random
) -> str:
    """Write one file through one to three kills; returns what was done."""
    replicas = REPLICAS[number % len(REPLICAS)]
    out = folder / f"{number}.jsonl"
    more: tuple[str, ...] = ("--model", str(model), "--max-new-tokens", "60")
    if replicas > 1:
        more += ("--replicas", str(replicas), "--threads", "1", "--ray-address", address)
    left, deeds = draw.randint(1, 3), list[str]()
    while True:
        driver = kills.started(prompts, out, more)
        killed = False
        while driver.is_alive() and left:
            early, pause = draw.random() < 0.1, draw.uniform(0.0, 1.5)
            begun = kills.length(out)
            while driver.is_alive() and not early and kills.length(out) == begun:
                time.sleep(0.02)  # mostly it is answering, now and then it loads the model
            time.sleep(pause)
            if not driver.is_alive():
                break
            left -= 1
            victims = workers(address, LineReplica.__name__) if replicas > 1 else []
            if victims and draw.random() < 0.6:
                draw.choice(victims).send_signal(signal.SIGKILL)
                deeds.append(f"worker at {kills.length(out)}")
            else:
                driver.kill()
                deeds.append(f"driver at {kills.length(out)}")
                killed = True
                break
        if killed:
            driver.join()
        else:
            kills.ended(driver)
            return f"{replicas} replicas: {', '.join(deeds) or 'over before'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
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
            same = kills.is_same(out, whole)
            wrong += not same
            print(f"{number + 1}: {done}: {'the same bytes' if same else 'DIFFERENT'}", flush=True)
    print(f"{arguments.times} files, {wrong} differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
