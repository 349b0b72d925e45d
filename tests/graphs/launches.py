"""python -m tests.graphs.launches [--write]: kernels that a captured cycle launches, counted on the pretended device.

By policy the launches of root, level and the rest (verification, walk, commit) of a target of LAYERS layers behind an
EAGLE-3 head, and what a further layer adds; views and uninitialised memory do not count. With kernels an op that Triton
or CUDA serves counts as one, whatever is prepared for it, and its meaning runs in its place.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import Engine, ops, policies
from specengine.drafters.eagle import Eagle
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import _registry
from tests import toy
from tests.graphs import pretended
from tests.ops.backends import choose

TABLE = Path(__file__).with_name("launches.json")
NAMES = ("eagle", "talon", "salf", "chain")
WAYS = {"meanings": "reference", "kernels": "triton,cuda"}
SERVED = {
    "triton": (
        "add_rms_norm",
        "append_nodes",
        "best_candidates",
        "cached_attention",
        "choose_tokens",
        "compact_kv",
        "couple",
        "gather_rows",
        "rope_store",
        "silu_mul",
        "strict_cached_attention",
        "top_children",
        "top_entropy",
        "walk",
    ),
    "cuda": ("step_queues",),
}  # of what runs in captured cycles
LAYERS = 4
PARTS = ("root", "level", "finish")
GOALS = {"level": 40, "layer": 12}  # at most, with kernels

Counts = dict[str, dict[str, int]]


def stand_ins(backend: str) -> dict[str, Any]:
    def of(name: str) -> Any:
        def run(*given: Any) -> Any:
            if name != "best_candidates":
                return ops.by_meaning(ops.OPS[name], *given)
            limit, log_gate, bound, normalized = given[4:]
            numbers = {"limit": limit, "log_gate": log_gate, "bound": bound, "normalized": normalized}
            return ops.by_meaning(lambda: ops.best_candidates(*given[:4], **numbers))

        return run

    return {name: of(name) for name in SERVED[backend]} if backend in SERVED else ops.OPS


def counted(policy: str, layers: int = LAYERS, parts: tuple[str, ...] = PARTS) -> dict[str, int]:
    """Launches of each function of a cycle, by its capture."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as device:
        patch.setattr(_registry, "_loaded", stand_ins)
        device.enter_context(pretended.cuda())
        device.enter_context(torch.inference_mode())
        model = toy.tiny("llama", num_hidden_layers=layers)
        head = pretended.moved(toy.tiny_head(toy.head_config(3, model)))
        target = HuggingFaceTarget(pretended.moved(model), captured=True, merge=True)  # type: ignore[arg-type]
        engine = Engine(target, Eagle(head, target.lm), policies.make(policy))  # type: ignore[arg-type]
        driver = engine.drivers.own.captured
        assert driver is not None
        assert engine.drafter is not None
        target.want(engine.drafter.traits.features)
        driver.reserve(100)
        target.cache.length = engine.drafter.cache.length = 20
        engine.drafter.taken.fill_(1)
        for part in parts:
            function = getattr(driver, f"_{part}")
            function()  # what is made on first use is not part of a graph
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
            found[part] = sum(graph.launches.values())  # type: ignore[attr-defined]
    return found


def table(backend: str, names: tuple[str, ...] = NAMES) -> Counts:
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, backend)
        counts = {name: counted(name) for name in names}
        more = counted(names[0], LAYERS + 1, ("root", "finish"))["finish"] - counts[names[0]]["finish"]
        return counts | {"a layer": {"finish": more}}


def main() -> None:
    torch.set_num_threads(1)
    found = {way: table(backend) for way, backend in WAYS.items()}
    if "--write" in sys.argv[1:]:
        TABLE.write_text(json.dumps(found, indent=1) + "\n")
    print(" " * 20 + "".join(f"{part:>8}" for part in PARTS))
    for way, counts in found.items():
        for name, row in counts.items():
            print(f"{way:10}{name:10}" + "".join(f"{row.get(part, ''):>8}" for part in PARTS))
    print(f"goals with kernels: {', '.join(f'{most} a {part}' for part, most in GOALS.items())}")


if __name__ == "__main__":
    main()
