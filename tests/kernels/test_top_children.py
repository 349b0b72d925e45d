"""top_children against a float64 sort of each row, written apart from the kernel's own reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import top_children as kernel
from specengine_kernels.top_children import top_children

from specengine import ops
from tests.kernels.sizes import sizes

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = kernel.cut_for(4, 3000).tile  # columns per program where rows are few


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def run(logits: Tensor, k: int, normalized: bool = False) -> tuple[Tensor, Tensor]:
    """The children from poisoned outputs and scratch, twice."""
    logits = logits.to(DEVICE)
    rows, workspace = len(logits), kernel.workspace_for(logits, k)
    out = (
        torch.empty(rows, k, device=DEVICE),
        torch.empty(rows, k, dtype=torch.int64, device=DEVICE),
    )
    results = []
    for tensor in workspace:
        tensor.fill_(math.nan if tensor.is_floating_point() else 123456789)
    for _ in range(2):  # the second time on the scratch that the first one left
        out[0].fill_(math.nan)
        out[1].fill_(-7)
        found = top_children(logits, k, normalized, out=out, workspace=workspace)
        results.append([tensor.cpu().clone() for tensor in found])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return results[0][0], results[0][1]


def check(logits: Tensor, k: int, normalized: bool = False) -> None:
    log_probs, columns = run(logits, k, normalized)
    assert (log_probs.dtype, columns.dtype) == (torch.float32, torch.int64)
    for row, log_prob, chosen in zip(
        logits.double().tolist(), log_probs.double(), columns.tolist(), strict=True
    ):
        values = [-math.inf if math.isnan(x) else min(x, torch.tensor(3e38).item()) for x in row]
        wanted = sorted(range(len(values)), key=lambda column: (-values[column], column))[:k]
        assert chosen == wanted
        peak, log_sum = 0.0, 0.0
        if not normalized and values[wanted[0]] > -math.inf:
            peak = values[wanted[0]]
            log_sum = math.log(math.fsum(math.exp(x - peak) for x in values))
        exact = torch.tensor(
            [values[column] - peak - log_sum for column in wanted], dtype=torch.float64
        )
        torch.testing.assert_close(log_prob, exact.float().double(), atol=2e-6, rtol=1e-6)


@pytest.mark.sliced
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 129, 2 * TILE, 5003])
@pytest.mark.parametrize("k", [1, 10, 70])
def test_sizes(columns: int, k: int, dtype: torch.dtype) -> None:
    check(normal(3, columns).to(dtype), min(k, columns))


def test_equal_columns_are_taken_in_order() -> None:
    for columns in (40, TILE + 40, 3 * TILE):  # more of them in a tile than are wanted, and fewer
        check(torch.zeros(2, columns), 30)
    check(normal(3, 2 * TILE + 404).round(), 60)
    zeros = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0]])
    assert run(zeros, 4, normalized=True)[1].tolist() == [[0, 1, 3, 4]]


def test_values_that_differ_in_their_last_bits() -> None:
    """The bound drops the lower half of a value's bits, the ranks do not."""
    logits = 1.0 + torch.arange(600).flip(0)[None] * 2.0**-23
    check(torch.cat([logits, logits.flip(1)]), 25)


@pytest.mark.sliced(1)
@pytest.mark.parametrize("k", [1, 12, 400])
def test_values_that_are_no_numbers(k: int) -> None:
    logits = normal(8, 900)
    logits[0] = math.nan
    logits[1, ::2] = -math.inf
    logits[2, [7, 500]] = math.inf
    logits[3] = -math.inf
    logits[3, 899] = 1.0  # the others come behind it, the first ones first
    logits[4, 1::3] = math.nan
    logits[5, 10:] = -math.inf
    logits[6], logits[7] = -math.inf, -3.4e38
    check(logits, k)
    check(logits.clamp(max=0.0), k, normalized=True)


def test_winners_in_the_last_partial_tile() -> None:
    logits = torch.zeros(1, 2 * TILE + 3)
    logits[0, -3:] = torch.tensor([5.0, 7.0, 5.0])
    assert run(logits, 3)[1].tolist() == [[2 * TILE + 1, 2 * TILE, 2 * TILE + 2]]


def test_all_columns() -> None:
    check(normal(2, 300), 300)


def test_row_stride() -> None:
    wide = normal(3, 1000)
    for one, other in zip(run(wide[:, :700], 9), run(wide[:, :700].contiguous(), 9), strict=True):
        assert torch.equal(one, other)


def test_wrong_arguments_are_refused() -> None:
    logits = torch.zeros(2, 8, device=DEVICE)
    for arguments in (
        (logits.double(), 3),
        (logits.t(), 2),
        (logits[0], 3),
        (logits, 0),
        (logits, 9),
        (logits[:0], 3),
    ):
        with pytest.raises(ValueError, match=r"needed|accepted"):
            top_children(*arguments)


@pytest.mark.slow
@examples(25)
@given(data=st.data())
def test_any_rows(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(sizes(300))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, columns, generator=generator) * data.draw(
        st.sampled_from([0.0, 1.0, 10.0])
    )
    if data.draw(st.booleans()):
        logits = logits.round()
    odd = torch.rand(rows, columns, generator=generator)
    logits[odd < data.draw(st.sampled_from([0.0, 0.3, 0.95]))] = -math.inf
    logits[odd > 0.97] = math.nan
    logits[odd > 0.99] = math.inf
    logits = logits.to(data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))
    k, normalized = data.draw(st.integers(1, min(columns, 80))), data.draw(st.booleans())
    check(logits, k, normalized)
    for found in (run(logits, k, normalized), kernel.reference(logits, k, normalized)):
        wanted = ops.by_meaning(ops.top_children, logits, k, normalized)
        assert torch.equal(found[1], wanted[1])
        torch.testing.assert_close(found[0], wanted[0], atol=2e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [32000, 50257, 128256, 151666, 248320])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (10, 10), (64, 256)])
def test_vocabularies_of_models_on_a_gpu(
    rows: int, k: int, columns: int, dtype: torch.dtype
) -> None:
    for scale in (0.0, 3.0):
        logits = normal(rows, columns, scale=scale).to("cuda", dtype)
        found, wanted = run(logits, k), kernel.reference(logits, k)
        assert torch.equal(found[1], wanted[1].cpu())
        torch.testing.assert_close(found[0], wanted[0].cpu(), atol=1e-5, rtol=2e-6)


@pytest.mark.gpu
def test_capture() -> None:
    logits = normal(10, 128256).to("cuda", torch.bfloat16)
    out, workspace = top_children(logits, 10), kernel.workspace_for(logits, 10)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top_children(logits, 10, out=out, workspace=workspace)
    for seed in range(4):
        logits.copy_(normal(10, 128256, seed=seed).to("cuda", torch.bfloat16))
        graph.replay()
        for one, other in zip(out, top_children(logits, 10), strict=True):
            assert torch.equal(one, other)
