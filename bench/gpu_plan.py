"""All that a CUDA device is to be asked next, in parts of less than nine minutes, the most telling one first.

Each step has a time limit. One that is cut off leaves what it has measured in a file that ends in .rows; the same
command then goes on with the steps that are not done, and bench.cycles with the records that it does not have. At its
end it lists the files to commit, and what they feed.

    make bench-gpu-plan                            all parts, 27 minutes at most
    make bench-gpu-plan-cycles RESULTS=FOLDER      one part, where a device is lent for ten minutes
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
GRACE = 20.0  # seconds between the interrupt of a step and its end
ROWS = ".rows"  # as in bench.provenance, which needs torch
GPU_PAGE = "docs/guide/gpu.md"
MODEL, PARTS_OF_MODEL, LARGE = (
    Path("build/smollm2-135m-instruct"),
    Path("build/parts"),
    Path("build/8b"),
)
KERNELS_ALONE = {"SPECENGINE_BACKEND": "triton,cuda,cpp"}  # without trials


class Step(NamedTuple):
    """One command of the plan.

    module   run by `python -m`, with `arguments`, in which {results} is the folder of results
    seconds  that it may take; what a step leaves is given to the next ones of its part
    result   file that says that it is done, in the folder of results unless it has a folder of its own
    feeds    the page that its result feeds, and words of the line there; None where it is only a means
    needs    path without which it is left out
    """

    module: str
    arguments: str
    seconds: int
    result: str
    feeds: tuple[str, str] | None = None
    needs: Path | None = None


def _ways(*policies: str) -> str:
    """Return the arguments that run these policies as graphs alone."""
    named = " ".join(f"--policy {policy} --skip {policy}" for policy in policies)
    return f"--device cuda --ours {named} --per-set 3 --rounds 2"


_OF_8B = f"--model {LARGE} --draft {LARGE}/head"
PARTS: dict[str, tuple[Step, ...]] = {
    "cycles": (
        Step(
            "bench.cycles",
            "--device cuda --shape 8b --out {results}/cycles-8b-gpu.jsonl",
            380,
            "cycles-8b-gpu.jsonl",
            (GPU_PAGE, "The first token comes late"),
        ),
        Step(
            "bench.cycles",
            "--device cuda --shape 135m --variants base --policy auto --policy plain "
            "--out {results}/cycles-135m-gpu.jsonl",
            80,
            "cycles-135m-gpu.jsonl",
            (GPU_PAGE, "whose passes are too short for a GPU"),
        ),
    ),
    "tests": (
        Step(
            "pytest",
            "-m gpu --most-seconds 300 --continue-on-collection-errors -q "
            "--junitxml={results}/tests-gpu.xml tests/kernels tests/graphs tests/cuda",
            330,
            "tests-gpu.xml",
            (GPU_PAGE, "The last run of the device tests"),
        ),
    ),
    "answers": (
        Step(
            "bench.offline",
            f"join {PARTS_OF_MODEL} {MODEL}",
            20,
            f"{MODEL}/config.json",
            None,
            PARTS_OF_MODEL,
        ),
        Step(
            "research.inflate",
            f"--model {MODEL} --shape 8b --device cuda --out {LARGE}",
            110,
            f"{LARGE}/provenance.json",
            None,
            MODEL / "config.json",
        ),
        Step(
            "bench.graphs",
            f"{_OF_8B} {_ways('auto', 'eagle')} --out {{results}}/graphs-8b-gpu.jsonl",
            140,
            "graphs-8b-gpu.jsonl",
            (GPU_PAGE, "drawn: device graphs-8b-gpu.jsonl"),
            LARGE / "provenance.json",
        ),
        Step(
            "bench.graphs",
            f"{_OF_8B} {_ways('talon', 'salf', 'c2t', 'dynatree', 'ltd')} --out {{results}}/graphs-8b-papers-gpu.jsonl",
            170,
            "graphs-8b-papers-gpu.jsonl",
            (GPU_PAGE, "First figures"),
            LARGE / "provenance.json",
        ),
        Step(
            "bench.graphs",
            f"--model {LARGE} --draft recycling {_ways('auto')} --out {{results}}/graphs-8b-recycling-gpu.jsonl",
            70,
            "graphs-8b-recycling-gpu.jsonl",
            (GPU_PAGE, "First figures"),
            LARGE / "provenance.json",
        ),
    ),
    "kernels": (
        Step(
            "bench.tree_construction",
            "--device cuda --alphas 1.35 --parents 10 --out {results}/tree-construction-gpu.jsonl",
            90,
            "tree-construction-gpu.jsonl",
            ("docs/results/policies.md", "A GPU has not been measured"),
        ),
        Step(
            "bench.kernels",
            "--quick --out {results}/kernels-quick-gpu.jsonl",
            150,
            "kernels-quick-gpu.jsonl",
            (GPU_PAGE, "drawn: device_kernels kernels-quick-gpu.jsonl"),
        ),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_plan", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="repeatable; default: all")
    parser.add_argument("--results", type=Path, default=ROOT / "build/results", metavar="FOLDER")
    parser.add_argument("--check", action="store_true", help="only say whether there is a device")
    args = parser.parse_args(arguments)
    if not has_device():
        print("bench.gpu_plan needs a CUDA device, and torch finds none here.", file=sys.stderr)
        return 1
    if args.check:
        return 0
    results = args.results.resolve()  # steps run in the checkout
    results.mkdir(parents=True, exist_ok=True)
    states = [line for part in args.part or PARTS for line in run_part(PARTS[part], results)]
    print(*states, "", *to_commit(results), sep="\n")
    return 0


def has_device() -> bool:
    """Return whether torch is there and finds a CUDA device."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def run_part(steps: tuple[Step, ...], results: Path) -> Iterator[str]:
    """Run the steps of a part that are not done; yield what became of each."""
    began, allowed = time.monotonic(), 0
    for step in steps:
        allowed += step.seconds
        name = f"{step.module}, {step.result}"
        if place(step, results).exists():
            yield f"{name}: done before"
        elif step.needs is not None and not (ROOT / step.needs).exists():
            yield f"{name}: left out, as {step.needs} is not there"
        else:
            print(f"bench.gpu_plan: {name}", file=sys.stderr, flush=True)
            yield f"{name}: {run(step, results, allowed - (time.monotonic() - began))}"


