"""python -m tests.fuzz [--cases N] [--seed N] [--kind KIND]: spoiled configs, prompts and options, on tiny models.

Every case is answered, as plain decoding would, or refused by an error of specengine that is one line on the command
line. Anything else is listed, with exit status 1.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from tests.fuzz.cases import KINDS
from tests.fuzz.running import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report = fuzz(Path(folder), given.cases, given.seed, given.kind)
    print("\n".join([*report.lines(), *report.findings]))
    return 1 if report.findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
