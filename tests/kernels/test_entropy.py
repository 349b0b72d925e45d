"""top_entropy against a float64 sort of each row, written apart from the kernel's own reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import entropy as kernel
from specengine_kernels.entropy import top_entropy

from specengine import ops
from tests.kernels.sizes import sizes

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = kernel.cut_for(4, 3000).tile  # columns per program where rows are few


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def exact(logits: Tensor, top: int, normalized: bool) -> Tensor:
    """float64 [rows], by the definition."""
    wanted = []
    for row in logits.double().tolist():
        values = sorted((-math.inf if math.isnan(x) else min(x, 3e38) for x in row), reverse=True)
        peak, log_sum = 0.0, 0.0
        if not normalized and values[0] > -math.inf:
            peak, log_sum = values[0], math.log(math.fsum(math.exp(x - values[0]) for x in values))
        log_probs = [x - peak - log_sum for x in values[:top] if x > -math.inf]
        wanted.append(-math.fsum(math.exp(x) * x for x in log_probs))
    return torch.tensor(wanted, dtype=torch.float64)


def run(logits: Tensor, top: int, normalized: bool = False) -> Tensor:
    """The entropies from poisoned output and scratch, twice."""
    logits = logits.to(DEVICE)
    out, workspace = torch.empty(len(logits), device=DEVICE), kernel.workspace_for(logits, top)
    for tensor in (out, *workspace):
        tensor.fill_(math.nan if tensor.is_floating_point() else 123456789)
    results = []
    for _ in range(2):  # the second time on the scratch that the first one left
        results.append(
            top_entropy(logits, top, normalized, out=out, workspace=workspace).cpu().clone()
        )
        out.fill_(math.nan)
    assert torch.equal(results[0], results[1])
    return results[0]


def check(logits: Tensor, top: int, normalized: bool = False) -> None:
    found, wanted = run(logits, top, normalized), exact(logits, top, normalized)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), wanted, atol=4e-6, rtol=2e-6)


@pytest.mark.sliced
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 129, 2 * TILE, 5003])
@pytest.mark.parametrize("top", [1, 20, 1000, 5002])
def test_sizes(columns: int, top: int, dtype: torch.dtype) -> None:
    check(normal(3, columns).to(dtype), top)


@pytest.mark.sliced(3)
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-3, 0.1, 1.0, 30.0, 1e4, 1e37])
def test_spreads(scale: float) -> None:
    """From all columns in the first bin, and what that takes to tell apart, to one column that is all."""
    for offset in (0.0, 17.0):
        check(normal(2, 3000, scale=scale) + offset, 700)


@pytest.mark.sliced(4)
@pytest.mark.parametrize("top", [1, 2, 3, 40, 41, 200, 999, 1000, 1001, 1999, 2000])
def test_ties_at_the_cut(top: int) -> None:
    logits = normal(4, 2000, scale=2.0).round()
    logits[1] = 5.0
    logits[2, :1000], logits[2, 1000:] = 1.0, -1.0
    logits[3] = -0.0
    logits[3, ::2] = 0.0
    check(logits, top)


@pytest.mark.parametrize("top", [1, 50, 899, 900])
def test_values_that_are_no_numbers(top: int) -> None:
    logits = normal(9, 900)
    logits[0] = math.nan
    logits[1, ::2] = -math.inf
    logits[2, [7, 500]] = math.inf
    logits[3] = -math.inf
    logits[3, 899] = 1.0
    logits[4, 1::3] = math.nan
    logits[5, 10:] = -math.inf  # fewer than `top` that count
    logits[6] = -math.inf
    logits[7, 5:], logits[7, 4] = -3.4e38, 3.4e38
    logits[8] = math.inf
    check(logits, top)


@pytest.mark.parametrize("top", [1, 100, 2500])
def test_log_probabilities(top: int) -> None:
    logits = normal(5, 2500)
    check(logits.log_softmax(1), top, normalized=True)
    logits[1] = 0.0  # more than probabilities: read as they are
    logits[2], logits[3] = -200.0, -3e38
    logits[4] = -math.inf
    check(logits.clamp(max=0.0), top, normalized=True)


def test_probabilities_are_of_the_whole_row() -> None:
    assert run(torch.zeros(1, 1024), 512).item() == pytest.approx(math.log(1024) / 2, abs=1e-6)
    assert run(torch.zeros(1, 1024), 9999).item() == pytest.approx(math.log(1024), abs=1e-6)


def test_edge_of_a_bin() -> None:
    """Distances of whole powers of two, and their neighbours, begin bins."""
    near = torch.tensor([0.0, *(2.0**power for power in range(-12, 8))])
    distances = torch.cat(
        [torch.nextafter(near, near.new_zeros(())), near, torch.nextafter(near, near + 1)]
    )
    for top in range(1, len(distances) + 1, 4):
        check(-distances[None], top)


def test_more_kept_columns_than_are_read_at_a_time() -> None:
    logits = normal(2, 3 * kernel.BLOCK, scale=1e-4)
    for top in (1, 100, 3 * kernel.BLOCK - 1):
        check(logits, top)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_order_of_arrival_does_not_matter(scale: float) -> None:
    """Of two tiles in the other order all sums are the same, and what they keep comes in another order."""
    logits = normal(3, 2 * TILE, scale=scale)
    for top in (1, 300, 1500):
        assert torch.equal(run(logits, top), run(logits.roll(TILE, 1), top))


def test_row_stride() -> None:
    wide = normal(3, 1000)
    for top in (100, 700):
        assert torch.equal(run(wide[:, :700], top), run(wide[:, :700].contiguous(), top))


SHAPES = [(1, 1), (1, 500), (10, 128256), (64, 151936), (64, 262144), (16, 50257), (4096, 128256)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_cut_covers_the_columns(rows: int, columns: int) -> None:
    cut = kernel.cut_for(rows, columns)
    assert cut.tile * cut.tiles >= columns
    assert cut.tile * (cut.tiles - 1) < columns
    assert rows * cut.tiles >= min(kernel.ENOUGH_PROGRAMS // 4, rows * columns // kernel.TILE)


def test_wrong_arguments_are_refused() -> None:
    logits = torch.zeros(2, 8, device=DEVICE)
    for arguments in (
        (logits.double(), 3),
        (logits.t(), 3),
        (logits[0], 3),
        (logits, 0),
        (logits[:0], 3),
    ):
        with pytest.raises(ValueError, match=r"needed|accepted"):
            top_entropy(*arguments)
    with pytest.raises(ValueError, match="out: float32"):
        top_entropy(logits, 3, out=torch.empty(3, device=DEVICE))


@pytest.mark.parametrize("normalized", [False, True])
def test_reference_agrees(normalized: bool) -> None:
    logits = normal(5, 300).log_softmax(1)
    logits[3], logits[4, ::2] = -math.inf, math.nan
    for top in (1, 40, 300, 400):
        found = kernel.reference(logits, top, normalized)
        torch.testing.assert_close(
            found.double(), exact(logits, top, normalized), atol=1e-6, rtol=1e-6
        )


@examples(30)
@given(data=st.data())
def test_any_rows(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(sizes(400))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, columns, generator=generator) * data.draw(
        st.sampled_from([0.0, 1e-3, 1.0, 10.0])
    )
    if data.draw(st.booleans()):
        logits = logits.round()
    odd = torch.rand(rows, columns, generator=generator)
    logits[odd < data.draw(st.sampled_from([0.0, 0.3, 0.95]))] = -math.inf
    logits[odd > 0.97] = math.nan
    logits[odd > 0.995] = math.inf
    normalized = data.draw(st.booleans())
    logits = logits.clamp(max=0.0) if normalized else logits
    logits = logits.to(data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))
    top = data.draw(st.integers(1, 450))
    check(logits, top, normalized)
    wanted = ops.by_meaning(ops.top_entropy, logits, top, normalized)
    torch.testing.assert_close(run(logits, top, normalized), wanted, atol=1e-5, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [32000, 50257, 128256, 151666, 248320])
@pytest.mark.parametrize("rows", [1, 10, 64])
def test_vocabularies_of_models_on_a_gpu(rows: int, columns: int, dtype: torch.dtype) -> None:
    for scale in (0.0, 1e-4, 3.0):
        logits = normal(rows, columns, scale=scale).to("cuda", dtype)
        for top in (1, 1000, columns - 1, columns):
            wanted = kernel.reference(logits, top).cpu()
            torch.testing.assert_close(run(logits, top), wanted, atol=1e-5, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("top", [1000, 128256])
def test_capture(top: int) -> None:
    logits = normal(10, 128256).to("cuda", torch.bfloat16)
    out, workspace = torch.empty(10, device="cuda"), kernel.workspace_for(logits, top)
    top_entropy(logits, top, out=out, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top_entropy(logits, top, out=out, workspace=workspace)
    for seed in range(4):
        logits.copy_(normal(10, 128256, seed=seed).to("cuda", torch.bfloat16))
        graph.replay()
        assert torch.equal(out, top_entropy(logits, top))
