"""select_candidates against a float64 sort of all candidates, written apart from the kernel's own reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import candidate_selection as kernel
from specengine_kernels.candidate_selection import Selection, select_candidates

from tests.kernels.sizes import sizes

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
TILE = kernel.cut_for(4, 3000).tile  # columns per program where rows are few
NEAR = 4e-6  # scores closer than this may change places, or sides of a threshold, by rounding


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def exact_scores(
    logits: Tensor, parents: Tensor, normalized: bool = False
) -> tuple[Tensor, Tensor]:
    """float64 log-probabilities and path scores [W, V], by the definition."""
    values = logits.double().cpu()
    values = torch.where(values.isnan(), -math.inf, values).clamp(max=3e38)
    parents = parents.double().cpu()
    parents = torch.where(parents.isnan(), -math.inf, parents).clamp(max=3e38)
    log_probs = values
    if not normalized:
        empty = values.max(1).values.isinf()
        log_probs = values - torch.where(empty, 0.0, values.logsumexp(1))[:, None]
    return log_probs, parents[:, None] + log_probs


def run(logits: Tensor, parents: Tensor, most: int, **options: object) -> Selection:
    """The selection from poisoned outputs and scratch, twice, without the entries that are not there."""
    logits, parents = logits.to(DEVICE), parents.to(DEVICE)
    out, workspace = kernel.selection_for(logits, most), kernel.workspace_for(logits, most)
    for tensor in (*out, *workspace):
        tensor.fill_(math.nan if tensor.is_floating_point() else 123456789)
    results = []
    for _ in range(2):  # the second time on the scratch that the first one left
        found = select_candidates(logits, parents, most, out=out, workspace=workspace, **options)  # type: ignore[arg-type]
        results.append([tensor.clone().cpu() for tensor in found])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    count = int(results[0][4])
    rows, tokens, log_probs, scores = results[0][:4]
    assert 0 <= count <= most
    assert (scores[count:] == -math.inf).all()
    assert (log_probs[count:] == -math.inf).all()
    assert not rows[count:].any()
    assert not tokens[count:].any()
    return Selection(
        rows[:count], tokens[:count], log_probs[:count], scores[:count], *results[0][4:]
    )


def check(
    logits: Tensor,
    parents: Tensor,
    most: int,
    *,
    log_gate: float = -math.inf,
    bound: float = -math.inf,
    normalized: bool = False,
    budget: int | None = None,
    exact: bool = False,
) -> Selection:
    """`exact`: no two scores are close to each other or to a threshold, unless they are equal in exact arithmetic."""
    on_device = (
        {}
        if budget is None
        else {"budget": torch.tensor([budget], dtype=torch.int32, device=DEVICE)}
    )
    found = run(
        logits, parents, most, log_gate=log_gate, bound=bound, normalized=normalized, **on_device
    )
    log_probs, scores = exact_scores(logits, parents, normalized)
    room = most if budget is None else min(most, budget)
    passes = (scores >= scores.max() + log_gate) & (scores > bound) & (scores > -math.inf)
    value = scores.tolist()
    order = sorted((-value[row][column], row, column) for row, column in passes.nonzero().tolist())
    wanted = [(row, column) for _, row, column in order[:room]]
    got = list(zip(found.rows.tolist(), found.tokens.tolist(), strict=True))
    assert len(set(got)) == len(got)
    if exact:
        assert got == wanted
    assert all(0 <= row < logits.shape[0] and 0 <= column < logits.shape[1] for row, column in got)
    near = NEAR * max(1.0, abs(order[0][0])) if order else 0.0
    at_threshold = ((scores - (scores.max() + log_gate)).abs() <= near) | (
        (scores - bound).abs() <= near
    )
    assert abs(len(got) - len(wanted)) <= int(at_threshold.sum())
    reached = scores[found.rows, found.tokens]
    for value, truth in (
        (found.scores, reached),
        (found.log_probs, log_probs[found.rows, found.tokens]),
    ):
        assert ((value - truth).abs() <= 1e-5 * truth.abs().clamp(min=1.0)).all()
    ranked = torch.tensor([-score for score, _, _ in order[: len(got)]], dtype=torch.float64)
    assert ((reached[: len(ranked)] - ranked).abs() <= near).all()
    assert (found.scores.diff() <= 0).all()
    best = scores.max().item()
    assert found.anchor.item() == best or abs(found.anchor.item() - best) <= 1e-5 * max(
        1.0, abs(best)
    )
    return found


@pytest.mark.sliced
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 129, 2 * TILE, 5003])
def test_best_of_all(columns: int, dtype: torch.dtype) -> None:
    check(normal(3, columns).to(dtype), -normal(3, seed=1).abs(), 20)


@pytest.mark.parametrize("log_gate", [0.0, math.log(0.3), math.log(0.03), math.log(1e-9)])
def test_gate(log_gate: float) -> None:
    check(normal(5, 1500, scale=4.0), -normal(5, seed=1).abs(), 60, log_gate=log_gate)


def test_gate_of_one_keeps_the_best_and_its_equals() -> None:
    log_probs = torch.full((2, 300), -4.0)
    log_probs[0, [5, 200]] = -1.0
    log_probs[1, 9] = 0.0
    found = check(
        log_probs, torch.tensor([0.0, -1.0]), 10, log_gate=0.0, normalized=True, exact=True
    )
    assert list(zip(found.rows.tolist(), found.tokens.tolist(), strict=True)) == [
        (0, 5),
        (0, 200),
        (1, 9),
    ]


@pytest.mark.parametrize("bound", [-2.0, -6.0, 0.0])
def test_bound(bound: float) -> None:
    check(normal(4, 700), -normal(4, seed=2).abs(), 30, bound=bound)


def test_bound_itself_does_not_pass() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    found = check(log_probs, torch.zeros(1), 4, bound=-3.0, normalized=True, exact=True)
    assert found.tokens.tolist() == [0, 1]


@pytest.mark.parametrize("budget", [0, 1, 5, 20, 21])
def test_budget_on_the_device(budget: int) -> None:
    assert len(check(normal(3, 500), torch.zeros(3), 20, budget=budget).rows) == min(budget, 20)


def test_thresholds_on_the_device() -> None:
    logits, parents = normal(3, 500).to(DEVICE), torch.zeros(3, device=DEVICE)
    given = {"log_gate": math.log(0.05), "bound": -5.0}
    tensors = {name: torch.tensor([value], device=DEVICE) for name, value in given.items()}
    for one, other in zip(
        run(logits, parents, 50, **given), run(logits, parents, 50, **tensors), strict=True
    ):
        assert torch.equal(one, other)


def test_equal_logits_are_taken_in_order() -> None:
    for columns in (40, TILE + 40):  # the second has more of them in a tile than are wanted
        found = check(torch.zeros(3, columns), torch.zeros(3), 50)
        wanted = [(index // columns, index % columns) for index in range(50)]
        assert list(zip(found.rows.tolist(), found.tokens.tolist(), strict=True)) == wanted


def test_many_ties_are_taken_in_order() -> None:
    """Integer log-probabilities and parents: sums are exact, and nearly all candidates are tied with others."""
    log_probs = normal(4, 2 * TILE + 404, seed=3).abs().round().neg()
    for most in (1, 60):
        check(log_probs, torch.tensor([0.0, -1.0, 0.0, -2.0]), most, normalized=True, exact=True)


def test_ties_of_different_logits_go_to_the_larger_logit() -> None:
    """The parent swallows the difference of the log-probabilities, as float32 has no more digits."""
    log_probs = -1.0 - torch.tensor([[3.0, 1.0, 2.0, 0.0]]) * 2.0**-23
    found = run(log_probs, torch.tensor([-4096.0]), 4, normalized=True)
    assert len(set(found.scores.tolist())) == 1
    assert found.tokens.tolist() == [3, 1, 2, 0]


def test_zeros_of_both_signs_are_ties() -> None:
    found = run(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), torch.zeros(1), 4, normalized=True)
    assert found.tokens.tolist() == [0, 1, 2, 3]


def test_values_that_are_no_numbers() -> None:
    logits = normal(5, 900)
    logits[0] = math.nan
    logits[1, ::2] = -math.inf
    logits[2, 7] = math.inf
    logits[3] = -math.inf
    logits[3, 899] = 1.0  # -inf everywhere but one: probability 1
    logits[4, 1::3] = math.nan
    parents = torch.tensor([0.0, -1.0, -30.0, -2.0, -0.5])
    found = check(logits, parents, 40)
    assert 0 not in found.rows
    assert (found.rows[found.tokens == 899] == 3).any()
    assert (found.tokens[found.rows == 1] % 2 == 1).all()
    assert (found.tokens[found.rows == 4] % 3 != 1).all()


@pytest.mark.parametrize("dead", [-math.inf, math.nan])
def test_dead_rows(dead: float) -> None:
    logits = normal(4, 600)
    logits[1] = math.nan  # a dead row's logits are not read
    found = check(logits, torch.tensor([dead, dead, -50.0, dead]), 30)
    assert (found.rows == 2).all()
    assert len(found.rows) == 30


def test_nothing_alive() -> None:
    nothing = torch.full((3, 300), -math.inf)
    for logits, parents in (
        (normal(3, 300), nothing[:, 0].contiguous()),
        (nothing, torch.zeros(3)),
    ):
        for log_gate in (-math.inf, -3.0):
            assert not len(check(logits, parents, 5, log_gate=log_gate).rows)


def test_fewer_candidates_than_asked_for() -> None:
    assert len(check(normal(2, 5), torch.zeros(2), 64).rows) == 10


def test_row_stride() -> None:
    wide = normal(3, 1000)
    narrow = wide[:, :700]
    for one, other in zip(
        run(narrow, torch.zeros(3), 20), run(narrow.contiguous(), torch.zeros(3), 20), strict=True
    ):
        assert torch.equal(one, other)


SHAPES = [(1, 1), (1, 500), (10, 128256), (64, 151936), (128, 128256), (64, 248320), (16, 50257)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_cut_holds_all_statistics(rows: int, columns: int) -> None:
    cut = kernel.cut_for(rows, columns)
    assert kernel.fits(rows, columns)
    wide, tiles = kernel.triton.next_power_of_2(rows), kernel.triton.next_power_of_2(cut.tiles)
    assert cut.tile * cut.tiles >= columns
    assert cut.tile * (cut.tiles - 1) < columns
    assert wide * tiles * (cut.tile // cut.group) <= kernel.MOST_STATISTICS


def test_wrong_arguments_are_refused() -> None:
    logits, parents = torch.zeros(2, 8, device=DEVICE), torch.zeros(2, device=DEVICE)
    for arguments in (
        (logits.double(), parents, 3),
        (logits.t(), torch.zeros(8), 3),
        (logits, parents[:1], 3),
        (logits, parents.half(), 3),
        (logits, parents, 0),
    ):
        with pytest.raises(ValueError, match=r"needed|accepted"):
            select_candidates(*arguments)
    with pytest.raises(ValueError, match="too many"):
        kernel.cut_for(4096, 128256)
    assert not kernel.fits(4096, 128256)


def test_reference_agrees() -> None:
    logits, parents = normal(4, 300), -normal(4, seed=4).abs()
    log_probs, scores = exact_scores(logits, parents)
    found = kernel.reference(logits.double(), parents, 25, log_gate=-3.0, bound=-8.0)
    order = scores.flatten().argsort(descending=True)[:25]
    order = order[
        (scores.flatten()[order] >= scores.max() - 3.0) & (scores.flatten()[order] > -8.0)
    ]
    assert torch.equal(found.rows * 300 + found.tokens, order)
    assert torch.allclose(found.log_probs, log_probs.flatten()[order])
    assert torch.allclose(found.scores, scores.flatten()[order])


@examples(25)
@given(data=st.data())
def test_any_integers_in_any_order(data: st.DataObject) -> None:
    """Small integers as log-probabilities: sums are exact, ties everywhere, the order defined to the last one."""
    rows, columns = data.draw(st.integers(1, 5)), data.draw(sizes(300))
    seed = data.draw(st.integers(0, 1000))
    spread = data.draw(st.sampled_from([0, 1, 3, 50]))
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.randint(0, spread + 1, (rows, columns), generator=generator).float()
    odd = torch.rand(rows, columns, generator=generator)
    log_probs[odd < data.draw(st.sampled_from([0.0, 0.3, 0.95]))] = -math.inf
    log_probs[odd > 0.97] = math.nan
    parents = -torch.randint(0, 4, (rows,), generator=generator).float()
    parents[torch.rand(rows, generator=generator) < 0.2] = -math.inf
    check(
        log_probs,
        parents,
        data.draw(st.integers(1, 80)),
        log_gate=data.draw(st.sampled_from([-math.inf, 0.0, -2.0])),
        bound=data.draw(st.sampled_from([-math.inf, -1.0, -3.0])),
        normalized=True,
        exact=True,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [32000, 50257, 128256, 151666, 248320])
@pytest.mark.parametrize(("rows", "most"), [(1, 10), (10, 60), (64, 256)])
def test_vocabularies_of_models_on_a_gpu(
    rows: int, most: int, columns: int, dtype: torch.dtype
) -> None:
    logits, parents = (
        normal(rows, columns).to("cuda", dtype),
        -normal(rows, seed=1).abs().to("cuda"),
    )
    for log_gate in (-math.inf, math.log(0.03)):
        found = run(logits, parents, most, log_gate=log_gate)
        log_probs = logits.double().log_softmax(1)
        scores = (parents.double()[:, None] + log_probs).flatten()
        best = scores.topk(most).values.cpu()
        best = best[best >= best[0] + log_gate]
        assert abs(len(best) - len(found.scores)) <= 1
        shared = min(len(best), len(found.scores))
        assert torch.allclose(found.scores[:shared].double(), best[:shared], atol=2e-5)
        chosen = (found.rows * columns + found.tokens).to("cuda")
        assert torch.allclose(scores[chosen].cpu(), found.scores.double(), atol=2e-5)


@pytest.mark.gpu
def test_all_ties_on_a_gpu() -> None:
    found = run(torch.zeros(10, 128256), torch.zeros(10), 60)
    assert found.tokens.tolist() == list(range(60))
    assert not found.rows.any()


@pytest.mark.gpu
def test_capture() -> None:
    logits, parents = (
        normal(10, 128256).to("cuda", torch.bfloat16),
        -normal(10, seed=1).abs().to("cuda"),
    )
    out, workspace = kernel.selection_for(logits, 60), kernel.workspace_for(logits, 60)
    budget = torch.tensor([60], dtype=torch.int32, device="cuda")
    arguments = {"budget": budget, "out": out, "workspace": workspace}
    select_candidates(logits, parents, 60, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_candidates(logits, parents, 60, **arguments)
    for room in (60, 7, 0, 60):
        budget.fill_(room)
        logits.copy_(normal(10, 128256, seed=room).to("cuda", torch.bfloat16))
        graph.replay()
        replayed = [tensor.clone() for tensor in out]
        for one, other in zip(
            replayed, select_candidates(logits, parents, 60, budget=budget), strict=True
        ):
            assert torch.equal(one, other)
