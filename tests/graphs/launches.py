"""python -m tests.graphs.launches [--write]: launches and waits of captured cycles, counted on the pretended device.

Launches: by policy those of root, level and the rest (verification, walk, commit) of a bfloat16 target of LAYERS layers
behind an EAGLE-3 head, and those that a further layer adds; `lanes` has those of a plain row of each of so many texts,
`trees of lanes` those of TREE_ROWS rows, and `a layer of` these what a layer adds; `auto of lanes` has those of cycles
of TEXTS texts, and `chains of lanes` how many of them wait for each other, as texts have branches of their own. Views
and uninitialised memory do not count. With kernels, the meaning of a served op runs in its place, and as many launches
count as its launcher makes for the same arguments: kernels, and torch's operations that prepare them. `ops` has these,
the most of a call.

Prompts: what the host launches to run PROMPT, eagerly and as a tree.

Waits: how often the host waits for the device in the cycles of an answer behind the first one, beside the number of
these cycles and of their draft passes, by policy, draft and sampling.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specengine import Engine, ops, policies
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.recycling import Recycling
from specengine.engine import Pool
from specengine.engine.joined import CapturedLanes
from specengine.models.huggingface import HuggingFaceTarget, ModuleLane
from specengine.ops import _registry, cuda
from specengine.request.sampling import Sampler
from tests import toy
from tests.graphs import pretended
from tests.ops.backends import choose

TABLE = Path(__file__).with_name("launches.json")
NAMES = ("auto", "eagle", "talon", "salf", "chain")
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
        "gather_norms",
        "gather_rows",
        "lanes_attention",
        "level_rows",
        "record_walk",
        "rope_store",
        "silu_mul",
        "strict_cached_attention",
        "top_children",
        "top_entropy",
        "walk",
    ),
    "cuda": (
        "count_outcomes",
        "extract",
        "grow_likely",
        "keep_likely",
        "start_search",
        "step_queues",
    ),
}  # of what runs in captured cycles
LAYERS = 4
TEXTS = 8  # of a pool
TREE_ROWS = 16  # of each
MEMORY = 1 << 30  # bytes, of all caches
PARTS = ("first", "root", "level", "finish")
GOALS = {"auto first": 2, "auto level": 18, "layer": 10, "auto finish without layers": 26}
REACHED = tuple(GOALS)  # at most, with kernels

PROMPT = [*range(40, 56), *range(40, 50)]
TOKENS = 24  # of an answer whose waits are counted
DRAFTS = ("head", "recycling")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "top-p": {"temperature": 0.6, "top_p": 0.9, "seed": 5},
}

Counts = dict[str, dict[str, int]]


# ---- what a served op launches


class Operations(TorchDispatchMode):
    """Counts what a device would launch for the operations of torch that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        inside = {pretended.address(part) for part in pretended.of_class(Tensor, (args, kwargs))}
        made = pretended.of_class(Tensor, found)
        views = (
            made
            and not func._schema.is_mutable
            and all(pretended.address(part) in inside for part in made)
        )
        if func.overloadpacket.__name__ not in pretended.UNWRITTEN and not views:
            self.count += 1
        return found


class Kernel:
    """Stands in for a Triton kernel."""

    def __init__(self, launched: Callable[..., None]) -> None:
        self.launched = launched

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launched


@contextmanager
def launchers() -> Iterator[Callable[[str, tuple[Any, ...]], int]]:
    """Yield a function that returns how many launches an op's launcher makes for these arguments, on the host."""
    triton: Any = _registry._LOADERS["triton"]()
    launched = 0

    def launch(*_: Any, **__: Any) -> None:
        nonlocal launched
        launched += 1

    def count(name: str, given: tuple[Any, ...]) -> int:
        nonlocal launched
        launched = 0
        module = cuda if name in SERVED["cuda"] else triton
        with Operations() as operations:
            getattr(module, name)(*given)
        return launched + operations.count

    with pytest.MonkeyPatch.context() as patch:
        for module in (part for part in vars(triton).values() if isinstance(part, ModuleType)):
            if module.__name__.startswith("specengine_kernels."):
                for name in [name for name, part in vars(module).items() if hasattr(part, "fn")]:
                    patch.setattr(module, name, Kernel(launch))
        patch.setattr(cuda, "launch", launch)
        patch.setattr(cuda, "top_children", triton.top_children)
        yield count


# ---- launches of a cycle


def rows_first(found: Tensor) -> Tensor:
    """Return the same numbers, [heads, rows, channels], of which those of a row are next to each other."""
    return found.transpose(0, 1).contiguous().transpose(0, 1)


def in_place(found: ops.Nodes, frontier: ops.Nodes) -> ops.Nodes:
    """Return the nodes where the kernel puts them, as the op has it on a device."""
    if not 1 < len(frontier.ids) == len(found.ids):
        return found
    for into, values in zip(frontier, found, strict=True):
        into.copy_(values)
    return frontier


