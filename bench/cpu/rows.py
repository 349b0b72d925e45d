"""Measure the cost of rows in every engine on this CPU: milliseconds of a forward, on one GGUF file.

Every engine runs in a process of its own and is asked in turn, round after round, so that load on the machine meets all
of them. ik_llama.cpp, llama.cpp and OpenVINO live in other environments:

    python -m bench.cpu.rows --file MODEL.gguf --python llama_cpp ENV/bin/python --python openvino ENV/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import provenance
from bench.cpu.peer import Peer
from specengine.checkpoints import embedded
from specengine.models.extension import VARIABLE, instruction_sets

SCRIPT = Path(__file__).with_name("engine.py")
ROWS = (1, 2, 4, 8, 16, 32, 64)
OTHERS = ("llama_cpp", "ik_llama_cpp", "openvino")
READING = "reading"
Record = dict[str, Any]


@dataclass
class Process:
    """An engine that answers how long a number of rows takes."""

    label: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    ms: dict[int, list[float]] = field(default_factory=dict)

    def start(self) -> Record:
        """Return what the engine says of itself. RuntimeError if it ends first."""
        self._peer = Peer(self.label, self.command, self.environment)
        return dict(self._peer.about)

    def measure(self, rows: int) -> None:
        self.ms.setdefault(rows, []).append(float(self._peer.ask(str(rows))))

    def stop(self) -> None:
        self._peer.stop()


def processes(args: argparse.Namespace) -> Iterator[Process]:
    """Yield the engines that were asked for: this one under each instruction set, then the others."""
    given = [
        str(args.file or embedded.gguf()),
        "--threads",
        str(args.threads),
        "--context",
        str(args.context),
    ]
    ours = [sys.executable, str(SCRIPT)]
    here = {
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    }
    yield Process(READING, [*ours, READING, *given], here)
    for numerics in args.numerics:
        for isa in args.isa or instruction_sets(numerics):
            options = {"ENGINE_OPTIONS": json.dumps({"numerics": numerics}), VARIABLE: isa}
            yield Process(
                f"specengine, {numerics}, {isa}", [*ours, "specengine", *given], here | options
            )
    for name, python in args.python:
        yield Process(name, [python, str(SCRIPT), name, *given])


def records(args: argparse.Namespace) -> Iterator[Record]:
    yield {
        "record": "settings",
        "file": Path(args.file or embedded.gguf()).name,
        "context": args.context,
    }
    running: list[tuple[Process, Record]] = []
    for process in processes(args):
        try:
            about = process.start()
        except RuntimeError as error:
            yield {"record": "skipped", "engine": process.label, "reason": str(error)}
            continue
        if "backend" in about and about in (
            other for _, other in running
        ):  # another name of the same instruction set
            process.stop()
        else:
            running.append((process, about))
    for _ in range(args.rounds):
        for process, _about in running:
            for rows in args.rows:
                process.measure(rows)
    read = next(process.ms for process, _ in running if process.label == READING)
    for process, about in running:
        yield {"record": "rows", "label": process.label} | about | summary(process.ms, read)
        process.stop()


def summary(ms: dict[int, list[float]], read: dict[int, list[float]]) -> Record:
    """Return medians in ms by rows, and medians of the ratios within a round: over one row, and over reading once."""
    once = read[min(read)]
    return {
        "ms": {str(rows): round(statistics.median(times), 3) for rows, times in ms.items()},
        "over_1_row": {str(rows): _ratio(times, ms[1]) for rows, times in ms.items()},
        "over_reading": _ratio(ms[1], once),
    }


def _ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)


def table(found: list[Record]) -> str:
    """Return the measured engines as a table in Markdown."""
    rows = [record for record in found if record["record"] == "rows"]
    counts = list(rows[0]["ms"]) if rows else []
    lines = [
        "| engine | 1 row, ms | over reading | "
        + " | ".join(f"{count} rows / 1" for count in counts[1:])
        + " |"
    ]
    lines.append("|---" * (len(counts) + 2) + "|")
    for record in rows:
        ratios = " | ".join(f"{record['over_1_row'][count]:.2f}" for count in counts[1:])
        lines.append(
            f"| {record['label']} | {record['ms']['1']:.2f} | {record['over_reading']:.2f} | {ratios} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.rows", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--file", type=Path, help="a GGUF file; default: the embedded model's")
    parser.add_argument(
        "--numerics", nargs="*", default=["integer", "bfloat16"], help="of this engine"
    )
    parser.add_argument(
        "--isa", nargs="+", help="instruction sets of this engine; default: all of this CPU"
    )
    parser.add_argument(
        "--python",
        nargs=2,
        action="append",
        default=[],
        metavar=("ENGINE", "PYTHON"),
        help=f"another engine and its Python: {', '.join(OTHERS)}",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--context", type=int, default=200, help="tokens before the rows")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a result file")
    args = parser.parse_args(arguments)
    args.rows = sorted({1, *args.rows})
    if unknown := {name for name, _ in args.python} - set(OTHERS):
        parser.error(f"--python: got {', '.join(sorted(unknown))}, accepted {', '.join(OTHERS)}")
    print(table(provenance.show(records(args), args.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
