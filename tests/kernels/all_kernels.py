"""Run every kernel on a random tree against its own reference.

`python -m tests.kernels.all_kernels COUNT` runs each on so many of them; compute-sanitizer watches that on a device.
Sizes that make other programs come from small sets, as a device compiles each; contents differ with every seed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from specengine_kernels import (
    candidate_selection,
    coupling,
    entropy,
    frontier,
    kv_compaction,
    packed_linear,
    recurrence,
    rms_norm,
    rope_store,
    silu_mul,
    strict_attention,
    top_children,
    tree_attention,
    verification,
)
from torch import Tensor

from specengine import ops
from tests import toy

ROWS, COLUMNS, MOST = (1, 3, 9), (1, 77, 1024, 2999), (1, 7, 60)


def number(value: int, device: torch.device | str) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(seed: int, device: str) -> None:
    nodes, prefix = 1 + seed * 7 % 97, seed * 31 % 200
    kind = (
        torch.float32
        if device == "cpu"
        else (torch.float32, torch.float16, torch.bfloat16)[seed % 3]
    )
    tree = toy.random_tree(seed, nodes, 500)
    q = random(1, nodes, 6, 32, seed=seed).to(device, kind)
    k, v = (random(1, 2, prefix + nodes + 5, 32, seed=seed + i).to(device, kind) for i in (1, 2))
    k[:, :, prefix + nodes :], v[:, :, prefix + nodes :] = math.nan, math.nan
    given = (
        tree.ancestors[None].to(device),
        *(number(value, device) for value in (prefix, nodes, nodes)),
    )
    out = tree_attention.tree_attention(q, k, v, *given)
    wanted, _ = tree_attention.reference(q.double(), k, v, *given)
    limit = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[kind]
    assert (out.double() - wanted).norm() <= limit * wanted.norm(), seed


def strict(seed: int, device: str) -> None:
    nodes, prefix = 1 + seed * 7 % 64, seed * 53 % 1200
    kind = (
        torch.float32
        if device == "cpu"
        else (torch.float32, torch.float16, torch.bfloat16)[seed % 3]
    )
    tree = toy.random_tree(seed, nodes, 500)
    paths = ops.order_paths(tree.ancestors)
    q = random(1, nodes, 6, 32, seed=seed).to(device, kind)
    k, v = (random(1, 2, prefix + nodes + 5, 32, seed=seed + i).to(device, kind) for i in (1, 2))
    k[:, :, prefix + nodes :], v[:, :, prefix + nodes :] = math.nan, math.nan
    given = (
        *(part[None].to(device) for part in paths),
        number(prefix, device),
        number(nodes, device),
    )
    out = strict_attention.strict_attention(q, k, v, *given)
    wanted = strict_attention.reference(q.double(), k, v, *given)
    limit = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[kind]
    assert (out.double() - wanted).norm() <= limit * wanted.norm(), seed


def selection(seed: int, device: str) -> None:
    rows, columns, most = ROWS[seed % 3], COLUMNS[seed % 4], MOST[seed // 4 % 3]
    logits, parents = random(rows, columns, seed=seed) * 3, -random(rows, seed=seed + 1).abs()
    found = candidate_selection.select_candidates(
        logits.to(device), parents.to(device), most, log_gate=-3.0
    )
    wanted = candidate_selection.reference(logits.double(), parents.double(), most, log_gate=-3.0)
    kept = min(int(found.count), int(wanted.count))
    assert abs(int(found.count) - int(wanted.count)) <= 1, seed  # rounding at the gate
    assert torch.allclose(found.scores[:kept].cpu().double(), wanted.scores[:kept], atol=2e-5), seed


def entropies(seed: int, device: str) -> None:
    rows, columns, top = ROWS[seed % 3], COLUMNS[seed % 4], 1 + seed * 17 % 1200
    logits = random(rows, columns, seed=seed) * (3.0, 1e-3, 30.0)[seed % 3]
    found = entropy.top_entropy(logits.to(device), top).cpu()
    torch.testing.assert_close(
        found, entropy.reference(logits, top), atol=1e-5, rtol=2e-6, msg=str(seed)
    )


def children(seed: int, device: str) -> None:
    rows, columns = ROWS[seed % 3], COLUMNS[seed % 4]
    logits, k = random(rows, columns, seed=seed) * 3, min(columns, 1 + seed * 7 % 90)
    logits = logits.round() if seed % 2 else logits
    found, wanted = (
        top_children.top_children(logits.to(device), k),
        top_children.reference(logits, k),
    )
    assert torch.equal(found[1].cpu(), wanted[1]), seed
    torch.testing.assert_close(found[0].cpu(), wanted[0], atol=1e-5, rtol=2e-6, msg=str(seed))


def choices(seed: int, device: str) -> None:
    rows, columns = ROWS[seed % 3], COLUMNS[seed % 4]
    logits, positions = random(rows, columns, seed=seed) * 3, torch.arange(rows) * (seed + 1)
    drawn = verification.choose_tokens(
        logits.to(device),
        positions.to(device),
        torch.tensor([seed], device=device),
        torch.ones(1, device=device),
    )
    best = verification.choose_tokens(logits.to(device))
    assert drawn.tolist() == verification.reference(logits, positions, seed).tolist(), seed
    assert best.tolist() == logits.argmax(1).tolist(), seed


def couplings(seed: int, device: str) -> None:
    rows, columns = ROWS[seed % 3], COLUMNS[seed % 4]
    logits = random(rows, columns, seed=seed) * 3
    positions = (torch.arange(rows) // 2 + seed) * (1 + 2**33 * (seed % 2))
    tokens = (
        None
        if seed % 3
        else torch.randperm(4 * columns, generator=torch.Generator().manual_seed(seed))[:columns]
    )
    scale = torch.tensor([0.3 * seed], device=device)
    on_device = None if tokens is None else tokens.to(device)
    key = torch.tensor([seed - 2**62], device=device)
    found = coupling.couple(logits.to(device), on_device, positions.to(device), key, scale)
    wanted = coupling.reference(logits, tokens, positions, seed - 2**62, 0.3 * seed)
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-4, rtol=1e-5, msg=str(seed))


def walks(seed: int, device: str) -> None:
    size = (1, 9, 64, 65, 200)[seed % 5]
    tree = toy.random_tree(seed, size, max(3, size // 8))
    chosen = torch.randint(
        -1, max(3, size // 8), (size,), generator=torch.Generator().manual_seed(seed)
    )
    path, bonus = (torch.zeros(n, dtype=torch.int64, device=device) for n in (size, 1))
    count = number(0, device)
    given = (tensor.to(device) for tensor in (tree.tokens, tree.parents, chosen))
    verification.walk(*given, number(size, device), path, count, bonus)
    wanted = verification.reference_walk(tree.tokens, tree.parents, chosen)
    assert (path[: int(count)].tolist(), int(bonus)) == wanted, seed


def records(seed: int, device: str) -> None:
    size, longest = (1, 9, 64)[seed % 3], (5, 16)[seed % 2]
    tree, live = toy.random_tree(seed, size, 500), seed % (min(size, longest) + 1)
    path, bonus = torch.arange(size), torch.tensor([seed - 1])
    sums = (-random(size, seed=seed + n).abs() for n in range(2))
    both = verification.Verified(tree.tokens, tree.parents, tree.depths, *sums, path * 3)
    walked = path, number(live, "cpu"), bonus
    counts = seed, size, 3, 2 * seed, 0
    wanted = verification.reference_record(both, walked, counts, longest)
    record = torch.full((len(wanted[0]),), -77, device=device)
    root = torch.full((1,), -77, device=device)
    found = verification.record_walk(
        verification.Verified(*(part.to(device) for part in both)),
        tuple(part.to(device) for part in walked),
        tuple(number(count, device) for count in counts),
        record,
        root,
        longest,
    )
    assert (record.tolist(), *(part.tolist() for part in found)) == wanted, seed
    assert int(root) == max(seed - 1, 0)


def compaction(seed: int, device: str) -> None:
    later = torch.randperm(60, generator=torch.Generator().manual_seed(seed))[: seed % 30] + 1
    path = torch.tensor([0, *sorted(later.tolist())], device=device)
    slab = random(2, 2, 2, 80, 16, seed=seed).to(device)
    counts = number(len(path), device), number(seed % 15, device)
    wanted = kv_compaction.reference(slab, path, *counts)
    kv_compaction.compact_kv(slab, path, *counts)
    assert torch.equal(slab, wanted), seed


def growth(seed: int, device: str) -> None:
    capacity = (2, 64, 65, 151)[seed % 4]
    whole, words = torch.zeros(capacity, dtype=torch.int64, device=device), -(-capacity // 64)
    ancestors = torch.zeros(capacity, words, dtype=torch.int64, device=device)
    ancestors[0, 0] = 1
    real = torch.zeros(capacity, device=device)
    arrays = [whole.clone() for _ in range(3)] + [real.clone() for _ in range(2)]
    tree = frontier.Tree(*arrays, ancestors, number(1, device))
    tree.parents[0] = -1
    for layer in range(3):
        size, most = int(tree.size), MOST[(seed + layer) % 3]
        generator = torch.Generator().manual_seed(seed + layer)
        parents, tokens = (torch.randint(0, size, (most,), generator=generator) for _ in range(2))
        edges, count = -random(most, seed=seed).abs(), (seed // 3 + layer) % (most + 1)
        before = frontier.Tree(*(tensor.cpu() for tensor in tree))
        after, appended, wrong = frontier.reference(before, parents, tokens, edges, count)
        ids, refused = torch.full((most,), -77, device=device), number(0, device)
        given = (tensor.to(device) for tensor in (parents, tokens, edges))
        frontier.append_nodes(tree, *given, number(count, device), ids, refused)
        assert (ids.tolist(), bool(refused)) == (appended, wrong), seed
        for found, wanted in zip(tree, after, strict=True):
            assert torch.equal(found.cpu(), wanted), seed


def gathering(seed: int, device: str) -> None:
    rows, width, channels = 2 + seed * 11 % 150, 1 + seed % 16, (48, 1030)[seed % 2]
    states, table = (random(rows, channels, seed=seed + i).to(device) for i in (3, 4))
    generator = torch.Generator().manual_seed(seed)
    sources, tokens = (
        torch.randint(0, rows, (width,), generator=generator).to(device) for _ in range(2)
    )
    out = torch.empty(2, width, channels, device=device)
    frontier.gather_rows(states, sources, table, tokens, out[0], out[1])
    assert torch.equal(out[0], states[sources]), seed
    assert torch.equal(out[1], table[tokens]), seed


def levels(seed: int, device: str) -> None:
    """The tree's nodes on three levels, each drafted from once."""
    nodes = toy.random_tree(seed, 1 + seed * 7 % 97, 500)
    capacity, words = len(nodes), (1, 3)[seed % 2]
    arrays = [array.to(device) for array in nodes.arrays]
    tree = frontier.Tree(*arrays, number(capacity, device))
    seen = torch.zeros(capacity + 1, words, dtype=torch.int64, device=device)
    used, passes = number(0, device), number(0, device)
    for depth in range(3):
        level = (nodes.depths[:capacity] == depth).nonzero()[:16, 0]
        ids = torch.full((16,), -77)
        ids[: len(level)] = level
        before = frontier.Tree(*(array.cpu() for array in tree))
        given = level.tolist(), 16, 9, int(used), seen.cpu()
        wanted, after = frontier.reference_rows(before, *given)
        counts = number(len(level), device), number(9, device), used, passes
        rows = frontier.level_rows(tree, ids.to(device), *counts, seen, None)
        for found, means in zip(rows[:6], wanted, strict=False):
            assert torch.equal(found.cpu(), means), seed
        assert torch.equal(seen[:-1].cpu(), after[:-1]), seed
    assert int(passes) == 1 + int(nodes.depths[:capacity].max().clamp(max=2)), seed


