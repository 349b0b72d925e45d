"""add_rms_norm, gather_norms and silu_mul against float64, and transformers' modules where bits may be equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn.functional import silu

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import rms_norm as norm_kernel, silu_mul as silu_kernel
from specengine_kernels.rms_norm import add_rms_norm, gather_norms
from specengine_kernels.silu_mul import silu_mul
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.kernels.sizes import sizes

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:overflow encountered in exp:RuntimeWarning"
    ),  # numpy's, of silu(-100)
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# relative, of the norm; bfloat16 is cut off, not rounded, by the interpreter
TOLERANCE = {
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 5e-3 if DEVICE == "cuda" else 1.2e-2,
}


def normal(*shape: int, seed: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, kind)


def close(found: Tensor, wanted: Tensor, limit: float) -> bool:
    return bool((found.double() - wanted).norm() <= limit * wanted.norm())


def check_norm(
    rows: int, columns: int, kind: torch.dtype, seed: int, *, adds: bool, eps: float = 1e-5
) -> None:
    wide = normal(rows, columns + 16, seed=seed, kind=kind) * 3
    states, weight = wide[:, :columns], normal(columns, seed=seed + 1, kind=kind)
    residual = normal(rows, columns, seed=seed + 2, kind=kind) if adds else None
    before = wide.clone(), None if residual is None else residual.clone()
    found, total = add_rms_norm(states, residual, weight, eps)
    summed = states.double() if residual is None else (states.double() + residual.double())
    assert close(total, summed, TOLERANCE[kind])
    exact = total.double()  # as rounded
    wanted = exact / (exact.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    assert close(found, wanted, TOLERANCE[kind])
    assert torch.equal(wide, before[0])
    assert residual is None or torch.equal(
        residual, before[1]
    )  # earlier features may be views of it
    meant = norm_kernel.reference(states, residual, weight, eps)
    assert close(found, meant[0].double(), TOLERANCE[kind])
    alone = [
        add_rms_norm(
            states[i : i + 1], None if residual is None else residual[i : i + 1], weight, eps
        )
        for i in range(rows)
    ]
    for many, one in zip((found, total), zip(*alone, strict=True), strict=True):
        assert torch.equal(many, torch.cat(one))


@pytest.mark.parametrize("kind", list(TOLERANCE))
@pytest.mark.parametrize("columns", [48, 64, 576, 2048])
@pytest.mark.parametrize("adds", [False, True])
def test_norms(columns: int, kind: torch.dtype, adds: bool) -> None:
    check_norm(3, columns, kind, columns, adds=adds)


@pytest.mark.parametrize("kind", list(TOLERANCE))
@pytest.mark.parametrize("columns", [48, 576, 1030])
def test_norms_of_gathered_rows(columns: int, kind: torch.dtype) -> None:
    wide, table = normal(6, columns + 16, seed=1, kind=kind), normal(9, columns, seed=2, kind=kind)
    states, weights = wide[:, :columns], [normal(columns, seed=n, kind=kind) for n in (3, 4)]
    states[1], table[1] = float("nan"), float("nan")  # nobody asks for these
    sources = torch.tensor([4, 0, 2, 0], device=DEVICE)
    tokens = torch.tensor([8, 0, 3, 3], device=DEVICE)
    given_all = states, sources, table, tokens, tuple(weights)
    found, rows = gather_norms(*given_all, 1e-5)
    assert torch.equal(rows, states[sources])
    meant, _ = norm_kernel.reference_of_rows(*given_all, 1e-5)
    exact = []
    for part, weight in zip((table[tokens], states[sources]), weights, strict=True):
        part = part.double()
        exact.append(part / (part.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    assert close(found, torch.cat(exact, -1), TOLERANCE[kind])
    assert close(found, meant.double(), TOLERANCE[kind])
    # the bits of each norm by itself
    alone = [add_rms_norm(table[tokens], None, weights[0], 1e-5)[0]]
    alone.append(add_rms_norm(states[sources], None, weights[1], 1e-5)[0])
    assert torch.equal(found, torch.cat(alone, -1))


@examples(15)
@given(rows=st.integers(1, 4), columns=sizes(1100), adds=st.booleans(), seed=st.integers(0, 999))
def test_any_norm(rows: int, columns: int, adds: bool, seed: int) -> None:
    check_norm(rows, columns, torch.float32, seed, adds=adds)


@pytest.mark.parametrize(
    "kind", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
)
def test_half_precision_has_the_bits_of_the_modules(kind: torch.dtype) -> None:
    """All but a few: the sum of squares has another order, which another rounding shows now and then."""
    states, residual = (normal(40, 1024, seed=seed, kind=kind) for seed in (1, 2))
    module = LlamaRMSNorm(1024, eps=1e-6).to(DEVICE, kind)
    module.weight.data = normal(1024, seed=3, kind=kind)
    found, total = add_rms_norm(states, residual, module.weight.detach(), 1e-6)
    assert torch.equal(total, residual + states)
    assert (found != module(residual + states)).float().mean() < 2e-3
    gate = normal(40, 1024, seed=4, kind=kind) * 2
    assert (silu_mul(gate, states) != silu(gate) * states).float().mean() < 2e-3


@pytest.mark.parametrize("kind", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (3, 1024), (2, 1500)])
def test_gates(rows: int, columns: int, kind: torch.dtype) -> None:
    # as one product gives them: strided rows
    both = normal(rows, 2 * columns, seed=columns, kind=kind) * 4
    gate, up = both[:, :columns], both[:, columns:]
    gate[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -0.0], dtype=kind)
    found = silu_mul(gate, up)
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    assert close(found, exact, TOLERANCE[kind])
    assert close(found, silu_kernel.reference(gate, up).double(), TOLERANCE[kind])
    for row in range(rows):
        assert torch.equal(silu_mul(gate[row : row + 1], up[row : row + 1])[0], found[row])


def test_a_norm_of_another_kind_is_seen() -> None:
    states, weight = normal(3, 64, seed=1), normal(64, seed=2)
    found, _ = add_rms_norm(states, None, weight, 1e-5)
    assert not close(found, norm_kernel.reference(states, None, 1 + weight, 1e-5)[0].double(), 0.1)
    assert not close(found, norm_kernel.reference(states, None, weight, 0.5)[0].double(), 0.01)


def test_wrong_arguments_are_refused() -> None:
    states, weight = normal(2, 8, seed=1), normal(8, seed=2)
    for given_all, named in (
        ((states, None, weight[:4]), "weight"),
        ((states, None, weight.half()), "one dtype"),
        ((states, states[:1], weight), "residual"),
        ((states.t(), None, weight[:2]), "contiguous"),
    ):
        with pytest.raises(ValueError, match=named):
            add_rms_norm(*given_all, 1e-5)
    ids, pair = torch.zeros(2, dtype=torch.int64, device=DEVICE), (weight, weight)
    for given_rows, named in (
        ((states, ids, states.half(), ids, pair), "one dtype"),
        ((states, ids, states[:, :4], ids, pair), "table"),
        ((states, ids, states, ids, (weight, weight[:4])), "weights"),
        ((states, ids, states, ids[:1], pair), "int64"),
        ((states, ids.int(), states, ids, pair), "int64"),
        ((normal(8, 2, seed=1).t(), ids, states, ids, pair), "contiguous"),
    ):
        with pytest.raises(ValueError, match=named):
            gather_norms(*given_rows, 1e-5)
    with pytest.raises(ValueError, match="one shape"):
        silu_mul(states, states[:1])
    with pytest.raises(ValueError, match="contiguous"):
        silu_mul(states.t(), states.t())
