"""rope_store against float64 rotations written apart from it, and against the draft heads' own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import rope_store as kernel
from specengine_kernels.rope_store import rope_store
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from specengine.models.eagle import Rope, rotate
from tests import toy

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bfloat16 is cut off, not rounded, by the interpreter
TOLERANCE = {
    torch.float32: 3e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 6e-3 if DEVICE == "cuda" else 9e-3,
}
POISON = 12345.0


def normal(*shape: int, seed: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, kind)


def angles(count: int, size: int) -> Tensor:
    """float64 [positions, D / 2]: Llama's."""
    return torch.arange(count).double()[:, None] * 10000.0 ** (
        -torch.arange(0, size, 2).double() / size
    )


def turned(states: Tensor, positions: Tensor) -> Tensor:
    """float64: pairs (c, c + D / 2) as complex numbers times e^(i angle)."""
    size = states.shape[-1]
    pairs = torch.complex(
        states[..., : size // 2].double(), states[..., size // 2 :].double()
    ).cpu()
    angle = angles(int(positions.max()) + 1, size)[positions.cpu()][:, None]
    found = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([found.real, found.imag], -1)


def check(
    n: int, live: int, start: int, size: int, groups: int, kind: torch.dtype, seed: int
) -> None:
    query = normal(n, 2 * groups, size, seed=seed, kind=kind)
    # as one projection gives them: strided heads
    both = normal(n, 2, 2, size, seed=seed + 1, kind=kind)
    key, value = both[:, :, 0], both[:, :, 1]
    positions = torch.randint(0, 300, (n,), generator=torch.Generator().manual_seed(seed)).to(
        DEVICE
    )
    table = angles(300, size)
    tables = [values.float().to(DEVICE) for values in (table.cos(), table.sin())]
    caches = torch.full((2, 2, start + n + 3, size), POISON, dtype=kind, device=DEVICE)
    before = caches.clone()
    numbers = (
        torch.tensor([start], device=DEVICE),
        torch.tensor([live], dtype=torch.int32, device=DEVICE),
    )
    given_all = (query, key, value, positions, *tables, caches[0], caches[1], *numbers)
    meant = kernel.reference(*given_all)
    for _ in range(2):  # the second time over what the first one wrote
        out = torch.full_like(query, math.nan)
        assert rope_store(*given_all, out=out) is out
    limit = TOLERANCE[kind]
    assert (
        out.cpu().double() - turned(query, positions)
    ).norm() <= limit * query.double().norm().cpu()
    stored = caches[0][:, start : start + live].transpose(0, 1).cpu().double()
    wanted = turned(key, positions)[:live]
    assert (stored - wanted).norm() <= limit * wanted.norm() + 1e-12
    assert torch.equal(caches[1][:, start : start + live], value[:live].transpose(0, 1))
    for place in (slice(0, start), slice(start + live, None)):
        assert torch.equal(caches[:, :, place], before[:, :, place])
    for found, means in zip((out, caches[0], caches[1]), meant, strict=True):
        assert (found.double() - means.double()).norm() <= limit * means.double().norm()


@pytest.mark.parametrize("kind", list(TOLERANCE))
@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
def test_sizes_and_types(size: int, kind: torch.dtype) -> None:
    check(3, 2, 5, size, 3, kind, size)


@examples(20)
@given(data=st.data())
def test_any_rows(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    live, start = data.draw(st.integers(0, n)), data.draw(st.integers(0, 40))
    groups, size = data.draw(st.sampled_from([1, 4, 7])), data.draw(st.sampled_from([8, 24]))
    check(n, live, start, size, groups, torch.float32, data.draw(st.integers(0, 999)))


def rows_of(
    kind: torch.dtype, size: int
) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, ...], Tensor]:
    """Return queries, keys and values of 5 rows, tables as modules of `kind` have them, numbers, and caches."""
    rows = [normal(5, heads, size, seed=heads, kind=kind) for heads in (6, 2, 2)]
    table = angles(60, size)
    tables = [values.to(DEVICE, kind).float() for values in (table.cos(), table.sin())]
    numbers = torch.tensor([3], device=DEVICE), torch.tensor([5], dtype=torch.int32, device=DEVICE)
    return rows, tables, numbers, torch.zeros(2, 2, 12, size, dtype=kind, device=DEVICE)


