"""Tree construction: the time to choose one layer of the draft tree by each policy's rule, without a model.

Next-token distributions are Zipf's, P(r) ~ 1/r^alpha, under an independent permutation for each parent; the parents'
own scores are those of the best nodes below such a distribution. The ways of a case take turns, so that whatever else
the machine does falls on all of them. The rules differ in what they choose and in what they spare: only times within
a row compare, and they say nothing about the acceptance that the choice leads to. Source: TALON App. E.6. On a CPU
torch runs on one thread: its own threads wait for each other, so with other work on the machine more of them take many
times as long.

    python -m bench.tree_construction --out FILE    the table, with provenance; --device cuda on a device
    python -m bench.report FILE --plot              times by vocabulary, as in the paper's figure 15
    make bench-micro                                cases under pytest-benchmark
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import provenance
from bench.arguments import add_arguments
from bench.workloads import BUILT_IN
from specengine import Engine, ops
from specengine.benchmark.measuring import rotated
from specengine.benchmark.summaries import ALL
from specengine.benchmark.ways import EngineDecoder
from specengine.costs import find_costs
from specengine.policies import _ltd
from specengine.policies._classifier import Mlp

VOCABULARIES = (32768, 65536, 128256, 151936, 262144)
ALPHAS = (0.7, 1.35, 5.0)  # creative text, natural language, a nearly certain continuation
PARENTS = (1, 10, 60)
# logits: the softmax is part of the time
GIVEN = "float32 log-probs", "float32 logits", "bfloat16 logits"
WARM_UPS, REPEATS = 20, 100
BASELINE = "eagle (torch)"

WIDTH = 10  # EAGLE's K and the children per parent that C2T classifies
BUDGET = 60  # with the root
BATCH = 10  # SALF's nodes per draft pass
DEEPEST = 1 << 30  # no limit to the depth
LOG_MU = math.log(0.03)  # TALON's gate
ENTROPY_TOP, BETA = 1000, 0.5  # C2T
BRANCHES, SURE, UNSURE, LEAST = 3, math.log(0.9), math.log(0.4), math.log(0.05)  # DynaTree

SELECTING = ("top_children", "best_candidates", "top_entropy")  # ops that read whole distributions
USED = (
    *SELECTING,
    "select_best",
    "classify_paths",
    "step_queues",
    "beam_observation",
    "best_action",
)
COMPILED = {"cpu": USED, "cuda": SELECTING}  # what must not run in torch, by kind of device
RESULTS = Path(__file__).parent / "results"
DEFAULT_MODEL, SHAPE_8B = "default model", "8B shape"
ON_DEVICE = {  # files and ways of a captured cycle of EAGLE's beam
    DEFAULT_MODEL: ("graphs-small-gpu.jsonl", "eagle, graphs"),
    SHAPE_8B: ("graphs-8b-gpu.jsonl", "eagle, graphs"),
}
BEAM_HERE = "eagle/cpu"
COSTS_8B = "shapes-llama-3.1-8b.jsonl"  # of bench.cpu.shapes
SUMMED = (4, 4, 4), 12  # nodes of each draft pass of a cycle of eagle/cpu, nodes verified


@dataclass(frozen=True)
class Case:
    """One layer: `parents` distributions over `vocabulary` tokens with exponent `alpha`, in the form `given`."""

    vocabulary: int
    alpha: float
    parents: int
    given: str


CASES = [
    Case(vocabulary, alpha, parents, given)
    for vocabulary, alpha, parents, given in product(VOCABULARIES, ALPHAS, PARENTS, GIVEN)
]


class Layer(NamedTuple):
    """Input of a rule. logits: [parents, V]; scores: float32 [parents], path log-probabilities of the parents;
    normalized: the logits are log-probabilities already; below_root: float32 [BUDGET - 1], what the root's pass found,
    best first."""

    logits: Tensor
    scores: Tensor
    normalized: bool
    below_root: Tensor


class Selected(NamedTuple):
    """Output of a rule. rows, columns: int64 [m], parent and token; scores: float32 [m], of the path (the edge for
    SALF, whose queue keeps the paths to itself); padding, if any, has -inf."""

    rows: Tensor
    columns: Tensor
    scores: Tensor


Rule = Callable[[], Selected]

# ---------------------------------------------------------------------------------------------------- rules


def eagle_torch(layer: Layer) -> Rule:
    """Select by two top-K in plain torch: the best of each parent, then the best of those."""

    def run() -> Selected:
        best = _log_probs(layer).topk(WIDTH, dim=1)
        paths = (layer.scores[:, None] + best.values).view(-1)
        chosen = paths.topk(min(WIDTH, paths.shape[0])).indices
        return Selected(chosen // WIDTH, best.indices.view(-1)[chosen], paths[chosen])

    return run


def eagle_fused(layer: Layer) -> Rule:
    """Select as `eagle_torch`, through this package's ops."""
    everyone = _count(len(layer.scores) * WIDTH, layer)

    def run() -> Selected:
        log_probs, columns = ops.top_children(layer.logits, WIDTH, layer.normalized)
        paths = (layer.scores[:, None] + log_probs).view(-1)
        chosen = ops.select_best(paths, everyone, WIDTH).alive()
        return Selected(chosen // WIDTH, columns.view(-1)[chosen], paths[chosen])

    return run


def talon_torch(layer: Layer) -> Rule:
    """Select by the gate as the paper describes it: add parents' scores, maximum, mask, nonzero, cut to the budget."""

    def run() -> Selected:
        paths = layer.scores[:, None] + _log_probs(layer)
        rows, columns = (paths >= paths.max() + LOG_MU).nonzero(as_tuple=True)
        found = paths[rows, columns]
        if len(found) > BUDGET - 1:
            best = found.topk(BUDGET - 1).indices
            rows, columns, found = rows[best], columns[best], found[best]
        return Selected(rows, columns, found)

    return run


def talon_torch_without_sync(layer: Layer) -> Rule:
    """Select by the gate without nonzero, for whose size the host waits: best of the budget, lower ones masked."""

    def run() -> Selected:
        paths = (layer.scores[:, None] + _log_probs(layer)).view(-1)
        best = paths.topk(BUDGET - 1)
        vocabulary = layer.logits.shape[1]
        scores = best.values.masked_fill(best.values < best.values[0] + LOG_MU, -math.inf)
        return Selected(best.indices // vocabulary, best.indices % vocabulary, scores)

    return run


def talon_fused(layer: Layer) -> Rule:
    """Apply the gate through this package's op."""
    gate, live = (
        torch.tensor([LOG_MU], device=layer.logits.device),
        _count(len(layer.scores), layer),
    )

    def run() -> Selected:
        given = layer.logits, layer.scores, live, BUDGET - 1
        found = ops.best_candidates(*given, log_gate=gate, normalized=layer.normalized)
        size = int(found.live)
        return Selected(found.rows[:size], found.columns[:size], found.scores[:size])

    return run


def salf(layer: Layer) -> Rule:
    """Push to and pop from the bounded queue that the root's pass has left.

    SALF expands at most `BATCH` nodes at once; a layer of more parents meets the queue of a layer of `BATCH`.
    """
    device, parents = layer.logits.device, len(layer.scores)
    queues, search = (
        ops.Queues.start(BUDGET, device),
        ops.Search(BATCH, DEEPEST, threshold=0.0, fill=False),
    )
    frontier = ops.Nodes.of(torch.arange(parents, device=device))  # any, as there is no tree
    depths = torch.full((max(parents, 1),), int(parents > 1), device=device)
    passes = _count(1 + int(parents > 1), layer)
    if parents > 1:
        found, root = layer.below_root, torch.zeros(1, dtype=torch.int64, device=device)
        columns = torch.arange(len(found), device=device)
        first = ops.Candidates(
            torch.zeros_like(columns), columns, found, found, _count(len(found), layer)
        )
        ops.step_queues(queues, first, ops.Nodes.of(root), root, None, _count(1, layer), search)

    def run() -> Selected:
        found = ops.best_candidates(
            layer.logits,
            layer.scores,
            frontier.live,
            BUDGET - 1,
            bound=queues.bound,
            normalized=layer.normalized,
        )
        drawn = ops.step_queues(queues, found, frontier, depths, None, passes, search)
        live = int(drawn.live)
        return Selected(drawn.parents[:live], drawn.tokens[:live], drawn.log_probs[:live])

    return run


def c2t(layer: Layer) -> Rule:
    """Compute each parent's entropy and the classifier's verdict on its best children."""
    classifier, one = _classifier().to(layer.logits.device), _count(1, layer)

    def run() -> Selected:
        entropy = ops.top_entropy(layer.logits, ENTROPY_TOP, layer.normalized)
        log_probs, columns = ops.top_children(layer.logits, WIDTH, layer.normalized)
        paths = layer.scores[:, None] + log_probs
        confidence = ops.classify_paths(paths, entropy, one, classifier.parts).view(-1)
        order = _best_of(confidence, BETA)
        return Selected(order // WIDTH, columns.view(-1)[order], paths.view(-1)[order])

    return run


def dynatree(layer: Layer) -> Rule:
    """Give each parent one to three children by its largest probability, and leave out improbable paths."""
    device, most = layer.logits.device, BRANCHES * len(layer.scores)
    place, everyone = torch.arange(BRANCHES, device=device), _count(most, layer)

    def run() -> Selected:
        log_probs, columns = ops.top_children(layer.logits, BRANCHES, layer.normalized)
        paths = layer.scores[:, None] + log_probs
        first = log_probs[:, :1]
        counts = torch.full_like(first, BRANCHES - 1, dtype=torch.int64)
        counts = counts.masked_fill(first >= SURE, 1).masked_fill(first < UNSURE, BRANCHES)
        chosen = (place < counts) & (paths >= LEAST)
        flat = torch.where(chosen, paths, -math.inf).view(-1)
        found = ops.select_best(flat, everyone, most).alive()
        return Selected(found // BRANCHES, columns.view(-1)[found], flat[found])

    return run


def ltd(layer: Layer) -> Rule:
    """Select as `eagle_fused`, and ask the depth network that ships for the paper's trees whether to go on."""
    device, parents = layer.logits.device, len(layer.scores)
    networks = _networks().on(device)
    everyone, context = _count(parents * WIDTH, layer), _count(500, layer).long()
    below = layer.below_root[: WIDTH if parents > 1 else 0]
    before = torch.cat([torch.zeros(1, device=device), below])  # the root and what hangs from it
    depths = torch.full((len(before) + parents * WIDTH,), 1 + int(parents > 1), device=device)
    depths[: len(before)] = 1
    depths[0] = 0
    live, expansions = _count(len(depths), layer), _count(int(parents > 1), layer)
    room = networks.shape.inputs["depth"] - 2 * _ltd.REPEATS["depth"]
    window = ops.Window(WIDTH, True, room, networks.shape.pad, _ltd.REPEATS["depth"], (1e3, 10.0))

    def run() -> Selected:
        log_probs, columns = ops.top_children(layer.logits, WIDTH, layer.normalized)
        paths = (layer.scores[:, None] + log_probs).view(-1)
        chosen = ops.select_best(paths, everyone, WIDTH).alive()
        scores = torch.cat([before, paths])
        seen = ops.beam_observation(scores, depths, live, expansions, context, window)
        bool(networks.goes_on(seen, expansions))  # which the host waits for
        return Selected(chosen // WIDTH, columns.view(-1)[chosen], paths[chosen])

    return run


RULES: dict[str, Callable[[Layer], Rule]] = {
    BASELINE: eagle_torch,
    "eagle (ops)": eagle_fused,
    "talon (torch)": talon_torch,
    "talon (ops)": talon_fused,
    "salf (ops)": salf,
    "c2t (ops)": c2t,
    "dynatree (ops)": dynatree,
    "ltd (ops)": ltd,
}
CUDA_RULES = {"talon (torch, no host sync)": talon_torch_without_sync}


def rules(device: torch.device) -> dict[str, Callable[[Layer], Rule]]:
    """Return the rules of a case on that device."""
    return RULES | (CUDA_RULES if device.type == "cuda" else {})


def _log_probs(layer: Layer) -> Tensor:
    return layer.logits if layer.normalized else layer.logits.log_softmax(1, dtype=torch.float32)


def _best_of(confidence: Tensor, threshold: float) -> Tensor:
    passing = torch.where(confidence >= threshold, confidence, -math.inf)
    everyone = torch.full((1,), passing.shape[0], dtype=torch.int32, device=passing.device)
    return ops.select_best(passing, everyone, WIDTH).alive()


def _count(number: int, layer: Layer) -> Tensor:
    return torch.tensor([number], dtype=torch.int32, device=layer.logits.device)


@lru_cache(maxsize=1)
def _classifier() -> Mlp:
    """Return a classifier of C2T's shape (241 parameters) with random weights, which cost the same."""
    torch.manual_seed(0)
    return Mlp(3, 48).requires_grad_(False).eval()


@lru_cache(maxsize=1)
def _networks() -> _ltd.Networks:
    return _ltd.load("a100").networks


# ---------------------------------------------------------------------------------------------------- data


def layer_of(case: Case, device: torch.device) -> Layer:
    """Return the tensors of a case, always the same for the same case."""
    ranks = _permuted_ranks(case.vocabulary, max(case.parents, *PARENTS))[: case.parents]
    log_probs = _zipf_log_probs(case.vocabulary, case.alpha)
    scores = log_probs[: case.parents] if case.parents > 1 else torch.zeros(1)
    dtype, kind = case.given.split()
    values = log_probs[ranks].to(getattr(torch, dtype))
    return Layer(
        values.to(device),
        scores.to(device),
        kind == "log-probs",
        log_probs[: BUDGET - 1].to(device),
    )


def _zipf_log_probs(vocabulary: int, alpha: float) -> Tensor:
    """Return natural-log probabilities by rank, float32 [vocabulary]."""
    powers = -alpha * torch.arange(1, vocabulary + 1, dtype=torch.float64).log()
    return powers.log_softmax(0).float()


@lru_cache(maxsize=1)
def _permuted_ranks(vocabulary: int, rows: int) -> Tensor:
    random = torch.Generator().manual_seed(vocabulary)
    return torch.stack([torch.randperm(vocabulary, generator=random) for _ in range(rows)])


# ---------------------------------------------------------------------------------------------------- measuring


class Times(NamedTuple):
    """Milliseconds of one call: on a CUDA device between events, and for the host until the result is there."""

    device: float
    host: float


@torch.inference_mode()
def measure(
    case: Case, device: torch.device, warm_ups: int, repeats: int, seconds: float
) -> dict[str, Any]:
    """Return the case's record. Makes fewer calls than asked for if they would take longer than `seconds`."""
    layer = layer_of(case, device)
    ways = rules(device)
    found = {name: prepare(layer)() for name, prepare in ways.items()}
    began = time.perf_counter()
    for prepare in ways.values():
        _call(prepare(layer), device)
    share = min(1.0, seconds / ((time.perf_counter() - began) * (warm_ups + repeats)))
    warm_ups, repeats = (
        max(min(warm_ups, 2), round(warm_ups * share)),
        max(min(repeats, 10), round(repeats * share)),
    )
    taken: dict[str, list[Times]] = {name: [] for name in ways}
    for turn in range(warm_ups + repeats):
        for name in rotated(list(ways), turn):
            times = _call(ways[name](layer), device)
            if turn >= warm_ups:
                taken[name].append(times)
    return {
        "record": "case",
        **asdict(case),
        "warm_ups": warm_ups,
        "repeats": repeats,
        "selected": {
            name: int((chosen.scores > -math.inf).sum()) for name, chosen in found.items()
        },
        **_statistics(taken, device),
    }


def _call(run: Rule, device: torch.device) -> Times:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        taken = 1e3 * (time.perf_counter() - began)
        return Times(taken, taken)
    torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.perf_counter()
    start.record()
    run()
    end.record()
    end.synchronize()
    return Times(start.elapsed_time(end), 1e3 * (time.perf_counter() - began))


def _statistics(taken: dict[str, list[Times]], device: torch.device) -> dict[str, Any]:
    clocks = {"": "device", "host_": "host"} if device.type == "cuda" else {"": "device"}
    rows: dict[str, Any] = {}
    for prefix, clock in clocks.items():
        by_name = {name: [getattr(call, clock) for call in calls] for name, calls in taken.items()}
        for what, summarise in (("mean", statistics.mean), ("median", statistics.median)):
            values = {name: summarise(times) for name, times in by_name.items()}
            rows[f"{prefix}{what}_ms"] = {name: round(value, 4) for name, value in values.items()}
            rows[f"{prefix}{what}_relative"] = {
                name: round(value / values[BASELINE], 3) for name, value in values.items()
            }
    return rows


# ---------------------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--alphas", type=float, nargs="+", default=list(ALPHAS))
    parser.add_argument("--parents", type=int, nargs="+", default=list(PARENTS))
    parser.add_argument("--given", nargs="+", choices=GIVEN, default=list(GIVEN))
    parser.add_argument("--warm-ups", type=int, default=WARM_UPS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="per case, for which slow ones get fewer repeats"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default: 1)")
    add_arguments(parser, "device", "out")
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error(f"--threads: got {args.threads}, accepted 1 or more")
    if busy := crowded(args.threads):
        print(f"bench.tree_construction: warning: {busy}", file=sys.stderr, flush=True)
    device, before = torch.device(args.device), torch.get_num_threads()
    if slow := fallback(device):
        print(f"bench.tree_construction: error: {slow}", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    try:
        for row in provenance.keep(_records(args, device), args.out):
            if row["record"] == "case":
                print(_line(row), flush=True)
    finally:
        torch.set_num_threads(before)
    return 0


def fallback(device: torch.device) -> str:
    """Return a sentence where torch runs ops that compiled code should, and an empty one where none."""
    there = ops.backends(device)
    slow = [name for name in COMPILED[device.type] if there[name].name == "reference"]
    if not slow:
        return ""
    return (
        f"{', '.join(slow)}: got the slow reference in torch on {device.type} ({there[slow[0]].reason}), accepted "
        f"compiled code: {'pip install -e .' if device.type == 'cpu' else 'pip install -e .[kernels]'}"
    )


def cycles(device: torch.device, results: Path = RESULTS) -> dict[str, Any]:
    """Return milliseconds of a cycle of EAGLE's beam by model, and where they come from.

    On a CPU the default model's is measured now, and the 8B shape's is summed up from its costs of rows, where the file
    of them is there. On a CUDA device both are those of committed files.
    """
    if device.type == "cpu":
        found = {DEFAULT_MODEL: {"ms": _cycle_here(), "of": f"{BEAM_HERE}, in this run"}}
        if (results / COSTS_8B).is_file():
            widths, verified = SUMMED
            ms = round(1e3 * find_costs(str(results / COSTS_8B)).cycle(verified, widths), 2)
            found[SHAPE_8B] = {"ms": ms, "of": f"{BEAM_HERE}, costs of {COSTS_8B}"}
        return found
    found = {}
    for model, (file, way) in ON_DEVICE.items():
        rows = map(json.loads, (results / file).read_text().splitlines())
        own = next(
            r for r in rows if r["record"] == "summary" and (r["way"], r["set"]) == (way, ALL)
        )
        found[model] = {"ms": own["median_ms"]["total"], "of": f"{way}, {file}"}
    return found


def _cycle_here() -> float:
    """Return the median milliseconds of a cycle of the default model under EAGLE's beam of twelve nodes, on the CPU."""
    engine = Engine.from_pretrained(policy=BEAM_HERE, device="cpu")
    decoder = EngineDecoder(engine, {"temperature": 0.0})
    prompt = engine.stream(BUILT_IN["story"], max_new_tokens=1).prompt
    answers = [decoder(prompt, 64) for _ in range(2)]  # the first warms up
    cycles = answers[-1].cycles
    assert cycles is not None
    return float(cycles["median_ms"]["total"])


def crowded(threads: int) -> str:
    """Return a sentence where other work leaves fewer cores than `threads`, and an empty one where it does not."""
    if not hasattr(os, "getloadavg"):  # on Windows
        return ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load + threads <= cores + 0.5:
        return ""
    return f"a load of {load:.1f} on {cores} cores beside {threads} of ours: times of torch's rules will be too long"


def _records(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    yield _settings(device)
    for case in _cases(args):
        yield measure(case, device, args.warm_ups, args.repeats, args.seconds)


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for vocabulary, alpha, parents, given in product(
        args.vocabularies, args.alphas, args.parents, args.given
    ):
        yield Case(vocabulary, alpha, parents, given)


def _settings(device: torch.device) -> dict[str, Any]:
    return {
        "record": "settings",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "backends": {op: backend.name for op, backend in ops.backends(device).items()},
        "width": WIDTH,
        "budget": BUDGET,
        "batch": BATCH,
        "mu": round(math.exp(LOG_MU), 6),
        "entropy_top": ENTROPY_TOP,
        "classifier": "3-48-1, random weights",
        "baseline": BASELINE,
        "cycles": cycles(device),
        "clock": "CUDA events" if device.type == "cuda" else "host; not measured on a GPU",
    }


def _line(row: dict[str, Any]) -> str:
    times = "  ".join(
        f"{name} {value:.3f} ({row['median_relative'][name]:.2f})"
        for name, value in row["median_ms"].items()
    )
    head = f"V {row['vocabulary']:>6}  alpha {row['alpha']:<4}  parents {row['parents']:>2}  {row['given']:<17}"
    return f"{head}  median ms (relative) of {row['repeats']}:  {times}"


# ---------------------------------------------------------------------------------------------------- pytest-benchmark


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrise with every way of every case, without importing pytest: the command line does not need it."""
    if "case" in metafunc.fixturenames:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        both = [(case, way) for case in CASES for way in rules(device)]
        ids = [
            f"{way}-{case.given}-V{case.vocabulary}-alpha{case.alpha}-parents{case.parents}"
            for case, way in both
        ]
        metafunc.parametrize(("case", "way"), both, ids=ids)


@torch.inference_mode()
def test_layer(benchmark: Any, case: Case, way: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = layer_of(case, device)
    benchmark.group = (
        f"{case.given}, V {case.vocabulary}, alpha {case.alpha}, parents {case.parents}"
    )

    def run(rule: Rule) -> Selected:
        selected = rule()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return selected

    def fresh() -> tuple[tuple[Rule], dict[str, Any]]:
        return (rules(device)[way](layer),), {}

    repeats, warm_ups = (
        (REPEATS, WARM_UPS) if case.parents <= BATCH else (REPEATS // 5, WARM_UPS // 5)
    )
    benchmark.pedantic(run, setup=fresh, rounds=repeats, warmup_rounds=warm_ups)


if __name__ == "__main__":
    sys.exit(main())
