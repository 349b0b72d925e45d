"""The cycles of the default engine over twelve prompts, to the bit; `python -m tests.golden.default_engine` compares.

With `--write` it records default_engine.npz instead, and default_engine.json says on which machine. The engine is the
embedded model with the head that ships for it, so another head or another default means another file; moving code does
not. Costs are published ones: nothing depends on measured time. What is learnt goes on from one prompt to the next,
texts are not kept (memory="off"): each prompt is drafted for by itself.

Bits depend on the instructions that compute them. So a process of its own runs the engine under ENVIRONMENT, which
names instructions that every x86-64 CPU with AVX2 has. Of the native forward they are then the same, but for the
log-probabilities of drafted tokens by ULPS; of transformers' modules, whose libraries choose by the CPU's vendor as
well, all are the same where `machine` and the device say so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from specengine import Engine
from specengine.benchmark.records import provenance

FILE = Path(__file__).with_suffix(".npz")
PROVENANCE = FILE.with_suffix(".json")
INSTRUCTIONS = "avx2"
ENVIRONMENT = {
    "SPECENGINE_CPU": INSTRUCTIONS,
    "ATEN_CPU_CAPABILITY": INSTRUCTIONS,
    "ONEDNN_MAX_CPU_ISA": INSTRUCTIONS.upper(),
    "MKL_CBWR": INSTRUCTIONS.upper(),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
COSTS = {"costs": "2-cores-amx"}
BACKENDS: dict[str, dict[str, Any]] = {
    "native": {"numerics": "bfloat16"},
    "huggingface": {"dtype": "float32"},
}
POLICIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "salf": {"policy": "salf/cpu"},
    "plain": {"policy": "plain"},
    "plain, rated": {"policy": "plain", "logprobs": 2},
}
TOKENS = {"native": 8, "huggingface": 4}  # of each answer
PROMPTS = (
    "The capital of France is",
    "One, two, three, four, one, two, three,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "Roses are red,",
    "Translate to German: good morning ->",
    '{"name": "Ada", "age": 36}\n{"name": "Bob", "age":',
    "Once upon a time there was a",
    "2, 4, 6, 8, 10,",
    "Water boils at",
    "- apples\n- pears\n- apples\n- pears\n-",
    "The quick brown fox jumps over the lazy dog. The quick brown",
    "A",
)
ULPS = 4  # between devices; one in 1,452 was seen to differ, by 3, on a CPU without AVX-512
TOLERANCE = 2e-4  # nats, between machines; MKL's other kernels were seen to differ by 4e-5


class Run(NamedTuple):
    backend: str
    policy: str

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.policy}"


RUNS = tuple(Run(backend, policy) for backend in BACKENDS for policy in POLICIES)
Arrays = dict[str, np.ndarray]


def machine() -> dict[str, str]:
    """Return what the bits of float32 products depend on, as far as a process can name it."""
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    )
    vendor = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "unknown"
    )
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "vendor": vendor,
    }


def recorded(engine: Engine, run: Run, prompts: list[list[int]]) -> Arrays:
    """Run all prompts and return the cycles, side by side.

    cycles     int32 [cycles, 6]: prompt, nodes verified, nodes drafted, draft passes, nodes accepted, tokens committed
    nodes      int32 [2, nodes]: tokens and parents of the verified trees
    log_probs  int32 [nodes]: the bits of their float32 log-probabilities, or with `logprobs` of the rated tokens
    path       int32: accepted nodes;  tokens  int32: committed tokens
    """
    cycles, nodes, bits, path, tokens = [], [], [], [], []
    for number, prompt in enumerate(prompts):
        stream = engine.stream(prompt, max_new_tokens=TOKENS[run.backend], **POLICIES[run.policy])
        for cycle in (piece.cycle for piece in stream):
            tree, size = cycle.tree, len(cycle.tree)
            counts = size, cycle.drafted, int(tree.passes), cycle.accepted, len(cycle.tokens)
            cycles.append([number, *counts])
            nodes.append(np.stack([tree.tokens[:size].numpy(), tree.parents[:size].numpy()]))
            if cycle.logprobs is None:
                bits.append(tree.log_probs[:size].numpy())
            else:
                rated = [
                    value
                    for row in cycle.logprobs
                    for value in (row.logprob, *(top[1] for top in row.top))
                ]
                bits.append(np.array(rated, np.float32))
            path += cycle.path
            tokens += cycle.tokens
    return {
        "cycles": np.array(cycles, np.int32),
        "nodes": np.concatenate(nodes, 1).astype(np.int32),
        "log_probs": np.concatenate(bits).astype(np.float32).view(np.int32),
        "path": np.array(path, np.int32),
        "tokens": np.array(tokens, np.int32),
    }


def record_all(prompts: list[list[int]]) -> tuple[Arrays, dict[str, Any]]:
    """Run all of RUNS in this process, whose environment is ENVIRONMENT; return arrays and provenance.

    prompts: as tokens; none are those of PROMPTS by the embedded model's tokenizer.
    """
    torch.set_num_threads(1)
    arrays: Arrays = {}
    for backend, options in BACKENDS.items():
        engine = Engine.from_pretrained(
            policy="auto", policy_options=COSTS, backend=backend, memory="off", **options
        )
        prompts = prompts or [engine.tokenizer(text)["input_ids"] for text in PROMPTS]
        for run in (run for run in RUNS if run.backend == backend):
            arrays |= {
                f"{run.name}: {key}": values
                for key, values in recorded(engine, run, prompts).items()
            }
    origin = provenance("python -m tests.golden.default_engine", ["--write"])
    return arrays, {**origin, "environment": ENVIRONMENT, "machine": machine(), "prompts": prompts}


def in_own_process(prompts: list[list[int]]) -> tuple[Arrays, dict[str, Any]]:
    """Run `record_all` in a process of its own under ENVIRONMENT."""
    cache = {name: value for name, value in os.environ.items() if name == "SPECENGINE_CACHE"}
    others = {
        name: value for name, value in os.environ.items() if not name.startswith("SPECENGINE_")
    }
    with tempfile.TemporaryDirectory() as folder:
        arrays, origin = Path(folder) / "arrays.npz", Path(folder) / "origin.json"
        arguments = ["--into", str(arrays), str(origin), "--prompts", json.dumps(prompts)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.golden.default_engine", *arguments],
            env=others | cache | ENVIRONMENT,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the engine could not be recorded:\n{done.stderr[-4000:]}")
        return load(arrays), json.loads(origin.read_text())


def load(file: Path = FILE) -> Arrays:
    with np.load(file) as arrays:
        return dict(arrays)


def differences(recorded_now: Arrays, known: Arrays, *, same_machine: bool) -> list[str]:
    """Return a line for each array that is another one.

    On another machine log-probabilities may differ: those of transformers' modules by TOLERANCE, native ones by ULPS.
    """
    lines = [
        f"{name}: recorded on one side only" for name in sorted(recorded_now.keys() ^ known.keys())
    ]
    for name in sorted(recorded_now.keys() & known.keys()):
        now, before = recorded_now[name], known[name]
        if now.shape != before.shape:
            lines.append(f"{name}: shape {now.shape}, was {before.shape}")
            continue
        differs = now != before
        if name.endswith(": log_probs") and not same_machine:
            differs = (
                ~np.isclose(now.view(np.float32), before.view(np.float32), rtol=0, atol=TOLERANCE)
                if name.startswith("huggingface")
                else abs(now.astype(np.int64) - before) > ULPS
            )
        if differs.any():
            first = tuple(int(i) for i in np.argwhere(differs)[0])
            values = f"{now[first]}, was {before[first]}"
            lines.append(
                f"{name}: {int(differs.sum())} of {differs.size} differ, first at {first}: {values}"
            )
    return lines


def compared() -> list[str]:
    """Record anew and return the differences from FILE."""
    origin = json.loads(PROVENANCE.read_text())
    arrays, now = in_own_process(origin["prompts"])
    # processors of one vendor have other instructions, by which MKL chooses
    same = all(now[key] == origin[key] for key in ("machine", "device"))
    return differences(arrays, load(), same_machine=same)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="record the file anew")
    parser.add_argument("--into", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=json.loads, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into or options.write:
        arrays, origin = record_all(options.prompts) if options.into else in_own_process([])
        file, place = options.into or (FILE, PROVENANCE)
        np.savez_compressed(file, **arrays)
        place.write_text(json.dumps(origin, indent=1) + "\n")
        nodes = sum(values.shape[1] for name, values in arrays.items() if name.endswith(": nodes"))
        print(f"{len(RUNS)} runs, {nodes} nodes, {file.stat().st_size} bytes")
        return
    if lines := compared():
        sys.exit("\n".join(lines))
    print("the same")


if __name__ == "__main__":
    main()