def entries(seed: int, device: str) -> None:
    rows, width, channels = 2 + seed * 11 % 150, 1 + seed % 16, (48, 1030)[seed % 2]
    states, table = (random(rows, channels, seed=seed + i).to(device) for i in (3, 4))
    weights = random(channels, seed=seed).to(device), random(channels, seed=seed + 1).to(device)
    generator = torch.Generator().manual_seed(seed)
    sources, tokens = (
        torch.randint(0, rows, (width,), generator=generator).to(device) for _ in range(2)
    )
    found, wanted = (
        run(states, sources, table, tokens, weights, 1e-5)
        for run in (rms_norm.gather_norms, rms_norm.reference_of_rows)
    )
    assert torch.equal(found[1], wanted[1]), seed
    torch.testing.assert_close(found[0], wanted[0], rtol=3e-6, atol=1e-6)


def rotation(seed: int, device: str) -> None:
    n, size, start = 1 + seed % 20, (16, 64, 80)[seed % 3], seed % 7
    query, key, value = (
        random(n, heads, size, seed=seed + heads).to(device) for heads in (6, 2, 2)
    )
    positions = torch.randint(0, 99, (n,), generator=torch.Generator().manual_seed(seed)).to(device)
    angles, cache = (
        random(99, size // 2, seed=seed).to(device),
        random(2, 2, start + n, size, seed=seed).to(device),
    )
    numbers = torch.tensor([start], device=device), number(seed % (n + 1), device)
    given = (query, key, value, positions, angles.cos(), angles.sin(), cache[0], cache[1], *numbers)
    weights = [random(size, seed=seed + i).to(device) for i in (5, 6)]
    for norms, stepwise in ((), False), ((*weights, 1e-5), True), ((), True):
        names = dict(zip(("q_norm", "k_norm", "eps"), norms, strict=False))
        wanted = rope_store.reference(*given, **names, stepwise=stepwise)
        found = rope_store.rope_store(*given, **names, stepwise=stepwise), cache[0], cache[1]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, msg=str(seed))


