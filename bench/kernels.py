"""The kernels of kernels/ on a GPU, each against what users have today, in one table.

Every way is compared with a float64 result first; a wrong one is reported and not timed. Captured ways run in one CUDA
graph, at least CALLS times: the time is a replay's over its calls, so it holds no launch from the host. "cold" calls
take turns on copies of the inputs that are together five times the L2 cache; "warm" calls read the same inputs again.
Beside each time stand the least bytes and operations over the device's rates; the row "launch floor" is what a kernel
costs at least.

    python -m bench.kernels --dry-run          the cases, and which ways are installed; needs no GPU
    python -m bench.kernels --out FILE         the table, with provenance
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CALLS, REPLAYS, WARM_UPS = 20, 60, 5
COPIES_OF_L2 = 5
LOG_MU = math.log(0.03)  # TALON's gate
EAGLE_K = 10
RATES = {"H200": (4.3e12, 790e12), "H100": (3.0e12, 790e12)}  # bytes/s copied and bfloat16 operations/s, both measured
MOST_ERROR = {"attention": 6e-3, "selection": 2e-5, "compaction": 0.0}


# ---------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Attention:
    """`nodes` rows over `prefix` slots and themselves, as a random tree."""

    nodes: int
    prefix: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128


@dataclass(frozen=True)
class Selection:
    """The best `most` of `rows` rows of bfloat16 logits, behind TALON's gate or without one."""

    rows: int
    columns: int
    most: int = 60
    gated: bool = False


@dataclass(frozen=True)
class Compaction:
    """`kept` nodes of a cache of 64 behind `prefix` slots."""

    layers: int
    kept: int
    kv_heads: int = 8
    size: int = 128
    prefix: int = 1024


Case = Attention | Selection | Compaction
NODES, PREFIXES = (1, 16, 32, 64, 128, 256), (512, 2048, 4096, 16384, 32768)
CASES: list[Case] = [
    *(Attention(nodes, prefix) for nodes, prefix in product(NODES, PREFIXES)),
    *(Attention(nodes, prefix, 9, 3, 64) for nodes, prefix in product((16, 64), (512, 4096))),  # SmolLM2-135M
    *(Selection(rows, columns, gated=gated)
      for rows, columns, gated in product((1, 10, 64), (32000, 49152, 128256, 151936), (False, True))),
    Selection(64, 128256, most=256),
    *(Compaction(layers, kept) for layers, kept in product((1, 32), (2, 8, 50))),
]  # fmt: skip
QUICK: list[Case] = [Attention(64, 4096), Attention(16, 4096), Selection(10, 128256, gated=True), Compaction(32, 8)]


def kind_of(case: Case) -> str:
    return type(case).__name__.lower()


class Floor(NamedTuple):
    """The least that any way must move and compute."""

    bytes: int
    operations: int


def floor_of(case: Case) -> Floor:
    if isinstance(case, Attention):
        slots = case.prefix + case.nodes
        cache, rows = 2 * slots * case.kv_heads * case.size, 2 * case.nodes * case.heads * case.size
        return Floor(2 * (cache + rows), 2 * rows * slots)
    if isinstance(case, Selection):
        return Floor(case.rows * case.columns * 2, 0)
    return Floor(2 * 2 * case.layers * case.kv_heads * (case.kept - 1) * case.size * 2, 0)


# ---------------------------------------------------------------------------------------------------- inputs


def kernel(name: str) -> Any:
    """A module of kernels/. Loaded when a case runs: it needs Triton, --dry-run does not."""
    return importlib.import_module(f"specengine_kernels.{name}")


class Tree(NamedTuple):
    """q [1, N, Hq, D], k and v [1, Hkv, L + N, D], words [1, N, N / 64], the dense mask bool [N, L + N]."""

    q: Tensor
    k: Tensor
    v: Tensor
    words: Tensor
    lengths: tuple[Tensor, Tensor, Tensor]
    mask: Tensor


def random_tree(nodes: int) -> Tensor:
    """bool [N, N]: node sees ancestor or itself."""
    generator = torch.Generator().manual_seed(nodes)
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[int(torch.randint(0, node, (), generator=generator))]
    return seen


def pack(seen: Tensor) -> Tensor:
    """int64 words of bool [N, M]."""
    padded = F.pad(seen, (0, -seen.shape[1] % 64)).view(seen.shape[0], -1, 64).long()
    return (padded << torch.arange(64)).sum(-1)