@pytest.mark.parametrize("kind", list(TOLERANCE))
@pytest.mark.parametrize("size", [16, 80, 128])
def test_norms_of_queries_and_keys(size: int, kind: torch.dtype) -> None:
    rows, tables, numbers, caches = rows_of(kind, size)
    weights = [normal(size, seed=seed, kind=kind) for seed in (7, 8)]
    positions = torch.tensor([0, 7, 7, 8, 59], device=DEVICE)
    out = rope_store(
        *rows, positions, *tables, caches[0], caches[1], *numbers, *weights, 1e-6, stepwise=True
    )
    limit = 4 * TOLERANCE[kind]  # four roundings
    for found, states, weight in (
        (out, rows[0], weights[0]),
        (caches[0][:, 3:8].transpose(0, 1), rows[1], weights[1]),
    ):
        wide = states.double()
        normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        wanted = turned(normed, positions).to(DEVICE)
        assert (found.double() - wanted).norm() <= limit * wanted.norm()
    assert torch.equal(caches[1][:, 3:8], rows[2].transpose(0, 1))
    bare = rope_store(*rows, positions, *tables, caches[0], caches[1], *numbers, stepwise=True)
    assert (out.double() - bare.double()).norm() > 0.1 * bare.double().norm()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "kind", [*([torch.bfloat16] if DEVICE == "cuda" else []), torch.float16, torch.float32]
)
def test_step_by_step_it_has_the_bits_of_the_modules(kind: torch.dtype, normed: bool) -> None:
    """Under norms all but a few: the sum of squares has another order."""
    rows, tables, numbers, caches = rows_of(kind, 64)
    norms = [LlamaRMSNorm(64, eps=1e-6).to(DEVICE, kind) for _ in range(2)] if normed else []
    for seed, norm in enumerate(norms):
        norm.weight.data = normal(64, seed=seed, kind=kind)
    positions = torch.tensor([0, 7, 7, 8, 59], device=DEVICE)
    weights = [norm.weight.detach() for norm in norms] or [None, None]
    out = rope_store(
        *rows, positions, *tables, caches[0], caches[1], *numbers, *weights, 1e-6, stepwise=True
    )
    turn = [torch.cat([table[positions]] * 2, -1).to(kind)[None] for table in tables]
    query, key = (
        (norm(states) for norm, states in zip(norms, rows, strict=False)) if normed else rows[:2]
    )
    wanted = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], *turn)
    pairs = (out.transpose(0, 1), wanted[0][0]), (caches[0][:, 3:8], wanted[1][0])
    differ = [(one != other).float().mean() for one, other in pairs]
    if not normed:
        assert differ == [0, 0]
    elif kind is torch.float32:
        torch.testing.assert_close(out.transpose(0, 1), wanted[0][0], rtol=1e-5, atol=1e-6)
    else:
        assert max(differ) < 0.01


def test_it_rotates_as_the_draft_heads_do() -> None:
    config = toy.head_config(3)
    rope, positions = Rope(config), torch.tensor([0, 3, 250])
    query, key = (
        normal(3, 4, config.head_dim, seed=1).cpu(),
        normal(3, 2, config.head_dim, seed=2).cpu(),
    )
    cache = torch.zeros(2, 2, 8, config.head_dim, device=DEVICE)
    tables = [table.to(DEVICE) for table in rope.tables(256, torch.device("cpu"))]
    numbers = torch.tensor([1], device=DEVICE), torch.tensor([3], dtype=torch.int32, device=DEVICE)
    rows = [states.to(DEVICE) for states in (query, key, key)]
    out = rope_store(*rows, positions.to(DEVICE), *tables, cache[0], cache[1], *numbers)
    rotation = rope(positions, torch.float32)
    torch.testing.assert_close(out.cpu(), rotate(query.transpose(0, 1), rotation).transpose(0, 1))
    torch.testing.assert_close(cache[0][:, 1:4].cpu(), rotate(key.transpose(0, 1), rotation))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", list(TOLERANCE))
def test_rows_of_caches_that_lie_anywhere(kind: torch.dtype, count: int) -> None:
    """Rows of a text have the bits that they have alone, in slots of its own cache, and nothing else changes."""
    query, key, value = (normal(3 * count, n, 32, seed=n, kind=kind) for n in (6, 2, 2))
    _, tables, *_ = rows_of(kind, 32)
    positions = torch.tensor([9, 2, 5, 7, 1, 20, 3, 4, 11], device=DEVICE)[: 3 * count]
    slots = torch.tensor([4, 2, 7], device=DEVICE)
    live = torch.tensor([1, 2, 3], dtype=torch.int32, device=DEVICE)
    slabs = [
        torch.full((2, key.shape[1], capacity, 32), POISON, dtype=kind, device=DEVICE)
        for capacity in (16, 8, 24)
    ]
    wanted = [slab.clone() for slab in slabs]
    alone = [
        rope_store(
            *(part[text * count : (text + 1) * count] for part in (query, key, value, positions)),
            *tables,
            wanted[text][0],
            wanted[text][1],
            slots[text : text + 1],
            live[text : text + 1],
        )
        for text in range(3)
    ]
    longest = slabs[2]
    table = torch.tensor(
        [[(slab.data_ptr() - longest.data_ptr()) // slab.element_size(), slab.stride(1)] for slab in slabs],
        device=DEVICE,
    )  # fmt: skip
    given_all = query, key, value, positions, *tables, longest[0], longest[1], slots, live
    assert torch.equal(rope_store(*given_all, table=table), torch.cat(alone))
    assert all(map(torch.equal, slabs, wanted))
    with pytest.raises(ValueError, match=r"table: int64 \[3, 2\]"):
        rope_store(*given_all, table=table.int())
    with pytest.raises(ValueError, match="one number for each text"):
        rope_store(*given_all[:-1], live[:2], table=table)


def test_a_wrong_position_is_seen() -> None:
    positions = torch.tensor([3, 4], device=DEVICE)
    query = normal(2, 1, 16, seed=1)
    assert (turned(query, positions) - turned(query, positions + 1)).norm() > 0.1 * query.norm()


def test_wrong_arguments_are_refused() -> None:
    rows, cache = torch.zeros(2, 2, 8, device=DEVICE), torch.zeros(2, 9, 8, device=DEVICE)
    places, table = (
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
        torch.zeros(5, 4, device=DEVICE),
    )
    numbers = (
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    good = [rows, rows, rows, places, table, table, cache, cache, *numbers]
    for index, wrong, named in (
        (1, rows[:1], "key, value"),
        (0, rows.half(), "one dtype"),
        (6, cache[:1], "k_cache, v_cache"),
        (4, table[:, :2], "cosines, sines"),
        (5, table.double(), "cosines, sines"),
        (3, places.int(), "positions"),
        (8, numbers[1], "slot, live"),
        (10, table[0, :4], "q_norm, k_norm"),
    ):
        given_all = [*good, None][: max(index + 1, 10)]
        given_all[index] = wrong
        with pytest.raises(ValueError, match=named):
            rope_store(*given_all)