def norms(seed: int, device: str) -> None:
    rows, channels = 1 + seed % 20, (48, 576, 1024, 4096)[seed % 4]
    kind = (
        torch.float32
        if device == "cpu"
        else (torch.float32, torch.float16, torch.bfloat16)[seed % 3]
    )
    states, residual = (random(rows, channels, seed=seed + i).to(device, kind) for i in (1, 2))
    weight, before = random(channels, seed=seed).to(device, kind), residual if seed % 2 else None
    found, wanted = (
        run(states, before, weight, 1e-5) for run in (rms_norm.add_rms_norm, rms_norm.reference)
    )
    assert torch.equal(found[1], wanted[1]), seed
    torch.testing.assert_close(
        found[0], wanted[0], rtol=3e-6 if kind is torch.float32 else 2e-2, atol=1e-6
    )


def gates(seed: int, device: str) -> None:
    rows, channels = 1 + seed % 20, (77, 1024, 1500)[seed % 3]
    kind = (
        torch.float32
        if device == "cpu"
        else (torch.float32, torch.float16, torch.bfloat16)[seed // 3 % 3]
    )
    both = (random(rows, 2 * channels, seed=seed) * 5).to(device, kind)
    found, wanted = (
        run(both[:, :channels], both[:, channels:])
        for run in (silu_mul.silu_mul, silu_mul.reference)
    )
    torch.testing.assert_close(
        found, wanted, rtol=3e-6 if kind is torch.float32 else 2e-2, atol=1e-6
    )


def states(seed: int, device: str) -> None:
    """A tree's rows, and the fold along the path of its last, whose state has the same bits."""
    sizes = (1, 2, 16, 12), (2, 6, 20, 40), (1, 3, 7, 33)
    nodes, (shared, heads, keys, values) = 1 + seed * 7 % 41, sizes[seed % 3]
    tree = toy.random_tree(seed, nodes, 500)
    lineage = ops.lineage_of(tree.ancestors, 4)
    query, key = (random(nodes, shared, keys, seed=seed + i).to(device) / keys**0.5 for i in (1, 2))
    value, state = (
        random(size, heads, values, seed=seed).to(device) for size in (nodes, heads * keys)
    )
    state = state[:, 0].view(heads, keys, values).contiguous()
    scalars = [random(nodes, heads, seed=seed + i).sigmoid().to(device) for i in (3, 4)]
    stored = [query.new_full((nodes + 3, *part), math.nan) for part in ((heads,), (shared, keys))]
    stored.append(query.new_full((nodes + 3, heads, values), math.nan))
    scratch = query.new_full((nodes, heads, keys, values), math.nan)
    rows = *(part.to(device) for part in (lineage.parents, lineage.branches)), scratch, *stored
    arguments, delta = (query, key, value, *scalars, state), seed % 2 == 0
    outputs = recurrence.tree_recurrence(*arguments, rows, delta=delta)
    parents = tree.parents.tolist()
    path = [nodes - 1]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    ids = torch.tensor(path + [0] * (nodes + 3 - len(path)), device=device)
    chain = [part[path].contiguous() for part in arguments[:5]]
    text, folded = state.clone(), state[None].clone()
    recurrence.tree_recurrence(*chain, text, None, delta=delta)
    layers = [part[None] for part in stored]
    recurrence.advance_states(folded, *layers, ids, number(len(path), device))
    wide = [part.double() for part in arguments]
    expected, updates, states = recurrence.reference(*wide, parents, delta=delta)
    for one, other in ((outputs, expected), (stored[2][:nodes], updates)):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5, msg=str(seed))
    assert torch.equal(folded[0], text), seed
    torch.testing.assert_close(text.double(), states[-1], rtol=2e-5, atol=2e-5, msg=str(seed))