def tree_inputs(case: Attention, device: torch.device) -> Tree:
    slots = case.prefix + case.nodes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    seen = random_tree(case.nodes)
    mask = torch.cat([torch.ones(case.nodes, case.prefix, dtype=torch.bool), seen], 1)
    lengths = tuple(
        torch.tensor([value], dtype=torch.int32, device=device) for value in (case.prefix, case.nodes, case.nodes)
    )
    q = normal(1, case.nodes, case.heads, case.size)
    k, v = (normal(1, case.kv_heads, slots, case.size) for _ in range(2))
    return Tree(q, k, v, pack(seen)[None].to(device), lengths, mask.to(device))


class Layer(NamedTuple):
    logits: Tensor
    parents: Tensor


def layer_inputs(case: Selection, device: torch.device) -> Layer:
    # a peaked distribution under a random order of tokens, as a draft head gives
    ranks = torch.rand(case.rows, case.columns, device=device).argsort(1).argsort(1)
    logits = (-1.35 * (ranks + 1.0).log() + 0.1 * torch.randn(case.rows, case.columns, device=device)).bfloat16()
    return Layer(logits, -torch.rand(case.rows, device=device) * 4)


class Slab(NamedTuple):
    slab: Tensor
    path: Tensor
    count: Tensor
    prefix: Tensor


def slab_inputs(case: Compaction, device: torch.device) -> Slab:
    slab = torch.randn(case.layers, 2, case.kv_heads, case.prefix + 64, case.size, device=device, dtype=torch.bfloat16)
    spread = torch.linspace(0, 63, case.kept).round().int()
    count, prefix = (torch.tensor([value], dtype=torch.int32, device=device) for value in (case.kept, case.prefix))
    return Slab(slab, spread.to(device), count, prefix)


INPUTS: dict[str, Callable[..., Any]] = {"attention": tree_inputs, "selection": layer_inputs, "compaction": slab_inputs}


# ---------------------------------------------------------------------------------------------------- ways


class Unavailable(Exception):
    """This way cannot run the case here."""


@dataclass(frozen=True)
class Way:
    """`prepare(case, inputs)` does what is done once and not timed and returns the call; its result is `result`'s."""

    kind: str
    name: str
    prepare: Callable[[Any, Any], Callable[[], Any]]
    result: Callable[[Any, Any], Tensor]
    needs: str = "torch"  # a module
    captured: bool = True


def installed(way: Way) -> bool:
    return importlib.util.find_spec(way.needs) is not None


# ---- attention; results are [N, Hq, D]


def triton_attention(
    _: Attention, tree: Tree, *, tiles: tuple[int, ...] | None = None, splits: int | None = None
) -> Callable[[], Any]:
    module = kernel("tree_attention")
    cut = {"tiles": module.Tiles(*tiles) if tiles else None, "splits": splits}
    return lambda: module.tree_attention(tree.q, tree.k, tree.v, tree.words, *tree.lengths, **cut)


