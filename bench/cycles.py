"""The parts of a captured cycle at a published shape, whose random weights are made where they run: nothing is carried.

Variants of one model run one after the other in one process, so their ratios hold on any card. Each policy runs in the
first of them, and the first policy in all. Records:

prompt   milliseconds to the first token, and of the target's and the head's prompt alone, by length; each time of
         another text, so the first of them is the first that met this length
verify   milliseconds of the target over trees of so many rows
parts    milliseconds of the parts of a cycle of one level, each a graph of its own: `draft` (the head), `policy` (its
         rule), `verify`, `walk` (choices and walk) and `commit`; beside them those of the cycle as the engine runs it
kernels  calls and microseconds by name in one replay, as torch's profiler counts them; operations on a CPU
lanes    milliseconds of a plain row of each of so many texts, and of trees of TREE nodes, run together as one graph;
         on a device of a whole cycle of them by the first policy, as graphs of all
answer   milliseconds and draft passes of cycles of an answer, as a user has it; a random head drafts in vain

Cycles have random tokens, and leave no trace in the caches. Elsewhere than on CUDA the same functions run uncaptured.
A run that was stopped goes on with the same command.

    python -m bench.cycles --out FILE
    python -m bench.cycles --device cpu --shape tiny --contexts 16 --lengths 5 --rows 1 4 --seconds 0.1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile, supported_activities
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import provenance
from bench.arguments import add_arguments
from research.inflate.shape import Shape, parse_shape
from specengine import Engine, ops, policies
from specengine.benchmark.records import Log, Record
from specengine.costs.measuring import SyntheticCycles
from specengine.drafters.eagle import EagleDraft
from specengine.engine import Pool
from specengine.engine.captured import CapturedDriver
from specengine.engine.generation import want
from specengine.engine.joined import CapturedLanes, JoinedDriver
from specengine.engine.parts import PLAIN
from specengine.errors import require_value
from specengine.models import attention, fused
from specengine.models.eagle import EagleConfig, EagleHead
from specengine.models.huggingface import HuggingFaceTarget, ModuleLane
from specengine.ops import Nodes
from specengine.ops.cuda_graphs import Mark
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.records import Outcome

T = TypeVar("T")
KEY = ("record", "variant", "policy", "of")  # what tells a record from the others of its file
Key = tuple[Any, ...]  # `of`: tokens of the prompt or in the caches, or the part of a cycle

PAPERS = ("talon", "salf", "c2t", "dynatree", "ltd")
POLICIES = ("auto", PLAIN, "eagle", *PAPERS)
ROWS, CONTEXTS, LENGTHS = (1, 8, 16, 32, 64), (64, 1024), (37, 64, 65, 200, 513, 1000)
TEXTS = (1, 2, 4, 8)
TREE = 16  # nodes of each text's
REPEATS = 3  # prompts of each length; cycles in which a part's kernels are counted
AT_ONCE = 4  # cycles between two looks at the clock
MAX_NAMES = 28  # of kernels, those that take longest
ANSWER = 32  # tokens
SHARE_OF_ANSWER = 4  # its first cycles warm up: one in so many is left out


class Variant(NamedTuple):
    """A way to run the model. merges: as one that the engine loads by name; a model that is passed keeps its products
    apart, and its weights are watched. within: a context that everything of the variant runs in."""

    merges: bool = True
    strict: bool = False
    within: Callable[[], AbstractContextManager[None]] = nullcontext


@contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute within the context."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None = None
) -> Tensor | None:
    """Attend as `models.attention.prompt_attention`, by torch; None for prompts with earlier tokens or a window."""
    if window is not None or query.shape[2] != key.shape[2]:
        return None
    attended = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2)


VARIANTS = {
    "base": Variant(),
    "passed": Variant(merges=False),
    "torch-prompts": Variant(
        within=partial(patched, attention, "prompt_attention", torch_attention)
    ),
    "modules": Variant(within=partial(patched, fused, "DEVICES", ())),
    "strict": Variant(strict=True),
}
DEFAULT_VARIANTS = ("base", "passed", "torch-prompts")


def model_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Any, EagleHead]:
    """Return a model of this shape and its EAGLE-3 head, with random weights; on a device the head has the ids 0 to
    n - 1 of the vocabulary."""
    size = shape.attention.head_dim
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=size,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        ).eval()
        head = EagleConfig(
            version=3,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=size,
            target_hidden_size=shape.hidden,
            vocab_size=shape.vocab,
            draft_vocab_size=shape.draft_vocab or shape.vocab,
        ).network()
    if head.d2t is not None:
        head.d2t.zero_()
    return model, head.to(dtype).eval().requires_grad_(False)


class CycleParts:
    """The parts of a captured driver's cycle, each captured alone, so that it has times and kernels of its own.

    seconds: of each part, by its name
    """

    def __init__(self, driver: CapturedDriver) -> None:
        self.driver = driver
        self.seconds = defaultdict[str, list[float]](list)
        self._spans = list[tuple[str, Mark, Mark]]()

    @torch.inference_mode()
    def run(self, root: int) -> None:
        """Run a cycle below this token, behind what the caches hold, and undo it."""
        driver = self.driver
        with driver.undone():
            driver.plant(root)
            if driver.policy is not None:
                self._grow()
            self._finish()
        self._spans[-1][2].wait()
        for name, began, ended in self._spans:
            self.seconds[name].append(ended.since(began))
        self._spans.clear()

    def _part(self, name: str, function: Callable[[], T]) -> T:
        driver, place = self.driver, (f"part {name}", self.driver.reads())
        if not driver.graphs.has(*place):
            self._capture(lambda: driver.graphs.run(*place, function))
        began = Mark(driver.tree.device)
        result = driver.graphs.run(*place, function)
        self._spans.append((name, began, Mark(driver.tree.device)))
        return result

    def _capture(self, run: Callable[[], Any]) -> None:
        """Capture a part, which runs it several times, and put back what it changed."""
        driver, tree = self.driver, self.driver.tree
        counters = driver.target.cache.filled, *tree.counters, *driver.frontier
        state = *tree.arrays, *counters, *driver._lasting()
        before = [tensor.clone() for tensor in state]
        run()
        for tensor, values in zip(state, before, strict=True):
            tensor.copy_(values)

    def _grow(self) -> None:
        """Grow the levels that a rehearsed cycle has."""
        driver, source = self.driver, self.driver._source()
        tree, frontier = driver.tree, driver.frontier
        asked = driver.policy.plan().patience
        if asked:
            self._part("first policy", driver.run_first)
            from_root(driver)
        root = self._alive(Nodes(frontier.ids[:1], frontier.live))
        step = self._part("root draft", lambda: source.root(tree))
        self._part("root policy", lambda: self._append(root if asked else tree.root_alone(), step))
        if driver.passes > 1:
            widen(driver)
            nodes = self._alive(frontier)
            step = self._part("level draft", lambda: source.step(tree, nodes))
            self._part("level policy", lambda: self._append(nodes, step))

    def _alive(self, nodes: Nodes) -> Nodes:
        """Return the nodes as a pass takes them; on the host they stay when the frontier moves on."""
        if not ops.is_free(nodes.live):
            return nodes
        return Nodes(nodes.alive().clone(), nodes.live.clone())

    def _append(self, frontier: Nodes, step: Step) -> None:
        driver = self.driver
        driver.tree.passes += frontier.live > 0
        driver._go_on(driver.policy.grow(driver.tree, frontier, step))

    def _finish(self) -> None:
        driver = self.driver
        target, tree, length = driver.target, driver.tree, driver.target.cache.filled

        def keep() -> tuple[Nodes, TokenTree]:
            verified_nodes = driver.run_kept(driver.budget)
            return verified_nodes, tree.subtree(verified_nodes)

        nodes, verified = self._part("keep policy", keep)
        logits, features = self._part("verify", lambda: target.verify(verified))

        def walk() -> Any:
            chosen = driver.sampler.choose(logits, verified.depths, length)
            return ops.walk(verified.tokens, verified.parents, chosen, nodes.live)

        walked = self._part("walk", walk)

        def commit() -> tuple[Nodes, Tensor]:
            path = Nodes(ops.padded(walked.nodes, driver.longest), walked.live)
            tokens = verified.tokens.index_select(0, path.ids)
            target.cache.keep(path)
            if driver.drafter is not None and driver.policy is not None:
                cast(EagleDraft, driver.drafter).take(tokens, path, features)
            return path, tokens

        path, tokens = self._part("commit", commit)
        if driver._learns_there():

            def learn() -> None:
                accepted = Nodes(nodes.ids.index_select(0, path.ids), path.live)
                driver.policy.learn(Outcome(tree, accepted, tokens, None))

            self._part("learn policy", learn)


def from_root(driver: CapturedDriver) -> None:
    """Make the frontier the root, whatever the policy thinks of drafting."""
    driver.frontier.ids[:1].zero_()
    driver.frontier.live.fill_(1)


def widen(driver: CapturedDriver) -> None:
    """Make the frontier as wide as may be, as a rehearsed cycle has it."""
    tree, (ids, live) = driver.tree, driver.frontier
    ids.copy_(torch.arange(1, len(ids) + 1, device=tree.device, dtype=torch.int64))
    ids.clamp_(max=tree.capacity - 1)
    live.copy_((tree.size - 1).clamp(max=len(ids)))


class Cycles:
    """Measure the variants and policies of one model, one record after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._device = args, torch.device(args.device)
        self._engines = dict[str, Engine]()  # that of the present variant

    @cached_property
    def _weights(self) -> tuple[Any, EagleHead]:
        return model_of(self._args.shape, self._device, getattr(torch, self._args.dtype))

    def tasks(self) -> Iterator[tuple[str, Key, Callable[[Key], Record]]]:
        """Yield variant, key and function of each record."""
        args, first = self._args, self._args.policy[0]
        for variant in args.variants:
            for policy in args.policy if variant == args.variants[0] else [first]:
                measured: dict[str, tuple[Callable[[Key], Record], Any]] = {
                    "prompt": (self._prompt, args.lengths if policy in (first, PLAIN) else ()),
                    "verify": (self._verify, args.contexts if policy == first else ()),
                    "parts": (self._parts, args.contexts),
                    "kernels": (self._kernels, self._profiled(policy)),
                    "lanes": (self._lanes, args.texts if policy == PLAIN else ()),
                    "answer": (self._answer, args.contexts[:1]),
                }
                for kind, (function, places) in measured.items():
                    for place in places:
                        yield variant, (kind, variant, policy, place), function

    def _profiled(self, policy: str) -> tuple[str, ...]:
        """Return the parts whose kernels can be counted."""
        counted = ProfilerActivity.CUDA if self._device.type == "cuda" else ProfilerActivity.CPU
        if counted not in supported_activities():
            return ()
        return ("finish",) if policy == PLAIN else ("level", "finish")

    def engine(self, variant: str) -> Engine:
        """Return the engine of a variant; the one of another variant is given up."""
        if variant not in self._engines:
            self._engines.clear()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            (model, head), way = self._weights, VARIANTS[variant]
            target = HuggingFaceTarget(model, captured=True, merge=way.merges, strict=way.strict)
            draft = EagleDraft(head, target.lm)
            self._engines[variant] = Engine(target, draft, policies.make(self._args.policy[0]))
        return self._engines[variant]

    def _driver(self, key: Key, context: int) -> tuple[CapturedDriver, int]:
        """Return the policy's driver over caches of so many tokens, and a root."""
        _, variant, policy, _ = key
        engine = self.engine(variant)
        driver = engine.drivers.asked(policy).captured
        assert driver is not None
        with torch.inference_mode(), engine.target.running():
            most = max(*self._args.contexts, *self._args.rows)
            cycles = SyntheticCycles(engine.target, driver.drafter, most, driver)
            cycles.begin(context)
        return driver, cycles.root

    # ---- records

    def _prompt(self, key: Key) -> Record:
        _, variant, policy, length = key
        engine = self.engine(variant)
        engine.generate(self._text(20, 0), max_new_tokens=8, temperature=0.0, policy=policy)
        first, alone = [], []
        for number in range(1, REPEATS + 1):
            text = self._text(length, number)
            answer = engine.stream(text, max_new_tokens=8, temperature=0.0, policy=policy)
            first.append(self._timed(partial(next, answer)))
            answer.close()
        drafter = engine.drivers.asked(policy).drafter
        for number in range(REPEATS):
            engine.target.reset()
            if drafter is not None:
                drafter.reset()
            text = self._text(length, REPEATS + 1 + number)
            alone.append(self._timed(partial(self._read, engine, drafter, text)))
        return {"first_token_ms": first, "prompt_ms": alone}

    @torch.inference_mode()
    def _read(self, engine: Engine, drafter: Any, text: list[int]) -> None:
        features = engine.target.prefill(text, 0)
        if drafter is not None:
            drafter.begin(text, features)

    def _verify(self, key: Key) -> Record:
        driver, root = self._driver(key, key[-1])
        ms = {str(rows): self._rows(driver, root, rows) for rows in self._args.rows}
        return {"ms": ms}

    @torch.inference_mode()
    def _rows(self, driver: CapturedDriver, root: int, rows: int) -> float:
        """Return the milliseconds of a forward over a root and its children."""
        device, target = driver.tree.device, driver.target
        nodes = torch.arange(rows, dtype=torch.int64, device=device)
        blank = torch.zeros(rows, dtype=torch.float32, device=device)
        depths = (nodes > 0).long()
        tree = TokenTree.of((root + nodes) % target.vocab_size, depths - 1, depths, blank, blank)
        run = partial(
            driver.graphs.run, f"{rows} rows", driver.reads(), lambda: target.verify(tree)
        )
        run()  # captures
        times = []
        for _ in self._until():
            began = Mark(device)
            run()
            ended = Mark(device)
            ended.wait()
            times.append(ended.since(began))
        driver.graphs.drop(f"{rows} rows")  # which would read the tree of this call
        return milliseconds(times)

    def _parts(self, key: Key) -> Record:
        driver, root = self._driver(key, key[-1])
        driver.rehearse(root, AT_ONCE)
        parts, cycles = CycleParts(driver), defaultdict[str, list[float]](list)
        parts.run(root)  # captures
        parts.seconds.clear()
        for _ in self._until():
            for name, times in driver.rehearse(root, AT_ONCE).items():
                cycles[name] += times
            for _ in range(AT_ONCE):
                parts.run(root)
        by_part = {name: milliseconds(times) for name, times in parts.seconds.items()}
        whole = {name: milliseconds(times) for name, times in cycles.items()}
        # cycles of a root alone are rehearsed before the others, and are none of their parts
        total = sum(ms for name, ms in whole.items() if not name.startswith(("plain", "finish ")))
        kinds = dict.fromkeys(("draft", "policy", "verify", "walk", "commit"), 0.0)
        for name, taken in by_part.items():
            kinds[name.split()[-1]] += taken
        driver.graphs.drop(*(f"part {name}" for name in by_part))
        return {
            "rows": driver.budget,
            "most_passes": driver.passes,
            "ms": {kind: round(taken, 4) for kind, taken in kinds.items()},
            "parts_ms": by_part,
            "cycle_ms": round(total, 4),
            "as_run_ms": whole,
            "cycles": len(cycles["finish"]),
        }

    def _kernels(self, key: Key) -> Record:
        driver, root = self._driver(key, self._args.contexts[-1])
        driver.rehearse(root, 1)
        on_device = self._device.type == "cuda"
        calls, microseconds = defaultdict[str, int](int), defaultdict[str, float](float)
        for _ in range(REPEATS):
            for event in self._profile(driver, root, key[-1]):
                taken = event.self_device_time_total if on_device else event.self_cpu_time_total
                if taken:  # what the host calls takes the device no time
                    calls[event.key] += event.count
                    microseconds[event.key] += taken
        slowest = sorted(microseconds, key=microseconds.__getitem__, reverse=True)
        return {
            "counted": "kernels" if on_device else "operations of a CPU",
            "calls": sum(calls.values()) / REPEATS,
            "us": round(sum(microseconds.values()) / REPEATS, 1),
            "by_name": {
                name[:80]: [calls[name] / REPEATS, round(microseconds[name] / REPEATS, 1)]
                for name in slowest[:MAX_NAMES]
            },
        }

    @torch.inference_mode()
    def _profile(self, driver: CapturedDriver, root: int, part: str) -> Any:
        """Return the events of one part of a cycle."""
        with driver.undone():
            driver.plant(root)
            if driver.policy is not None:
                from_root(driver)
                driver._run("root")
            if part == "level":
                widen(driver)
            on_device = self._device.type == "cuda"
            self._wait()
            with profile(
                activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]
            ) as profiler:
                driver._run(part)
                self._wait()
        return profiler.key_averages()

    @torch.inference_mode()
    def _lanes(self, key: Key) -> Record:
        """Time a row of each text, and a tree, behind the first of the contexts, with their copies into the graph."""
        _, variant, _, texts = key
        target, context = self.engine(variant).target, self._args.contexts[0]
        lanes = [ModuleLane(cast(HuggingFaceTarget, target)) for _ in range(texts)]
        joined = CapturedLanes(lanes)
        for number, lane in enumerate(lanes):
            lane.reserve(context, 1)
            lane.prefill(self._text(context, number))
        times: dict[int, list[float]] = {1: [], TREE: []}

        def run(nodes: int) -> None:
            tree = TokenTree.of_lists([1] * nodes, [*range(-1, nodes - 1)], target.device)
            joined.run_lanes([lane.ask(tree, greedy=True) for lane in lanes])  # type: ignore[misc]

        for nodes in times:
            run(nodes)  # captures
        for _ in self._until():
            for nodes, seconds in times.items():
                began = Mark(self._device)
                run(nodes)
                ended = Mark(self._device)
                ended.wait()
                seconds.append(ended.since(began))
        alone, trees = map(milliseconds, times.values())
        graphs = sum(joined.graphs.captures.values())
        record: Record = {"ms": alone, "trees_ms": trees, "graphs": graphs}
        if self._device.type == "cuda":  # off a device the texts of a pool have no graphs
            record["cycles_ms"] = milliseconds(self._cycles_of(variant, texts))
        return record

    def _cycles_of(self, variant: str, texts: int) -> list[float]:
        """Return the seconds of whole cycles of so many texts of a pool, each of which is undone."""
        engine, context = self.engine(variant), self._args.contexts[0]
        pool = Pool(engine, texts, sys.maxsize)  # bytes of caches
        drivers = [cast(CapturedDriver, other.drivers.own.captured) for other in pool.engines]
        joined = cast(JoinedDriver, drivers[0].joined)
        for number, (other, driver) in enumerate(zip(pool.engines, drivers, strict=True)):
            want(other.target, other.drafter)
            driver.reserve(context)
            text = self._text(context, number)
            features = other.target.prefill(text)
            cast(EagleDraft, other.drafter).begin(text, features)
        joined.make_ready(drivers[0].sampler.request)
        seconds = []
        for _ in self._until():
            with ExitStack() as undone:
                for driver in drivers:
                    undone.enter_context(driver.undone())
                    driver.plant(1)
                began, _, ended = joined._start(0).marks
                ended.wait()
                seconds.append(ended.since(began))
        return seconds

    def _answer(self, key: Key) -> Record:
        _, variant, policy, context = key
        pieces = self.engine(variant).stream(
            self._text(context, 0),
            max_new_tokens=ANSWER,
            temperature=0.0,
            eos_token_id=[],
            policy=policy,
        )
        cycles = [piece.cycle for piece in pieces]
        assert pieces.result is not None
        stats = pieces.result.stats
        later = [one.seconds.total for one in cycles[len(cycles) // SHARE_OF_ANSWER :]]
        return {
            "cycle_ms": milliseconds(later),
            "draft_passes": round(stats.num_draft_passes / len(cycles), 2),
            "tau": round(stats.num_generated_tokens / len(cycles), 2),
            "notes": stats.notes,
        }

    # ---- texts and clocks

    def _text(self, length: int, number: int) -> list[int]:
        """Return random tokens, others for each number."""
        random = torch.Generator().manual_seed(1000 * length + number)
        return torch.randint(self._args.shape.vocab, (length,), generator=random).tolist()

    def _until(self) -> Iterator[None]:
        """Yield for as long as a record may take, and once at least."""
        until = time.perf_counter() + self._args.seconds
        yield
        while time.perf_counter() < until:
            yield

    def _timed(self, function: Callable[[], Any]) -> float:
        """Return the milliseconds of a call until the device is done."""
        self._wait()
        began = time.perf_counter()
        function()
        self._wait()
        return milliseconds([time.perf_counter() - began])

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def milliseconds(seconds: list[float]) -> float:
    """Return the median in milliseconds."""
    return round(1e3 * statistics.median(seconds), 4)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cycles", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--shape", type=parse_shape, default="8b", help="8b, 135m, tiny or sizes (default: 8b)"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(DEFAULT_VARIANTS))
    parser.add_argument(
        "--policy",
        action="append",
        help=f"repeatable, the first one runs in all variants; default: {', '.join(POLICIES)}",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--texts", type=int, nargs="+", default=list(TEXTS), help="at once")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of prompts")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    add_arguments(parser, "dtype", "device", "out")
    args = parser.parse_args(arguments)
    args.policy = args.policy or list(POLICIES)
    for policy in {*args.policy} - {PLAIN}:
        policies.make(policy)  # what is asked for by a wrong name is refused at once
    require_value("policy", args.policy[0], "one that drafts first", args.policy[0] != PLAIN)
    growing = None if args.out is None else args.out.with_suffix(provenance.ROWS)
    if args.out is not None and args.out.exists():
        print(f"bench.cycles: {args.out} is there already", file=sys.stderr)
        return 0
    log = Log(growing, provenance.provenance(), _settings(args))
    for record in records(args, log):
        print(json.dumps(record), flush=True)
    if growing is not None:
        growing.replace(args.out)
    return 0


def records(args: argparse.Namespace, log: Log) -> Iterator[Record]:
    """Yield the records that the log does not have yet, each once it is there."""
    cycles = Cycles(args)
    known = {tuple(record.get(name) for name in KEY) for record in log.records[2:]}
    for variant, key, function in cycles.tasks():
        if key in known:
            continue
        with VARIANTS[variant].within():
            log.add(dict(zip(KEY, key, strict=True)) | function(key))
        yield log.records[-1]


def _settings(args: argparse.Namespace) -> Record:
    named = (
        "dtype",
        "device",
        "variants",
        "policy",
        "rows",
        "contexts",
        "texts",
        "lengths",
        "seconds",
    )
    return {
        "record": "settings",
        "shape": asdict(args.shape),
        **{name: getattr(args, name) for name in named},
        "backends_there": {op: backend.name for op, backend in ops.backends(args.device).items()},
    }


if __name__ == "__main__":
    sys.exit(main())