class StandIns:
    """Meanings in the place of served ops. more: launches while capturing beyond one a call; most: of a call, by op."""

    def __init__(self, count: Callable[[str, tuple[Any, ...]], int]) -> None:
        self.count, self.more, self.most = count, 0, dict[str, int]()

    def loaded(self, backend: str) -> dict[str, Any]:
        return {name: self._of(name) for name in SERVED[backend]} if backend in SERVED else ops.OPS

    def _of(self, name: str) -> Any:
        def run(*given: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                launches = pretended.Branching.capturing.weight = self.count(name, given)
                self.more += launches - 1
                self.most[name] = max(self.most.get(name, 0), launches)
            if name != "best_candidates":
                found = ops.by_meaning(ops.OPS[name], *given)
                if name == "grow_likely":
                    return in_place(found, given[2])
                return rows_first(found) if name.endswith("attention") else found
            limit, log_gate, bound, normalized = given[4:]
            numbers = {
                "limit": limit,
                "log_gate": log_gate,
                "bound": bound,
                "normalized": normalized,
            }
            return ops.by_meaning(lambda: ops.best_candidates(*given[:4], **numbers))

        return run


def counted(
    policy: str,
    most: dict[str, int],
    layers: int = LAYERS,
    parts: tuple[str, ...] = PARTS[1:],
    texts: int = 1,
    chains: dict[str, int] | None = None,
) -> dict[str, int]:
    """Launches of each function of a cycle, by its capture; most: gets those of a call, by op; texts: of a pool;
    chains: gets how many wait for each other."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as device:
        stand_ins = StandIns(device.enter_context(launchers()))
        patch.setattr(_registry, "_loaded", stand_ins.loaded)
        device.enter_context(pretended.cuda())
        device.enter_context(torch.inference_mode())
        model = toy.tiny("llama", num_hidden_layers=layers).bfloat16()
        head = pretended.moved(toy.tiny_head(toy.head_config(3, model)).bfloat16())
        target = HuggingFaceTarget(pretended.moved(model), captured=True, merge=True)  # type: ignore[arg-type]
        engine = Engine(target, EagleDraft(head, target.lm), policies.make(policy))  # type: ignore[arg-type]
        engines = [engine] if texts == 1 else Pool(engine, texts, MEMORY).engines
        for one in engines:
            one.target.want(one.drafter.traits.features)  # type: ignore[union-attr]
            one.drivers.own.captured.reserve(100)  # type: ignore[union-attr]
            one.target.cache.length = one.drafter.cache.length = 20  # type: ignore[union-attr]
            one.drafter.taken.fill_(1)  # type: ignore[union-attr]
        driver = engines[0].drivers.own.captured
        assert driver is not None
        if driver.joined is not None:
            driver = driver.joined
            driver.locate()
        for part in parts:
            function = getattr(driver, f"run_{part}")
            function()  # what is made on first use is not part of a graph
            stand_ins.more = 0
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
            found[part] = sum(graph.launches.values()) + stand_ins.more  # type: ignore[attr-defined]
            if chains is not None:
                chains[part] = graph.chain  # type: ignore[attr-defined]
    for name, count in stand_ins.most.items():
        most[name] = max(most.get(name, 0), count)
    return found


def table(backend: str, names: tuple[str, ...] = NAMES) -> Counts:
    """Launches by policy, those that a layer adds, and those of a call of each served op."""
    most, chains = dict[str, int](), dict[str, int]()
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, backend)
        counts = {
            name: counted(name, most, parts=PARTS if name == "auto" else PARTS[1:])
            for name in names
        }
        more = (
            counted(names[0], most, LAYERS + 1, ("root", "finish"))["finish"]
            - counts[names[0]]["finish"]
        )
        return (
            counts
            | {"a layer": {"finish": more}}
            | (
                {
                    **lanes(),
                    "auto of lanes": counted("auto", {}, parts=PARTS, texts=TEXTS, chains=chains),
                    "chains of lanes": chains,
                    "ops": dict(sorted(most.items())),
                }
                if most
                else {}
            )
        )


def figures(counts: Counts) -> dict[str, int]:
    """Return what the goals are about."""
    layer, auto = counts["a layer"]["finish"], counts["auto"]
    return {
        "auto first": auto["first"],
        "auto level": auto["level"],
        "layer": layer,
        "auto finish without layers": auto["finish"] - LAYERS * layer,
    }


def joined(texts: int, layers: int, rows: int = 1) -> int:
    """Return the launches of the graph that runs so many rows of each of so many texts."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as device:
        stand_ins = StandIns(device.enter_context(launchers()))
        patch.setattr(_registry, "_loaded", stand_ins.loaded)
        device.enter_context(pretended.cuda())
        device.enter_context(torch.inference_mode())
        model = pretended.moved(toy.tiny("llama", num_hidden_layers=layers).bfloat16())
        target = HuggingFaceTarget(model, captured=True, merge=True)  # type: ignore[arg-type]
        lanes = CapturedLanes([ModuleLane(target) for _ in range(texts)])
        lanes.locate(rows)
        lanes.run((), rows)  # what is made on first use is not part of a graph
        stand_ins.more = 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lanes.run((), rows)
        return sum(graph.launches.values()) + stand_ins.more  # type: ignore[attr-defined]


def lanes() -> Counts:
    """Return the launches of one text's rows and of those of TEXTS, plain and of trees, and what a layer adds."""
    found: Counts = {}
    for name, rows in (("lanes", 1), ("trees of lanes", TREE_ROWS)):
        counts = {str(texts): joined(texts, LAYERS, rows) for texts in (1, TEXTS)}
        more = {
            texts: joined(int(texts), LAYERS + 1, rows) - count for texts, count in counts.items()
        }
        found |= {name: counts, f"a layer of {name}": more}
    return found


# ---- prompts


def prompts() -> dict[str, int]:
    """Count what the host launches to run a short prompt, eagerly and as a tree; a replay is one launch."""
    launched, run = 0, pretended.Device.run

    def noted(self: pretended.Device, name: str, *given: Any, **more: Any) -> Any:
        nonlocal launched
        found = run(self, name, *given, **more)
        inside = {pretended.address(part.held) for part in _on_device(given)}
        made = {pretended.address(part.held) for part in _on_device(found)}
        written = name.endswith("_") or not made <= inside
        launched += self.capturing is None and written and name not in pretended.UNWRITTEN
        return found

    counts = dict[str, int]()
    with pytest.MonkeyPatch.context() as patch, pretended.cuda(), torch.inference_mode():
        choose(patch, "reference")
        model = pretended.moved(toy.tiny("llama", num_hidden_layers=LAYERS))
        target = HuggingFaceTarget(model, captured=True)  # type: ignore[arg-type]
        engine = Engine(target, Recycling(), policies.make("eagle"))
        driver = engine.drivers.own.captured
        assert driver is not None
        driver.reserve(100)
        patch.setattr(pretended.Device, "run", noted)
        for name in ("eagerly", "as a tree"):
            driver.prefill(PROMPT, 0)  # captures, once the driver has captured anything
            engine.target.reset()
            launched = 0
            driver.prefill(PROMPT, 0)
            counts[name] = launched + (name != "eagerly")
            driver.prepare(Sampler())
            engine.target.reset()
    return counts


def _on_device(values: Any) -> list[Any]:
    return pretended.of_class(pretended.OnDevice, (values,))


# ---- waits


def waits_of(policy: str, draft: str, sampling: str) -> dict[str, int]:
    """Count the cycles of an answer behind its first one, their draft passes and the waits of the host."""
    with pytest.MonkeyPatch.context() as patch, pretended.cuda() as device:
        choose(patch, "reference")
        model = pretended.moved(toy.tiny("llama", num_hidden_layers=LAYERS))
        target = HuggingFaceTarget(model, captured=True)  # type: ignore[arg-type]
        if draft == "head":
            head = pretended.moved(
                toy.tiny_head(toy.head_config(3, toy.tiny("llama", num_hidden_layers=LAYERS)))
            )
            drafter: Any = EagleDraft(head, target.lm)  # type: ignore[arg-type]
        else:
            drafter = Recycling()
        engine = Engine(target, drafter, toy.policy_for(policy, 3))
        given = {"max_new_tokens": TOKENS, **SAMPLINGS[sampling]}
        engine.generate(PROMPT, **given)  # captures
        stream = engine.stream(PROMPT, **given)
        cycles, passes, before = 0, 0, 0
        for number, piece in enumerate(stream):
            if number == 0:
                before = device.waits
                continue
            cycles += 1
            passes += (
                piece.cycle.tree.passes
                if isinstance(piece.cycle.tree.passes, int)
                else int(piece.cycle.tree.passes)
            )
        return {"cycles": cycles, "passes": passes, "waits": device.waits - before}


def waits(names: tuple[str, ...] = NAMES[:2]) -> Counts:
    return {
        f"{policy}, {draft}, {sampling}": waits_of(policy, draft, sampling)
        for policy in names
        for draft in DRAFTS
        for sampling in SAMPLINGS
    }


def main() -> None:
    torch.set_num_threads(1)
    found = {way: table(backend) for way, backend in WAYS.items()}
    found |= {"prompts": {"a short one": prompts()}, "waits": waits()}
    if "--write" in sys.argv[1:]:
        TABLE.write_text(json.dumps(found, indent=1) + "\n")
    print(" " * 20 + "".join(f"{part:>8}" for part in PARTS))
    for way in WAYS:
        for name, row in found[way].items():
            if name != "ops" and "lanes" not in name:
                print(f"{way:10}{name:10}" + "".join(f"{row.get(part, ''):>8}" for part in PARTS))
    print(
        "launches of a call:",
        ", ".join(f"{name} {count}" for name, count in found["kernels"]["ops"].items()),
    )
    for name in (name for name in found["kernels"] if "lanes" in name):
        print(f"{name}, by texts: {found['kernels'][name]}")
    print(f"launches of the host for a short prompt: {found['prompts']['a short one']}")
    for name, figure in figures(found["kernels"]).items():
        print(f"{name}: {figure}, goal {GOALS[name]}")
    for name, row in found["waits"].items():
        print(
            f"{name:24} {row['waits']} waits of {row['cycles']} cycles with {row['passes']} passes"
        )


if __name__ == "__main__":
    main()