def sdpa(case: Attention, tree: Tree, *, backend: str) -> Callable[[], Any]:
    """The strong form: the heads of a group as rows, so keys are not repeated."""
    groups = case.heads // case.kv_heads
    q = tree.q[0].view(case.nodes, case.kv_heads, groups, case.size).permute(1, 2, 0, 3)
    q = q.reshape(1, case.kv_heads, groups * case.nodes, case.size).contiguous()
    slots = tree.k.shape[2]
    mask = torch.zeros(groups * case.nodes, -(-slots // 16) * 16, dtype=q.dtype, device=q.device)[:, :slots]
    mask.masked_fill_(~tree.mask.repeat(groups, 1), -math.inf)  # rows padded, as the kernels want them aligned
    chosen = getattr(torch.nn.attention.SDPBackend, backend)

    def call() -> Tensor:
        with torch.nn.attention.sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(q, tree.k, tree.v, mask[None, None])

    return call


def from_folded(case: Attention, out: Tensor) -> Tensor:
    return (
        out.view(case.kv_heads, -1, case.nodes, case.size)
        .permute(2, 0, 1, 3)
        .reshape(case.nodes, case.heads, case.size)
    )


def flex(case: Attention, tree: Tree) -> Callable[[], Any]:
    """FlexAttention with the words read by its mask function; compilation and block mask are not timed."""
    compiled, mask = compiled_flex(case, tree.q.device)
    q = tree.q.transpose(1, 2).contiguous()
    return lambda: compiled(q, tree.k, tree.v, block_mask=mask, enable_gqa=True)


@lru_cache(maxsize=1)  # one for all copies of the inputs: each new mask function would be compiled anew
def compiled_flex(case: Attention, device: torch.device) -> tuple[Callable[..., Any], Any]:
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    words, prefix = pack(random_tree(case.nodes)).to(device), case.prefix

    def sees(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        node = (slot - prefix).clamp(0)
        return (slot < prefix) | (((words[row, node // 64] >> (node % 64)) & 1) == 1)

    mask = attention.create_block_mask(sees, None, None, case.nodes, prefix + case.nodes, device=device)
    return torch.compile(attention.flex_attention, dynamic=False), mask


def flashinfer(case: Attention, tree: Tree) -> Callable[[], Any]:
    """FlashInfer's FA2 prefill with a packed mask; planning and packing are not timed."""
    wrapper = planned_flashinfer(case, tree.q.device)
    k, v = (cache[0].transpose(0, 1).contiguous() for cache in (tree.k, tree.v))
    return lambda: wrapper.run(tree.q[0], k, v)


@lru_cache(maxsize=1)
def planned_flashinfer(case: Attention, device: torch.device) -> Any:
    module, slots = importlib.import_module("flashinfer"), case.prefix + case.nodes
    mask = torch.cat([torch.ones(case.nodes, case.prefix, dtype=torch.bool), random_tree(case.nodes)], 1)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
    ends = [torch.tensor([0, size], dtype=torch.int32, device=device) for size in (case.nodes, slots)]
    shape = (case.heads, case.kv_heads, case.size)
    wrapper.plan(*ends, *shape, custom_mask=mask.flatten().to(device), q_data_type=torch.bfloat16)
    return wrapper


def first(_: Attention, out: Tensor) -> Tensor:
    return out[0]


# ---- selection; results are the scores in order, padded with -inf


def triton_selection(case: Selection, layer: Layer) -> Callable[[], Any]:
    module = kernel("candidate_selection")
    given = {
        "out": module.selection_for(layer.logits, case.most),
        "workspace": module.workspace_for(layer.logits, case.most),
    }
    gate = torch.tensor([LOG_MU if case.gated else -math.inf], device=layer.logits.device)
    return lambda: module.select_candidates(*layer, case.most, log_gate=gate, **given)


def eagle_selection(case: Selection, layer: Layer) -> Callable[[], Any]:
    """log_softmax, the best k of each row, their sums, the best of those: the operations of EAGLE's topK_genrate."""

    def call() -> Tensor:
        best = layer.logits.float().log_softmax(-1).topk(min(case.most, case.columns), -1)
        scores = (layer.parents[:, None] + best.values).view(-1).topk(case.most).values
        return scores.masked_fill(scores < scores[0] + LOG_MU, -math.inf) if case.gated else scores

    return call


def flat_selection(case: Selection, layer: Layer) -> Callable[[], Any]:
    def call() -> Tensor:
        scores = (layer.logits.float().log_softmax(-1) + layer.parents[:, None]).view(-1).topk(case.most).values
        return scores.masked_fill(scores < scores[0] + LOG_MU, -math.inf) if case.gated else scores

    return call


def flashinfer_selection(case: Selection, layer: Layer) -> Callable[[], Any]:
    """FlashInfer's softmax and top_k of each row, torch for the rest."""
    module = importlib.import_module("flashinfer")
    if not hasattr(module, "top_k"):
        raise Unavailable("this flashinfer has no top_k")

    def call() -> Tensor:
        best = module.top_k(module.sampling.softmax(layer.logits.float()), min(case.most, case.columns))[0]
        scores = (layer.parents[:, None] + best.log()).view(-1).topk(case.most).values
        return scores.masked_fill(scores < scores[0] + LOG_MU, -math.inf) if case.gated else scores

    return call


def as_given(_: Selection, scores: Tensor) -> Tensor:
    return scores


# ---- compaction; results are the moved slots


def triton_compaction(_: Compaction, slab: Slab) -> Callable[[], Any]:
    module = kernel("kv_compaction")

    def call() -> Tensor:
        module.compact_kv(*slab)
        return slab.slab

    return call


def layers_compaction(case: Compaction, slab: Slab) -> Callable[[], Any]:
    """index_select and copy_ of each layer's keys and of its values: the operations of EAGLE's cache update."""
    moved = slab.path.long() + case.prefix

    def call() -> Tensor:
        for cache in slab.slab.flatten(0, 1):
            cache[:, case.prefix : case.prefix + case.kept].copy_(cache.index_select(1, moved))
        return slab.slab

    return call


def slab_compaction(case: Compaction, slab: Slab) -> Callable[[], Any]:
    """One gather of the whole slab, then one copy."""
    moved = slab.path.long() + case.prefix

    def call() -> Tensor:
        slab.slab[:, :, :, case.prefix : case.prefix + case.kept] = slab.slab.index_select(3, moved)
        return slab.slab

    return call


def moved_slots(case: Compaction, slab: Tensor) -> Tensor:
    return slab[:, :, :, case.prefix : case.prefix + case.kept]


WAYS = [
    Way("attention", "specengine", triton_attention, first, "triton"),
    Way("attention", "specengine, 16 rows, no splits",
        partial(triton_attention, tiles=(16, 64, 4, 3), splits=1), first, "triton"),
    Way("attention", "torch sdpa math", partial(sdpa, backend="MATH"), from_folded),
    Way("attention", "torch sdpa efficient", partial(sdpa, backend="EFFICIENT_ATTENTION"), from_folded),
    Way("attention", "torch sdpa cudnn", partial(sdpa, backend="CUDNN_ATTENTION"), from_folded),
    Way("attention", "torch flex", flex, lambda case, out: out[0].transpose(0, 1), "triton"),
    Way("attention", "flashinfer fa2", flashinfer, lambda case, out: out, "flashinfer"),
    Way("selection", "specengine", triton_selection, lambda case, found: found.scores, "triton"),
    Way("selection", "eagle's torch operations", eagle_selection, as_given),
    Way("selection", "eagle's torch operations, eager", eagle_selection, as_given, captured=False),
    Way("selection", "torch topk of all", flat_selection, as_given),
    Way("selection", "flashinfer softmax, top_k", flashinfer_selection, as_given, "flashinfer"),
    Way("compaction", "specengine", triton_compaction, moved_slots, "triton"),
    Way("compaction", "torch, each layer", layers_compaction, moved_slots),
    Way("compaction", "torch, each layer, eager", layers_compaction, moved_slots, captured=False),
    Way("compaction", "torch, whole slab", slab_compaction, moved_slots),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------- correctness


def truth(case: Case, inputs: Any) -> Tensor:
    """float64, from the definition, as each way's `result` gives it."""
    if isinstance(case, Attention):
        q, k, v = (tensor[0].double() for tensor in inputs[:3])
        groups = case.heads // case.kv_heads
        scores = torch.einsum("nhd,hsd->hns", q, k.repeat_interleave(groups, 0)) * case.size**-0.5
        weights = scores.masked_fill(~inputs.mask, -math.inf).softmax(-1)
        return torch.einsum("hns,hsd->nhd", weights, v.repeat_interleave(groups, 0))
    if isinstance(case, Selection):
        scores = inputs.logits.double().log_softmax(-1) + inputs.parents.double()[:, None]
        best = scores.flatten().topk(case.most).values
        return best.masked_fill(best < best[0] + LOG_MU, -math.inf) if case.gated else best
    return inputs.slab[:, :, :, case.prefix + inputs.path.long()].clone()


def error_of(case: Case, got: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error of attention, largest difference of scores, count of wrong values of a compaction."""
    if isinstance(case, Attention):
        return float((got.double() - wanted).norm() / wanted.norm())
    if isinstance(case, Selection):
        near_gate = (got.double() - wanted).abs() > 1.0  # one of both is -inf: a score within rounding of the gate
        difference = (got.double() - wanted).masked_fill(near_gate, 0.0).nan_to_num(0.0).abs().max()
        return float(difference) if int(near_gate.sum()) <= 1 else math.inf
    return float((got != wanted).sum())


# ---------------------------------------------------------------------------------------------------- timing


class Times(NamedTuple):
    """Microseconds per call over the replays."""

    median: float
    p20: float
    p80: float


def replays(run: Callable[[], None], calls: int) -> Times:
    for _ in range(WARM_UPS):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    microseconds = sorted(1e3 * begin.elapsed_time(end) / calls for begin, end in events)
    return Times(statistics.median(microseconds), microseconds[REPLAYS // 5], microseconds[4 * REPLAYS // 5])


def measure(calls: list[Callable[[], Any]], captured: bool) -> Times:
    """The calls in turn, a multiple of CALLS in all, so that each is equally often among them."""
    rounds = -(-CALLS // len(calls))

    def all_calls() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    if not captured:
        return replays(all_calls, rounds * len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        all_calls()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_calls()
    return replays(graph.replay, rounds * len(calls))


def copies_for(case: Case, warm: bool) -> int:
    """Enough distinct inputs that none is still in the L2 cache when its turn comes again, as far as memory allows."""
    if warm:
        return 1
    cache, most = torch.cuda.get_device_properties(0).L2_cache_size, 16 if isinstance(case, Compaction) else 128
    return max(1, min(-(-COPIES_OF_L2 * cache // max(1, floor_of(case).bytes)), most))


def rows_of(case: Case, ways: list[Way], warm: bool) -> Iterator[dict[str, Any]]:
    device, kind = torch.device("cuda"), kind_of(case)
    inputs = [INPUTS[kind](case, device) for _ in range(copies_for(case, warm))]
    for way in ways:
        row = {"record": kind, "way": way.name, "cache": "warm" if warm else "cold", **asdict(case), **floors(case)}
        if not installed(way):
            yield row | {"skipped": f"needs {way.needs}"}
            continue
        try:
            checked = INPUTS[kind](case, device)
            wanted = truth(case, checked)
            error = error_of(case, way.result(case, way.prepare(case, checked)()), wanted)
            if not error <= MOST_ERROR[kind]:
                yield row | {"wrong": error}
                continue
            calls = [way.prepare(case, copy) for copy in inputs]
            yield row | {"error": error, **rounded(measure(calls, way.captured)._asdict())}
        except Exception as problem:  # a baseline that does not support a case is a row of the table
            yield row | {"skipped": f"{type(problem).__name__}: {str(problem)[:200]}"}


def floors(case: Case) -> dict[str, float]:
    """Microseconds for the least bytes and operations at this device's rates, where those are known."""
    floor, device = floor_of(case), torch.cuda.get_device_name()
    rates = next((rate for name, rate in RATES.items() if name in device), None)
    if rates is None:
        return {}
    return rounded({"bytes_us": 1e6 * floor.bytes / rates[0], "operations_us": 1e6 * floor.operations / rates[1]})


def launch_floor() -> dict[str, Any]:
    """A chain of kernels that add to one number."""
    number = torch.zeros(1, device="cuda")
    return {"record": "launch floor", **rounded(measure([lambda: number.add_(1.0)], captured=True)._asdict())}


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


# ---------------------------------------------------------------------------------------------------- command


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="write the table as JSON lines, with provenance")
    parser.add_argument("--kernel", choices=sorted(INPUTS), action="append", help="only this kernel; may be repeated")
    parser.add_argument("--way", action="append", help="only ways whose name contains this; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one or two cases of each kernel")
    parser.add_argument("--dry-run", action="store_true", help="list cases and ways, run nothing")
    return parser.parse_args(arguments)


def chosen(args: argparse.Namespace) -> Iterator[tuple[Case, list[Way], bool]]:
    for case in QUICK if args.quick else CASES:
        kind = kind_of(case)
        if args.kernel and kind not in args.kernel:
            continue
        ways = [way for way in WAYS if way.kind == kind]
        if args.way:
            ways = [way for way in ways if any(part in way.name for part in args.way)]
        # the layer's logits were just written where selection follows; the caches of attention were not
        for warm in (True, False) if isinstance(case, Selection) else (False,):
            yield case, ways, warm


def versions() -> dict[str, Any]:
    found = {}
    for name in ("triton", "flashinfer-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {"record": "versions", **found, "cuda": torch.version.cuda}


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.dry_run:
        for case, ways, warm in chosen(args):
            names = [way.name + ("" if installed(way) else f" (needs {way.needs})") for way in ways]
            cache = "warm" if warm else "cold"
            print(json.dumps({"record": kind_of(case), **asdict(case), "cache": cache, "ways": names}))
        return
    if not torch.cuda.is_available():
        sys.exit("bench.kernels needs a CUDA device; --dry-run lists what it would run")
    rows = [versions(), launch_floor()]
    for case, ways, warm in chosen(args):
        for row in rows_of(case, ways, warm):
            print(json.dumps(row), flush=True)
            rows.append(row)
        torch.cuda.empty_cache()
        torch.compiler.reset()  # flex compiles anew for each shape, and gives up after a few
    if args.out:
        from bench import provenance  # here, as --dry-run should not load the engine

        provenance.write(args.out, rows)


if __name__ == "__main__":
    main()
