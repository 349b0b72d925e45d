"""A forward's milliseconds by rows of the tree, next to reading the same weights once; by instruction set."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench import workloads
from bench.cpu.processes import last_line
from bench.cpu.ways import Given, Unavailable
from specengine.models import Target
from specengine.ops.tree import TokenTree

CONTEXT = 200  # tokens in front of the tree
ROWS = (1, 8, 16, 32, 64)
ISA_ROWS = (1, 8, 16)
ISAS = ("avx512bf16", "avx512", "avx2", "portable")
BURST = 5  # calls timed one after the other, behind one that is not, as in decoding

Key = TypeVar("Key", bound=Hashable)
Record = dict[str, Any]


def forward(given: Given, kinds: list[str], rows: list[int], rounds: int) -> Iterator[Record]:
    """Yield a record per kind. rows: ascending from 1. Ratios are medians of the ratios within a round."""
    targets, reads = {}, {}
    for kind in kinds:
        try:
            targets[kind] = _prepared(given, kind, rows[-1])
        except Unavailable as error:
            yield {"record": "skipped", "part": "forward", "way": kind, "reason": str(error)}
            continue
        reads[kind] = torch.ones(given.weight_bytes(kind) // 8, dtype=torch.int64)
    trees = {size: tree(size, _vocabulary(targets)) for size in rows}
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for kind, target in targets.items():
        calls[kind, 0] = reads[kind].sum
        calls |= {
            (kind, size): lambda target=target, size=size: target.verify(trees[size])  # type: ignore[misc]
            for size in rows
        }
    ms = in_bursts(calls, rounds)
    for kind, target in targets.items():
        record = {
            "record": "forward",
            "way": kind,
            "dtype": given.dtype,
            "context": CONTEXT,
            "weights_mb": round(reads[kind].nbytes / 1e6, 1),
            "read_ms": _median(ms[kind, 0]),
            "ms": {str(size): _median(ms[kind, size]) for size in rows},
            "over_read": {str(size): ratio(ms[kind, size], ms[kind, 0]) for size in rows},
            "over_1_row": {str(size): ratio(ms[kind, size], ms[kind, 1]) for size in rows},
            "speedup_over_huggingface": {
                str(size): ratio(ms["huggingface", size], ms[kind, size])
                for size in rows
                if "huggingface" in targets
            },
            "backend": target.backend,
        }
        yield record | {"same_bits": same_bits(target, trees[rows[-1]])}


def isa(given: Given, arguments: list[str], rounds: int) -> Iterator[Record]:
    """Measure each instruction set in a process of its own, with both backends; `arguments` name the model.

    The Hugging Face path keeps all that this CPU has, also where the other is held to less.
    """
    for name in ISAS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "forward.jsonl"
            command = [
                sys.executable,
                "-m",
                "bench.cpu",
                "--part",
                "forward",
                "--way",
                "huggingface",
                "--way",
                "native",
            ]
            command += [
                "--rows",
                *map(str, ISA_ROWS),
                "--rounds",
                str(rounds),
                "--out",
                str(out),
                *arguments,
            ]
            environment = {**os.environ, "SPECENGINE_CPU": name}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            records = (
                [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            )
        skipped = [record["reason"] for record in records if record["record"] == "skipped"]
        if done.returncode or skipped:
            reason = skipped[0] if skipped else last_line(done.stderr)
            yield {"record": "skipped", "part": "isa", "way": name, "reason": reason}
            continue
        ways = {record["way"]: record for record in records if record["record"] == "forward"}
        yield {
            "record": "isa",
            "isa": name,
            "dtype": given.dtype,
            "ms": {way: record["ms"] for way, record in ways.items()},
            "speedup_over_huggingface": ways["native"]["speedup_over_huggingface"],
            "same_bits": ways["native"]["same_bits"],
            "backend": ways["native"]["backend"],
        }


@torch.inference_mode()
def in_bursts(calls: dict[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[float]]:
    """Return milliseconds of each call, a burst's median per round; the calls take turns in a round."""
    found: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            call()
            times = []
            for _ in range(BURST):
                began = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - began))
            found[key].append(statistics.median(times))
    return found


def ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)


def tree(size: int, vocabulary: int) -> TokenTree:
    """Return a tree in which every node has two children; tokens differ as far as the vocabulary allows."""
    grown = TokenTree.root(7 % vocabulary, size)
    for node in range(1, size):
        token = torch.tensor([(7 + 31 * node) % vocabulary])
        grown.add(torch.tensor([(node - 1) // 2]), token, torch.tensor([-1.0]))
    return grown


@torch.inference_mode()
def same_bits(target: Target, grown: TokenTree) -> bool:
    """Return whether the logits down the tree's leftmost path are bit for bit those of plain decoding."""
    path = [0]
    while 2 * path[-1] + 1 < len(grown):
        path.append(2 * path[-1] + 1)
    in_tree, before = target.verify(grown)[0][path].clone(), list(target.tokens)
    alone = []
    for token in grown.tokens[path].tolist():
        step = TokenTree.root(token)
        alone.append(target.verify(step)[0].clone())
        target.commit(step, [0])
    target.prefill(before)
    return torch.equal(in_tree, torch.cat(alone))


def _prepared(given: Given, kind: str, most: int) -> Target:
    # outside inference mode, which would stick to the weights that other parts share
    engine = given.engine(kind)
    ids = given.engine("huggingface").tokenizer(workloads.BUILT_IN["edit"])["input_ids"]
    target = engine.target
    target.reset()
    target.reserve(CONTEXT + most, most)
    target.want(())
    with torch.inference_mode():
        target.prefill((ids * (CONTEXT // len(ids) + 1))[:CONTEXT])
    return target


def _vocabulary(targets: dict[str, Target]) -> int:
    return min((target.vocab_size for target in targets.values()), default=1)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)