def convolutions(seed: int, device: str) -> None:
    nodes, channels, taps = 1 + seed * 7 % 23, (48, 300)[seed % 2], 2 + seed % 4
    kind = (
        torch.float32
        if device == "cpu"
        else (torch.float32, torch.float16, torch.bfloat16)[seed // 2 % 3]
    )
    sources = ops.lineage_of(toy.random_tree(seed, nodes, 500).ancestors, taps).sources.to(device)
    inputs = random(nodes + taps - 1, channels + 16, seed=seed).to(device, kind)[:, :channels]
    weight, bias = (random(channels, size, seed=seed + 1).to(device, kind) for size in (taps, 1))
    arguments = inputs, weight, bias[:, 0].contiguous() if seed % 3 else None, sources
    outputs = recurrence.tree_convolution(*arguments, silu=seed % 2 == 0)
    expected = recurrence.convolution_reference(*arguments, silu=seed % 2 == 0)
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[kind]
    torch.testing.assert_close(outputs, expected, rtol=limit, atol=limit, msg=str(seed))


# groups of inputs that share a scale, of 0 all; bits of a code; how scales are stored, and whether there are offsets
QUANTISED: dict[str, tuple[int, int, torch.dtype, bool]] = {
    "rows": (0, 8, torch.float32, False),
    "q8_0": (32, 8, torch.float16, False),
    "f8_e4m3": (64, 8, torch.float32, False),
    "q6_k": (16, 8, torch.int8, False),
    "q4_0": (32, 4, torch.float16, False),
    "q4_k": (32, 4, torch.uint8, True),
    "groups": (64, 4, torch.float16, True),
}


def quantised(
    kind: str, outputs: int, inputs: int, seed: int, device: torch.device | str = "cpu"
) -> packed_linear.Weight:
    """Return random codes, scales, offsets and units as a kind of GGUF's, or another, has them."""
    group, bits, stored, has_offsets = QUANTISED[kind]
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (outputs, columns), generator=generator).to(device, dtype)

    def scales(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=generator) / 64).to(device)

    groups = inputs // group if group else 1
    codes = (
        whole(-127, 128, inputs, torch.int8)
        if bits == 8
        else whole(0, 256, inputs // 2, torch.uint8)
    )
    if kind == "f8_e4m3":
        codes[(codes == 127) | (codes == -1)] = 0  # NaN
        codes = codes.view(torch.float8_e4m3fn)
    if stored.is_floating_point:
        both = [scales(outputs, groups).to(stored) for _ in range(2)]
        return packed_linear.Weight(codes, both[0], both[1] if has_offsets else None)
    low = -32 if stored is torch.int8 else 0
    both = [whole(low, 64, groups, stored) for _ in range(2)]
    units = scales(outputs, inputs // 256, 1 + has_offsets).half()
    return packed_linear.Weight(codes, both[0], both[1] if has_offsets else None, units)


def packed_products(seed: int, device: str) -> None:
    kind = list(QUANTISED)[seed % len(QUANTISED)]
    rows, outputs = (1, 16, 17, 64, 70)[seed % 5], (1, 77, 300)[seed // 3 % 3]
    unit = 256 if QUANTISED[kind][2] in (torch.int8, torch.uint8) else QUANTISED[kind][0]
    inputs = (unit or 77) * (1 + seed * 7 % 5)
    dtype = (
        torch.float32
        if device == "cpu"
        else (torch.float32, torch.float16, torch.bfloat16)[seed // 2 % 3]
    )
    weight = quantised(kind, outputs, inputs, seed, device)
    states = random(rows, inputs, seed=seed + 1).to(device, dtype)
    bias = random(outputs, seed=seed + 2).to(device, dtype) if seed % 2 else None
    product = packed_linear.packed_linear(states, weight, bias)
    wanted = states.double() @ packed_linear.numbers(weight).double().T
    wanted = wanted if bias is None else wanted + bias.double()
    limit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (product.double() - wanted).norm() <= limit * wanted.norm(), seed


KERNELS: dict[str, Callable[[int, str], None]] = {
    "attention": attention,
    "strict": strict,
    "selection": selection,
    "children": children,
    "entropies": entropies,
    "choices": choices,
    "couplings": couplings,
    "walks": walks,
    "records": records,
    "compaction": compaction,
    "growth": growth,
    "gathering": gathering,
    "levels": levels,
    "entries": entries,
    "rotation": rotation,
    "norms": norms,
    "gates": gates,
    "packed products": packed_products,
    "states": states,
    "convolutions": convolutions,
}

if __name__ == "__main__":
    for run in KERNELS.values():
        for case in range(int(sys.argv[1])):
            run(case, "cuda")
    torch.cuda.synchronize()
