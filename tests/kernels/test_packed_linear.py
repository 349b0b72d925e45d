"""packed_linear against float64 products with the weight's numbers, for every way in which codes are scaled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import packed_linear as kernel
from specengine_kernels.packed_linear import packed_linear

from specengine import ops
from tests.kernels.all_kernels import QUANTISED, quantised

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
# relative, of the norm; bfloat16 is cut off, not rounded, by the interpreter
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
UNIT = {
    "f8_e4m3": 64,
    "q6_k": 256,
    "q4_k": 256,
    "groups": 64,
    "rows": 77,
}  # inputs of a kind come in multiples of


def normal(*shape: int, seed: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, kind)


def check(
    kind: str,
    rows: int,
    outputs: int,
    units: int,
    dtype: torch.dtype = torch.float32,
    splits: int | None = None,
) -> None:
    weight = quantised(kind, outputs, units * UNIT.get(kind, 32), units, DEVICE)
    states, bias = (
        normal(rows, weight.inputs, seed=1, kind=dtype),
        normal(outputs, seed=2, kind=dtype),
    )
    numbers = kernel.numbers(weight).double()
    exact = states.double() @ numbers.T
    terms = (states.double().square() @ numbers.square().T).sqrt()  # a sum may be small by chance
    for added in (None, bias):
        product = packed_linear(states, weight, added, splits=splits, upcast=INTERPRETED)
        wanted = exact if added is None else exact + added.double()
        assert (product.shape, product.dtype) == ((rows, outputs), dtype)
        assert (product.double() - wanted).norm() <= TOLERANCE[dtype] * (
            wanted.norm() + terms.norm()
        )
        meant = kernel.reference(states, weight, added).double()
        assert (meant - wanted).norm() <= TOLERANCE[dtype] * (wanted.norm() + terms.norm())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kind", QUANTISED)
def test_products(kind: str, dtype: torch.dtype) -> None:
    for rows, outputs, units in ((1, 77, 3), (64, 70, 2), (70, 5, 1)):
        check(kind, rows, outputs, units, dtype)


@examples(20)
@given(
    kind=st.sampled_from(list(QUANTISED)),
    rows=st.integers(1, 66),
    outputs=st.integers(1, 80),
    units=st.integers(1, 3),
    splits=st.sampled_from([None, 1, 2, 7]),
)
def test_any_product(kind: str, rows: int, outputs: int, units: int, splits: int | None) -> None:
    check(kind, rows, outputs, units, splits=splits)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_row_has_the_same_bits_among_others(kind: str) -> None:
    """Whatever tiles and neighbours it has, as far as the number of splits is the same."""
    weight = quantised(kind, 40, 512 if kind != "rows" else 300, 4, DEVICE)
    states = normal(40, weight.inputs, seed=5)
    states[7] = float("nan")
    whole = packed_linear(states, weight, splits=2)
    for first, last in ((0, 1), (3, 20), (20, 40)):
        assert torch.equal(
            packed_linear(states[first:last], weight, splits=2).nan_to_num(-1.0),
            whole[first:last].nan_to_num(-1.0),
        )
    assert whole[:7].isfinite().all()
    assert whole[7].isnan().all()


def test_all_codes_of_float8() -> None:
    codes = (
        torch.arange(256).to(torch.uint8).to(DEVICE).view(torch.float8_e4m3fn).unflatten(0, (4, 64))
    )
    weight = kernel.Weight(codes, torch.full((4, 1), 0.5, device=DEVICE))
    numbers = packed_linear(torch.eye(64, device=DEVICE), weight, splits=1)
    wanted = codes.float().T / 2
    assert wanted.isnan().sum() == 2
    whole = wanted.isfinite().all(0)
    assert torch.equal(numbers[:, whole], wanted[:, whole])
    assert numbers[:, ~whole].isnan().all()


def test_strided_rows() -> None:
    weight = quantised("q8_0", 9, 64, 1, DEVICE)
    wide = normal(3, 100, seed=3)
    assert torch.equal(
        packed_linear(wide[:, :64], weight), packed_linear(wide[:, :64].contiguous(), weight)
    )


@pytest.mark.parametrize("kind", QUANTISED)
def test_other_codes_and_scales_are_seen(kind: str) -> None:
    weight = quantised(kind, 20, 512, 6, DEVICE)
    states = normal(4, 512, seed=7)
    product = packed_linear(states, weight).double()
    for name, part in weight._asdict().items():
        if part is None:
            continue
        other = weight._replace(**{name: part.roll(1, dims=0)})
        wanted = states.double() @ kernel.numbers(other).double().T
        assert (product - wanted).norm() > 1e-3 * wanted.norm()


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_op_means_the_same(kind: str) -> None:
    weight = quantised(kind, 6, 512, 8, DEVICE)
    meant = ops.QuantizedWeight(*weight)
    assert meant.inputs == weight.inputs
    assert torch.equal(meant.numbers(), kernel.numbers(weight))


def test_splits_fill_a_device_and_no_more() -> None:
    device = torch.device("cpu")
    assert kernel.processors(device) == kernel.MULTIPROCESSORS == 132
    assert kernel.splits_for(64, 1, 32, device) == 4
    assert kernel.splits_for(64, 64, 32, device) == 2
    assert kernel.splits_for(448, 1, 32, device) == 1
    assert kernel.splits_for(1, 1, 9, device) == 2  # each has some steps of its loop


def test_wrong_arguments_are_refused() -> None:
    weight, states = quantised("q4_0", 8, 64, 1, DEVICE), normal(2, 64, seed=1)
    for wrong in (
        weight._replace(codes=weight.codes[:, :16].contiguous()),
        weight._replace(codes=weight.codes.short()),
        weight._replace(scales=weight.scales.repeat(1, 4)),
    ):
        with pytest.raises(ValueError, match="weight: codes int8"):
            packed_linear(states, wrong)
    fine = quantised("q4_0", 8, 64, 1, DEVICE)
    fine = fine._replace(scales=fine.scales.repeat_interleave(2, 1))
    with pytest.raises(ValueError, match="groups of 32 or more, got 16"):
        packed_linear(states, fine)
    for strided in (
        (states.t().contiguous().t(), weight),
        (states, weight._replace(codes=weight.codes.t().contiguous().t())),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            packed_linear(*strided)
