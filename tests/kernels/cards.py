"""python -m tests.kernels.cards [--write]: what every shipped program needs on each card, compiled without one.

Kernels are compiled by the installed Triton, csrc/*.cu by nvcc. cards.json holds registers of a thread, bytes of its
stack, spilled words (instructions that touch it; of AMD's and nvcc's programs as their compilers count) and shared
bytes of a program, by version of the compiler and card. What it holds may only fall; --write takes what is found.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("cards.json")
CACHE = ROOT / "build" / "triton"  # of all tests that compile ahead of time, whichever runs first
ROOM = {  # shared bytes that a program can have; sm_86 and sm_89: A10, A40, RTX 3090 and 4090, L4, L40S
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,  # MI300
}
# with four heads in a group: 16, 32, 64 rows and more, one for each of the shipped tiles
NODES = 4, 8, 16, 64
ATTENTION: list[list[Any]] = [["attention", nodes, 4, 128, "bfloat16"] for nodes in NODES]
REST: list[list[Any]] = [
    ["attention", 64, 3, 64, "float16"],
    ["attention", 64, 4, 128, "float32", 1],
    ["attention", 64, 4, 256, "bfloat16"],
    ["attention", 1, 4, 128, "bfloat16", None, None, 4352, 8],
    ["attention", 64, 4, 128, "bfloat16", None, None, 4352, 8],
    ["attention", 512, 4, 128, "bfloat16", None, None, 4352, 1, True],
    ["strict", 4, 128, "bfloat16"],
    ["strict", 3, 64, "float16"],
    ["strict", 4, 128, "float32"],
    ["selection", 10, 128256, 60, "bfloat16"],
    ["selection", 64, 248320, 256, "bfloat16"],
    ["selection", 1, 49152, 8, "float32"],
    ["children", 10, 128256, 10, "bfloat16"],
    ["children", 64, 262144, 256, "float32"],
    ["children", 1, 49152, 1, "float16"],
    ["entropy", 10, 128256, 1000, False, "bfloat16"],
    ["entropy", 64, 262144, 1000, True, "float32"],
    ["entropy", 1, 49152, 1000, False, "float16"],
    ["entropy", 16, 128256, 128256, False, "bfloat16"],
    ["compaction", 32, 8, 128, "bfloat16"],
    ["compaction", 30, 3, 64, "float32"],
    ["choice", 64, 128256, False, "bfloat16"],
    ["choice", 64, 128256, True, "bfloat16"],
    ["choice", 1, 49152, True, "float32"],
    ["choice", 1, 49152, False, "float32"],
    ["couple", 10, 128256, "bfloat16", False],
    ["couple", 16, 12288, "float32", True],
    ["walk", 64],
    ["walk", 1024],
    ["record", 64, 14, 64],
    ["record", 256, 60, 256],
    ["append", 60, 256],
    ["append", 1000, 1024],
    ["gather", 10, 4096, "bfloat16"],
    ["level", 8, 833],
    ["level", 64, 1024, True],
    ["enter", 8, 4096, "bfloat16"],
    ["enter", 8, 576, "float32"],
    ["rope", 64, 4, 128, "bfloat16"],
    ["rope", 16, 3, 64, "float32"],
    ["rope", 64, 4, 128, "bfloat16", "stepwise"],
    ["rope", 64, 4, 128, "bfloat16", "normed"],
    ["rope", 8, 4, 128, "bfloat16", "texts"],
    ["norm", 64, 4096, "bfloat16"],
    ["norm", 64, 4096, "bfloat16", False],
    ["norm", 64, 576, "float32"],
    ["norm", 64, 16384, "bfloat16"],
    ["states", 36, 16, 32, 128, 128, "delta"],  # Qwen3-Next
    ["states", 36, 16, 32, 128, 128, "delta text"],
    ["states", 36, 16, 32, 128, 128, "fold"],
    ["states", 44, 1, 24, 256, 64, "sum"],  # Falcon-H1
    ["states", 44, 1, 24, 256, 64, "sum text"],
    ["states", 44, 1, 24, 256, 64, "fold"],
    ["convolution", 64, 8192, 4, "bfloat16", True],
    ["convolution", 64, 2048, 3, "bfloat16", False],
    ["gate", 64, 14336, "bfloat16"],
    ["gate", 64, 1536, "float32"],
    *(
        ["packed", rows, 4096, 4096, kind, "bfloat16"]
        for kind in ("rows", "q8_0", "f8_e4m3", "q6_k", "q4_0", "q4_k")
        for rows in (1, 32, 64)
    ),
    ["packed", 64, 4096, 4096, "rows", "float16", 1],
    ["packed", 64, 1024, 4096, "q8_0", "float32"],
    ["packed", 64, 1024, 4096, "q4_k", "float32"],
]
# other tiles; 3.7 spills a little
WIDE = [["attention", nodes, 4, 256, "bfloat16"] for nodes in NODES[:2]]
SHIPPED = ATTENTION + REST + WIDE

Needs = dict[str, list[int]]


def compiled(
    cases: list[list[Any]], card: str = "sm_90", cache: Path = CACHE
) -> list[dict[str, Any]]:
    """Run aot.py in another process and return its output: this one interprets kernels, or has another device."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [
        sys.executable,
        "-m",
        "tests.kernels.aot",
        "--card",
        card,
        *(json.dumps(case) for case in cases),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def needs(programs: list[dict[str, Any]]) -> Needs:
    """Return what each program needs, by kernel and case; of several launches the most."""
    found: Needs = {}
    for program in programs:
        name = " ".join(map(str, (program["kernel"], *program["case"])))
        numbers = [program[column] for column in ("registers", "stack", "spills", "shared")]
        found[name] = [max(pair) for pair in zip(found.get(name, numbers), numbers, strict=True)]
    return found


def nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def nvcc_version() -> str:
    done = subprocess.run([str(nvcc()), "--version"], capture_output=True, text=True, check=True)
    return f"nvcc {re.search(r'release ([0-9.]+)', done.stdout)[1]}"  # type: ignore[index]


def needs_of_library(card: str) -> Needs:
    """Return what the kernels of csrc/*.cu need on a card of NVIDIA."""
    found = {}
    for source in sorted((ROOT / "csrc").glob("*.cu")):
        command = [
            str(nvcc()),
            "-O3",
            "-std=c++17",
            "-Icsrc",
            "-cubin",
            f"-arch={card}",
            "-Xptxas",
            "-v",
        ]
        done = subprocess.run(
            [*command, str(source), "-o", os.devnull],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for name, text in re.findall(
            r"entry function '(\w+)'(.*?Used [^\n]*)", done.stderr, re.DOTALL
        ):
            numbers = (
                r"Used (\d+) registers",
                r"(\d+) bytes stack",
                r"(\d+) bytes spill stores",
                r"(\d+) bytes smem",
            )
            matches = [re.search(number, text) for number in numbers]
            found[f"{name} {source.name}"] = [int(match[1]) if match else 0 for match in matches]
    return found


def more(found: Needs, held: Needs, room: int) -> list[str]:
    """Return what does not fit, what the table does not have, and what needs more than it says."""
    faults = [
        f"{name}: {numbers[3]} of {room} shared bytes"
        for name, numbers in found.items()
        if numbers[3] > room
    ]
    if held:
        faults += [
            f"{name}: not in the table (python -m tests.kernels.cards --write)"
            for name in found.keys() - held
        ]
        faults += [
            f"{name}: {numbers} instead of {held[name]}"
            for name, numbers in found.items()
            if name in held
            and any(one > other for one, other in zip(numbers, held[name], strict=True))
        ]
    return faults


def table() -> dict[str, dict[str, Needs]]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def main() -> None:
    import triton  # not at import: tests import this where Triton interprets

    whole = table()
    versions = {
        f"triton {'.'.join(triton.__version__.split('.')[:2])}": lambda card: needs(
            compiled(SHIPPED, card)
        )
    }
    if nvcc():
        versions[nvcc_version()] = needs_of_library
    for version, found_on in versions.items():
        for card, room in ROOM.items():
            if found_on is needs_of_library and not card.startswith("sm_"):
                continue
            found = found_on(card)
            for fault in more(found, whole.get(version, {}).get(card, {}), room):
                print(f"{version}, {card}: {fault}", flush=True)
            whole.setdefault(version, {})[card] = dict(sorted(found.items()))
    if "--write" in sys.argv[1:]:
        text = json.dumps(whole, indent=1)
        TABLE.write_text(
            re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3, \4]", text) + "\n"
        )


if __name__ == "__main__":
    main()
