"""choose_tokens and walk against the engine's own rule, and against float64 written apart from the kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
import triton
import triton.language as tl
from specengine_kernels import verification as kernel
from transformers.generation import TemperatureLogitsWarper

from specengine import cycle as verification, ops
from specengine.request.sampling import History, Sampler
from tests import toy
from tests.kernels.sizes import sizes

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def both_noises(bits, near, exact, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    own = tl.load(bits + at).to(tl.uint32)
    tl.store(near + at, kernel._near_noise(own).to(tl.float64))
    tl.store(exact + at, kernel._noise(own))


KINDS = (torch.float32, torch.float16, torch.bfloat16)


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def choose(
    logits: Tensor, positions: list[int], seed: int | None, temperature: float = 1.0
) -> list[int]:
    """The choices from poisoned outputs and scratch, twice, the second time on what the first one left."""
    logits = logits.to(DEVICE)
    chosen = torch.full((len(logits),), -99, device=DEVICE)
    workspace = kernel.workspace_for(logits)
    workspace.values.fill_(math.nan)
    workspace.columns.fill_(123456789)
    given_seed = None if seed is None else torch.tensor([signed(seed)], device=DEVICE)
    places, temperature = (
        torch.tensor(positions, device=DEVICE),
        torch.tensor([temperature], device=DEVICE),
    )
    found = []
    for _ in range(2):
        kernel.choose_tokens(
            logits, places, given_seed, temperature, chosen=chosen, workspace=workspace
        )
        found.append(chosen.tolist())
    assert found[0] == found[1]
    return found[0]


def by_the_sampler(
    logits: Tensor, positions: list[int], seed: int | None, temperature: float
) -> list[int]:
    """Return the choices of the engine's own sampler, row by row; -1 for None."""
    processors = [] if seed is None else [TemperatureLogitsWarper(temperature)]
    sampler, found = Sampler(processors, seed), []
    for row, position in zip(logits.cpu(), positions, strict=True):
        token = sampler.choose(row, History([0] * position, position))
        found.append(-1 if token is None else token)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 3, 1025, 2048])
@pytest.mark.parametrize("seed", [None, 7])
def test_choices_are_the_samplers(columns: int, kind: torch.dtype, seed: int | None) -> None:
    logits = normal(3, columns, seed=columns).to(kind)
    positions = [0, 5, 40]
    assert choose(logits, positions, seed, 0.7) == by_the_sampler(logits, positions, seed, 0.7)


@examples(10)
@given(
    rows=st.integers(1, 6),
    columns=sizes(3000),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.05, 3.0),
    ties=st.booleans(),
    holes=st.floats(0, 1),
)
def test_draws_are_the_samplers(
    rows: int, columns: int, seed: int, temperature: float, ties: bool, holes: float
) -> None:
    random = np.random.default_rng([seed, columns])
    logits = torch.from_numpy(random.normal(size=(rows, columns)) * 4).float()
    logits = logits.round() if ties else logits
    odd = torch.tensor([math.nan, math.inf, -math.inf])[
        torch.from_numpy(random.integers(0, 3, (rows, columns)))
    ]
    logits = torch.where(torch.from_numpy(random.random((rows, columns)) < holes**4), odd, logits)
    positions = random.integers(0, 300, rows).tolist()
    assert choose(logits, positions, seed, temperature) == by_the_sampler(
        logits, positions, seed, temperature
    )
    assert choose(logits, positions, None) == by_the_sampler(logits, positions, None, 1.0)


@pytest.mark.parametrize("position", [0, 2**31, 2**32 + 5, 2**40])
def test_noise_is_philox_of_seed_and_position(position: int) -> None:
    seeds = np.array([0, 1, 2**32, 2**63 + 11, 2**64 - 1], dtype=np.uint64)
    wanted = toy.keyed_gumbel(seeds, position, 1300).argmax(1).tolist()
    flat = torch.zeros(1, 1300)
    assert [choose(flat, [position], int(seed))[0] for seed in seeds] == wanted
    assert [
        int(kernel.reference(flat, torch.tensor([position]), int(seed))) for seed in seeds
    ] == wanted
    assert [ops.keyed_gumbel_argmax(flat[0], int(seed), position) for seed in seeds] == wanted


def test_noise_of_another_position_is_another() -> None:
    flat = torch.zeros(5, 900)
    assert len(set(choose(flat, list(range(5)), 3))) > 3


