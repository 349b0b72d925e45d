"""python -m tests.fuzz [--cases N] [--seed N] [--kind KIND ...] [--case NAME]: what users do wrong, on tiny models.

Spoiled configs, prompts and options; loaded models that change beside an engine, settings of the process, weights that
are no plain tensors, and folders with other files in them. Every case is answered, as plain decoding by the model
would, or refused by an error of specengine that is one line on the command line. Anything else is listed, the end of
the process included, with exit status 1; `--case` runs one of them again.
"""

from __future__ import annotations

import argparse

from tests.fuzz.cases import KINDS
from tests.fuzz.running import Report, fuzz
from tests.fuzz.workers import worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="again for more kinds")
    parser.add_argument("--case", help="one alone, by its name: SEED/KIND/NUMBER")
    given = parser.parse_args()
    with worker() as run:
        if given.case:
            report = Report()
            report.count(given.case.split("/")[1], given.case, run(given.case))
        else:
            report = fuzz(run, given.cases, given.seed, given.kind or tuple(KINDS))
    print("\n".join([*report.lines(), *report.findings]))
    return 1 if report.findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