def place(step: Step, results: Path) -> Path:
    """Return where the file will stand that says that the step is done."""
    return ROOT / step.result if "/" in step.result else results / step.result


def run(step: Step, results: Path, seconds: float) -> str:
    """Run a step for at most so many seconds, and return what became of it."""
    words = [word.format(results=results) for word in step.arguments.split()]
    command = [sys.executable, "-m", step.module, *words]
    if step.module == "pytest" and importlib.util.find_spec("xdist") is not None:
        command += ["-n", "8", "--dist", "worksteal"]
    kernels_alone = KERNELS_ALONE if step.module in ("bench.graphs", "bench.cycles") else {}
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | kernels_alone, start_new_session=True
    ) as process:
        try:
            status = process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            end(process)
            return f"cut off after {seconds:.0f} s"
        except BaseException:
            end(process)
            raise
    return "done" if not status else f"ended with status {status}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a step and what it has started, and end what is still there after GRACE."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def to_commit(results: Path) -> Iterator[str]:
    """Yield the files that are there, and the lines of the documentation that they feed."""
    yield f"To commit, from {results} to bench/results, then `python -m docs.build`:"
    for step in (step for steps in PARTS.values() for step in steps):
        if step.feeds is None:
            continue
        page, words = step.feeds
        file = place(step, results)
        if not file.exists():
            cut_off = file.with_suffix(ROWS)
            yield f"- {step.result}: {f'cut off, in {cut_off.name}' if cut_off.exists() else 'not there'}"
        elif file.suffix == ".xml":
            yield f"- a line for tests-gpu.jsonl: {tests_record(file)}: {page}, {words!r}"
        else:
            yield f"- {step.result}: {page}, {words!r}"


def tests_record(file: Path) -> str:
    """Return the counts of a run of the tests as a record, without the number of the run and its device."""
    suites = ElementTree.parse(file).iter("testsuite")
    counts = [
        [int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")]
        for suite in suites
    ]
    tests, skipped, failures, errors = (sum(column) for column in zip(*counts, strict=True))
    failed = failures + errors
    passed = tests - skipped - failed
    return json.dumps({"record": "tests", "passed": passed, "failed": failed, "skipped": skipped})


if __name__ == "__main__":
    sys.exit(main())