@pytest.mark.parametrize("columns", [2000, 70000])
def test_the_first_of_equals_wins_across_tiles_and_slices(columns: int) -> None:
    logits = torch.full((2, columns), -1.0)
    for column in (columns - 1, columns // 2, 1030):
        logits[:, column] = 5.0
    assert kernel.slices_for(*logits.shape) > 1
    assert choose(logits, [0, 1], None) == [min(1030, columns // 2)] * 2


def test_of_equals_in_one_lane_the_first_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", 1)
    logits = torch.full((1, 3 * kernel.TILE), -1.0)
    logits[0, 7 :: kernel.TILE] = 5.0
    assert kernel.slices_for(*logits.shape) == 1
    assert choose(logits, [0], None) == [7]


def test_skipped_tiles_cannot_win() -> None:
    """One column stands out by less than the largest noise, so every tile but the hopeless ones has to be drawn."""
    for seed in range(2):
        logits = normal(2, 6000, seed=seed, scale=0.5)
        logits[:, 0] += 12.0
        logits[1, 4000] = 25.0
        assert choose(logits, [3, 9], seed) == by_the_sampler(logits, [3, 9], seed, 1.0)


def noise(seed: int, position: int, columns: int) -> Tensor:
    uniform = kernel._uniform(seed, position, columns)
    return -torch.log(-torch.log(uniform))


@pytest.mark.parametrize("gap", [0.0, 1e-6, -1e-6, 3e-4, -3e-4, 0.5, -0.5])
def test_columns_that_float32_does_not_tell_apart(
    gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two columns of one lane, of which the later one is better by `gap`: the lane passes one of them over."""
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", 1)
    columns, first, later = 3000, 37, 37 + 2 * kernel.TILE
    for seed in range(3):
        g = noise(seed, 5, columns)
        logits = torch.full((1, columns), -40.0)
        logits[0, first] = 2.0
        logits[0, later] = (2.0 + g[first] - g[later] + gap).float()
        exact = logits[0].double() + g
        wanted = first if exact[first] >= exact[later] else later
        assert int(exact.argmax()) == wanted
        assert kernel.slices_for(1, columns) == 1
        assert choose(logits, [5], seed) == [wanted] == by_the_sampler(logits, [5], seed, 1.0)


def test_noise_that_is_lost_beside_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sums are equal, and so the first column wins, though the noise of others is larger."""
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", 1)
    for scale in (1e30, 3e38):
        assert choose(torch.full((1, 2500), scale), [3], 1, 0.5) == [0]
        assert choose(torch.full((1, 2500), -scale), [3], 1, 1.0) == [0]
    large = torch.full((1, 2500), 2.0**24)
    assert choose(large, [3], 1) == by_the_sampler(large, [3], 1, 1.0)


def test_noise_in_float32_is_as_near_as_is_counted_on() -> None:
    edges = [
        0,
        1,
        2,
        2**8,
        2**24,
        2**31 - 1,
        2**31,
        2**32 - 2**24,
        2**32 - 2**24 - 1,
        2**32 - 300,
        2**32 - 2,
        2**32 - 1,
    ]
    drawn = torch.randint(
        0, 2**32, (4096 - 3 * len(edges),), generator=torch.Generator().manual_seed(0)
    ).tolist()
    near_one = [2**32 - 1 - 3**power % 2**32 for power in range(2 * len(edges))]
    bits = torch.tensor([*edges, *near_one, *drawn])[:4096]
    out = torch.empty(2, len(bits), device=DEVICE, dtype=torch.float64)
    both_noises[(1,)](bits.to(DEVICE), out[0], out[1], SIZE=len(bits))
    assert (out[0] - out[1]).abs().max() <= kernel.NEAR / 4
    uniform = (bits.double() + 0.5) / 2.0**32
    torch.testing.assert_close(
        out[1].cpu(), -torch.log(-torch.log(uniform)), atol=1e-12, rtol=1e-12
    )


def test_rows_without_a_finite_logit_are_flagged() -> None:
    logits = normal(4, 2500)
    logits[0], logits[1], logits[2] = math.nan, -math.inf, math.inf
    logits[3, :-1] = math.nan
    for seed in (None, 3):
        assert choose(logits, [1, 2, 3, 4], seed) == [-1, -1, -1, 2499]


def test_rows_of_a_larger_buffer() -> None:
    buffer = normal(4, 900)
    assert choose(buffer[1:3, 100:700], [4, 4], 11) == by_the_sampler(
        buffer[1:3, 100:700], [4, 4], 11, 1.0
    )


def test_a_wrong_seed_position_or_temperature_is_seen() -> None:
    """The checks above can fail: each of the arguments matters."""
    logits = normal(9, 400, scale=1.0)
    positions = list(range(9))
    wanted = by_the_sampler(logits, positions, 5, 0.7)
    assert choose(logits, positions, 5, 0.7) == wanted
    assert choose(logits, positions, 6, 0.7) != wanted
    assert choose(logits, [place + 1 for place in positions], 5, 0.7) != wanted
    assert choose(logits, positions, 5, 2.0) != wanted


# ---- the walk


def walked(
    tokens: Tensor, parents: Tensor, chosen: Tensor, size: int | None = None
) -> tuple[list[int], int]:
    n = len(tokens)
    path = torch.full((n,), -7, device=DEVICE)
    count, bonus = (
        torch.full((1,), -7, dtype=torch.int32, device=DEVICE),
        torch.full((1,), -7, device=DEVICE),
    )
    nodes = torch.tensor([n if size is None else size], dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        kernel.walk(
            *(given.to(DEVICE) for given in (tokens, parents, chosen)), nodes, path, count, bonus
        )
    kept = int(count)
    assert (path[kept:] == -7).all()
    return path[:kept].tolist(), int(bonus)


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    size=st.one_of(st.integers(1, 90), st.sampled_from([64, 65, 128, 256])),
    undefined=st.sampled_from([0.0, 0.3]),
)
def test_the_walk_is_the_engines(seed: int, size: int, undefined: float) -> None:
    tree = toy.random_tree(seed, size, max(3, size // 8))
    random = np.random.default_rng(seed)
    choices = []
    for node in range(size):
        children = tree.tokens[tree.parents == node].tolist()
        choices.append(int(random.choice(children)) if children and random.random() < 0.9 else 99)
    choices = [choice if random.random() >= undefined else -1 for choice in choices]
    path, committed = verification.walk(
        tree, lambda node: None if choices[node] < 0 else choices[node], lambda _: False
    )
    chosen = torch.tensor(choices)
    found, bonus = walked(tree.tokens, tree.parents, chosen)
    assert kernel.reference_walk(tree.tokens, tree.parents, chosen) == (found, bonus)
    if choices[0] < 0:
        assert (found, bonus) == ([], -1)
        return
    assert found == path
    assert [*tree.tokens[found[1:]].tolist(), bonus] == committed
    if undefined == 0.0:
        assert (
            found
            == ops.walk(tree.tokens, tree.parents, chosen, tree.size).nodes[: len(found)].tolist()
        )


def test_padding_behind_the_tree_is_not_entered() -> None:
    tokens, parents = torch.tensor([1, 2, 3, 3]), torch.tensor([-1, 0, 1, 1])
    chosen = torch.tensor([2, 3, 4, 5])
    assert walked(tokens[:3], parents[:3], chosen[:3]) == ([0, 1, 2], 4)
    assert walked(tokens, parents, chosen, size=2) == ([0, 1], 3)


def test_a_chain_as_deep_as_it_can_be() -> None:
    n = kernel.MAX_NODES if DEVICE == "cuda" else 200  # the interpreter takes its time
    tokens = torch.arange(n)
    assert walked(tokens, tokens - 1, tokens + 1) == (list(range(n)), n)


def record_of(
    seed: int, rows: int, longest: int, budget: int
) -> tuple[kernel.Verified, tuple[Tensor, Tensor, Tensor], tuple[int, ...]]:
    """Return a verified tree, of nodes of a larger one, with a walk down it, and counts."""
    random = np.random.default_rng(seed)
    tree = toy.random_tree(seed, rows, 500)
    live = int(random.integers(0, min(rows, longest) + 1))
    path = torch.zeros(rows, dtype=torch.int64)
    path[:live] = torch.from_numpy(np.sort(random.permutation(rows)[:live]))
    bonus = torch.tensor([int(random.integers(500)) if live else -1])
    nodes = torch.from_numpy(random.permutation(900)[:rows])
    sums = -torch.rand(2, rows, generator=torch.Generator().manual_seed(seed)).float()
    verified = kernel.Verified(tree.tokens, tree.parents, tree.depths, *sums, nodes)
    counts = tuple(int(count) for count in random.integers(0, 10**6, 5))
    return verified, (path, torch.tensor([live], dtype=torch.int32), bonus), counts


@examples(20)
@given(
    seed=st.integers(0, 10**6),
    rows=st.sampled_from([1, 5, 16, 64]),
    longest=st.sampled_from([1, 7, 16, 33]),
    more=st.sampled_from([0, 3, 20]),
)
def test_records_hold_what_the_host_reads(seed: int, rows: int, longest: int, more: int) -> None:
    """On poisoned memory, against plain Python and the op; lists longer than the tree end with 0."""
    budget = rows + more
    verified, walked, counts = record_of(seed, rows, longest, budget)
    tensors = [torch.tensor([count], dtype=torch.int32, device=DEVICE) for count in counts]
    record = torch.full((7 + 2 * longest + 5 * budget,), -77, device=DEVICE)
    root = torch.full((3,), -77, device=DEVICE)
    there = kernel.Verified(*(part.to(DEVICE) for part in verified))
    ids, over = kernel.record_walk(
        there, tuple(part.to(DEVICE) for part in walked), tuple(tensors), record, root[:1], longest
    )
    wanted, wanted_ids, wanted_over = kernel.reference_record(verified, walked, counts, longest)
    lists = [wanted[7 + 2 * longest + n * rows :][:rows] + [0] * (budget - rows) for n in range(5)]
    wanted = [*wanted[: 7 + 2 * longest], *(number for part in lists for number in part)]
    assert record.tolist() == wanted
    assert (ids.tolist(), over.tolist()) == (wanted_ids, wanted_over)
    assert root.tolist() == [max(int(walked[2]), 0), -77, -77]
    meant, meant_root = torch.full_like(record, -77).cpu(), torch.full((3,), -77)
    size, kept, *others = (part.cpu() for part in tensors)
    found = ops.by_meaning(
        ops.record_walk,
        (*verified[:5], verified.tokens),
        ops.tree.Walked(*walked),
        ops.Nodes(verified.nodes, kept),
        (size, *others),
        meant_root,
        meant,
        longest,
    )
    assert meant.tolist() == wanted
    assert [part.tolist() for part in found] == [wanted_ids, wanted_over]
    assert meant_root.tolist() == root.tolist()


def test_wrong_records_are_refused() -> None:
    verified, walked, counts = record_of(1, 5, 7, 5)
    verified = kernel.Verified(*(part.to(DEVICE) for part in verified))
    walked = tuple(part.to(DEVICE) for part in walked)
    numbers = tuple(torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in counts)
    record, root = torch.zeros(7 + 14 + 25, dtype=torch.int64, device=DEVICE), walked[2].clone()
    for changes, named in (
        ({"record": record[:-1]}, "record: 7 numbers"),
        ({"record": record.int()}, "dense int64"),
        ({"walked": (walked[0][:3], *walked[1:])}, "path, nodes"),
        ({"counts": (root, *numbers[1:])}, "int32"),
        ({"verified": verified._replace(log_probs=verified.log_probs.double())}, "float32"),
    ):
        known = {"verified": verified, "walked": walked, "counts": numbers, "record": record}
        with pytest.raises(ValueError, match=named):
            kernel.record_walk(**(known | changes), root=root, longest=7)


def test_wrong_arguments_are_refused() -> None:
    ids, one = (
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
        torch.ones(1, dtype=torch.int32, device=DEVICE),
    )
    with pytest.raises(ValueError, match="tokens, parents, chosen, path"):
        kernel.walk(ids, ids[:1], ids, one, ids, one, ids)
    with pytest.raises(ValueError, match="size, count"):
        kernel.walk(ids, ids, ids, ids, ids, one, ids)
    logits = torch.zeros(2, 5, device=DEVICE)
    with pytest.raises(ValueError, match="logits"):
        kernel.choose_tokens(logits.double())
    with pytest.raises(ValueError, match="logits"):
        kernel.choose_tokens(logits.t())
    with pytest.raises(ValueError, match="positions"):
        kernel.choose_tokens(logits, None, ids[:1], torch.ones(1, device=DEVICE))
    with pytest.raises(ValueError, match="seed, temperature"):
        kernel.choose_tokens(logits, ids, ids[:1], None)
