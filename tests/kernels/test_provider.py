"""SPECENGINE_BACKEND=triton: the ops that the kernels serve give what they mean, through the same door."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import tree_attention
from triton.runtime.errors import OutOfResources

from specengine import Engine, ops, policies
from specengine.drafters.small_model import SmallModel
from specengine.errors import BackendError, InputError
from specengine.models import fused
from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.models.kv_cache import Rows
from specengine.ops import _registry, _trial
from specengine.ops.tree import TokenTree
from tests import toy
from tests.kernels.sizes import sizes
from tests.ops import small_inputs
from tests.ops.backends import choose

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SERVED = {
    "add_rms_norm",
    "advance_states",
    "append_nodes",
    "best_candidates",
    "cached_attention",
    "choose_tokens",
    "compact_kv",
    "couple",
    "gather_norms",
    "gather_rows",
    "lanes_attention",
    "level_rows",
    "pack_mask",
    "packed_linear",
    "record_walk",
    "rope_store",
    "silu_mul",
    "strict_cached_attention",
    "top_children",
    "top_entropy",
    "tree_attention",
    "tree_convolution",
    "tree_recurrence",
    "walk",
}


@pytest.fixture(autouse=True)
def _asked_for() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, "triton")
        yield


def number(value: float, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([value], dtype=dtype, device=DEVICE)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE)


def test_it_is_taken_where_it_is_asked_for() -> None:
    taken = ops.backends(DEVICE)
    assert {op for op, backend in taken.items() if backend.name == "triton"} >= SERVED
    assert all(taken[op].reason == "SPECENGINE_BACKEND=triton" for op in SERVED)
    assert taken["classify_row"].name == "reference"
    assert taken["classify_row"].reason == f"triton has no classify_row on {DEVICE}"


def test_unasked_it_is_taken_on_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "auto")
    taken = ops.backends(DEVICE)
    assert all(
        (taken[op].name == "triton") == (DEVICE == "cuda") and "triton" in taken[op].available
        for op in SERVED
    )


def test_every_kernel_gives_what_its_op_means() -> None:
    kernels = _registry._loaded("triton")
    assert set(kernels) == SERVED
    for op in SERVED:
        assert not small_inputs.differs(op, kernels, torch.device(DEVICE)), op


@pytest.mark.parametrize(
    "name", ["cached_attention", pytest.param("strict_cached_attention", marks=pytest.mark.slow)]
)
def test_heads_are_tried_with_all_tiles_when_they_are_first_met(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that a card has no room for, or that is wrong there, is found while four rows are tried at loading."""
    module = importlib.import_module("specengine.ops.triton")
    monkeypatch.setattr(module, "is_tried", lambda device: True)
    launchers = {
        "cached_attention": (module.attention_kernel, "tree_attention"),
        "strict_cached_attention": (module.strict_kernel, "strict_attention"),
    }
    launch, rows = getattr(*launchers[name]), []

    def small(query: Tensor, *rest: object, **options: object) -> Tensor:
        rows.append(query.shape[1])
        if query.shape[3] == 64 and query.shape[1] > (16 if name == "cached_attention" else 4):
            raise OutOfResources(102400, 101376, "shared memory")
        return launch(query, *rest, **options)

    monkeypatch.setattr(*launchers[name], small)
    module._serves.cache_clear()
    for size, known in ((32, True), (64, False)):
        given = _trial.OF_HEADS[name](_trial.Heads(size, 4, torch.float32), torch.device(DEVICE))[0]
        rows.clear()
        expected = ops.by_meaning(ops.OPS[name], *given)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = [getattr(module, name)(*given) for _ in range(2)]
        warned = [str(one.message) for one in said if one.category is RuntimeWarning]
        assert all(torch.allclose(one, expected, atol=1e-4) for one in found)
        if known:
            assert not warned
            assert set(rows) == ({4, 8, 16, 17} if name == "cached_attention" else {5})
        else:
            assert len(warned) == 1
            assert re.search(
                f"{name} of heads of 64 channels.* in torch from now on.*OutOfResources", warned[0]
            )
    module._serves.cache_clear()


def test_trials_of_heads_meet_every_tile() -> None:
    """As the launcher chooses them, for few and many query heads to a key-value head."""
    shipped = {tree_attention.tiles_for(rows, 128, torch.bfloat16) for rows in range(1, 999)}
    for groups in (1, 3, 4, 8):
        inputs = _trial.attention_of(_trial.Heads(128, groups, torch.bfloat16), torch.device("cpu"))
        rows = [given[0].shape[1] * groups for given in inputs]
        assert {tree_attention.tiles_for(count, 128, torch.bfloat16) for count in rows} == shipped


def test_of_several_names_the_first_that_has_the_op_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose(monkeypatch, "triton,cpp")
    taken = ops.backends("cpu")
    if "cpp" in taken["walk"].available:
        assert (taken["classify_row"].name, taken["classify_row"].reason) == (
            "cpp",
            "SPECENGINE_BACKEND=triton,cpp",
        )
    here = ops.backends(DEVICE)
    assert all(here[op].name == "triton" for op in SERVED)
    choose(monkeypatch, "cpp,triton")
    assert ops.backends("cpu")["walk"].name == (
        "cpp" if "cpp" in taken["walk"].available else "triton"
    )
    choose(monkeypatch, "triton,no")
    with pytest.raises(BackendError, match="SPECENGINE_BACKEND=triton,no: unknown"):
        ops.backends(DEVICE)


@pytest.mark.slow
def test_missing_triton_raises_and_names_the_remedy() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from specengine import ops\n"
        "ops.top_entropy(torch.zeros(1, 2), 1)\n"
    )
    environment = {**os.environ, ops.VARIABLE: "triton", "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 1
    assert "BackendError: SPECENGINE_BACKEND=triton: triton is not built" in run.stderr
    assert "pip install -e '.[kernels]'" in run.stderr


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "tritn")
    with pytest.raises(BackendError, match="accepted: auto, cpp, triton, cuda, reference"):
        ops.backends(DEVICE)


@examples(20)
@given(
    rows=st.integers(0, 5),
    padding=st.integers(0, 3),
    columns=sizes(300),
    most=st.integers(1, 40),
    limit=st.sampled_from([None, -1, 0, 3, 50]),
    gate=st.sampled_from([None, math.log(0.1)]),
    bound=st.sampled_from([None, -math.inf, -6.0]),
    normalized=st.booleans(),
    seed=st.integers(0, 99),
)
def test_best_candidates(
    rows: int,
    padding: int,
    columns: int,
    most: int,
    limit: int | None,
    gate: float | None,
    bound: float | None,
    normalized: bool,
    seed: int,
) -> None:
    logits, scores = (
        normal(rows + padding, columns, seed=seed),
        -normal(rows + padding, seed=seed + 1).abs(),
    )
    if normalized:
        logits = logits.log_softmax(-1)
    logits[rows:], scores[rows:] = math.nan, 0.0  # padding that would win
    options = {
        "limit": None if limit is None else number(limit),
        "log_gate": None if gate is None else number(gate, torch.float32),
        "bound": None if bound is None else number(bound, torch.float32),
        "normalized": normalized,
    }
    found = ops.best_candidates(logits, scores, number(rows), most, **options)
    with ops.meaning():
        wanted = ops.best_candidates(logits, scores, number(rows), most, **options)
    live = int(found.live)
    assert live == int(wanted.live)
    assert torch.equal(found.rows[:live], wanted.rows[:live])
    assert torch.equal(found.columns[:live], wanted.columns[:live])
    torch.testing.assert_close(
        found.log_probs[:live], wanted.log_probs[:live], atol=2e-6, rtol=1e-5
    )
    torch.testing.assert_close(found.scores[:live], wanted.scores[:live], atol=2e-6, rtol=1e-5)
    assert (
        found.rows.shape
        == found.columns.shape
        == found.log_probs.shape
        == found.scores.shape
        == (most,)
    )
    assert not found.rows[live:].any()
    assert not found.columns[live:].any()


def test_candidates_of_strided_scores_and_of_too_many_rows() -> None:
    scores = -normal(6, 2).abs()[:, 0]
    for rows, most in ((6, 9), (6, 5000)):
        given = normal(rows, 100), scores, number(rows), most
        found, wanted = ops.best_candidates(*given), ops.by_meaning(ops.best_candidates, *given)
        live = int(found.live)
        assert found.rows[:live].tolist() == wanted.rows[:live].tolist()
        assert found.columns[:live].tolist() == wanted.columns[:live].tolist()


@examples(12)
@given(
    rows=st.integers(0, 5),
    columns=sizes(300),
    top=st.integers(1, 320),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    normalized=st.booleans(),
    dense=st.booleans(),
)
def test_top_children(
    rows: int, columns: int, top: int, dtype: torch.dtype, normalized: bool, dense: bool
) -> None:
    logits = normal(rows, columns, seed=rows + columns).round().to(dtype)
    given_logits = logits if dense else logits.t().contiguous().t()
    found = ops.top_children(given_logits, top, normalized=normalized)
    wanted = ops.by_meaning(ops.top_children, logits, top, normalized)
    assert torch.equal(found[1], wanted[1])
    exact = logits.double() if normalized else logits.double().log_softmax(-1)
    torch.testing.assert_close(found[0].double(), exact.gather(1, found[1]), atol=2e-6, rtol=1e-6)


@examples(12)
@given(
    rows=st.integers(0, 5),
    columns=sizes(300),
    top=st.integers(1, 320),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    normalized=st.booleans(),
    dense=st.booleans(),
)
def test_top_entropy(
    rows: int, columns: int, top: int, dtype: torch.dtype, normalized: bool, dense: bool
) -> None:
    logits = normal(rows, columns, seed=rows + columns).to(dtype)
    logits = logits.log_softmax(-1) if normalized else logits
    given_logits = logits if dense else logits.t().contiguous().t()
    found = ops.top_entropy(given_logits, top, normalized=normalized)
    exact = logits.double() if normalized else logits.double().log_softmax(-1)
    best = exact.sort(descending=True).values[:, :top]
    torch.testing.assert_close(found.double(), -(best.exp() * best).sum(-1), atol=1e-5, rtol=2e-6)


@pytest.mark.slow
@examples(10)
@given(
    rows=st.integers(1, 70),
    prefix=st.integers(0, 90),
    known=st.booleans(),
    groups=st.sampled_from([1, 3]),
    kind=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 99),
)
def test_tree_attention(
    rows: int, prefix: int, known: bool, groups: int, kind: torch.dtype, seed: int
) -> None:
    query = normal(2 * groups, rows, 16, seed=seed).to(kind)
    key, value = (
        normal(2, prefix + rows, 16, seed=seed + 1).to(kind),
        normal(2, prefix + rows, 16, seed=seed + 2).to(kind),
    )
    tree = toy.random_tree(seed, rows, 500)
    mask = torch.ones(rows, prefix + rows, dtype=torch.bool, device=DEVICE)
    mask[:, prefix:] = ops.tree_mask(tree.ancestors.to(DEVICE), rows)
    packed = ops.pack_mask(mask, groups, kind, prefix if known else 0, causal=bool(seed % 2))
    found = ops.tree_attention(query, key, value, packed, 0.25)
    wanted = ops.by_meaning(
        ops.tree_attention,
        query.double(),
        key.double(),
        value.double(),
        mask.repeat(groups, 1),
        0.25,
    )
    assert found.dtype is kind
    assert (found.double() - wanted).norm() <= (
        2e-6 if kind is torch.float32 else 1e-3
    ) * wanted.norm()


def test_keyed_gumbel_argmax() -> None:
    scores = normal(900)
    for seed, position in ((3, 4), (2**64 - 1, 2**40), (2**63, 0)):
        assert ops.keyed_gumbel_argmax(scores, seed, position) == ops.by_meaning(
            ops.keyed_gumbel_argmax, scores, seed, position
        )
    scores[[7, 800]] = math.inf
    assert ops.keyed_gumbel_argmax(scores, 3, 4) == ops.by_meaning(
        ops.keyed_gumbel_argmax, scores, 3, 4
    )
    with pytest.raises(InputError, match="none is finite"):
        ops.keyed_gumbel_argmax(torch.full((5,), math.nan, device=DEVICE), 3, 4)


@examples(15)
@given(seed=st.integers(0, 999), capacity=st.integers(2, 140), asked=st.integers(1, 4))
def test_append_nodes(seed: int, capacity: int, asked: int) -> None:
    """Also where the nodes have no room, and of none."""
    random, trees = (
        torch.Generator().manual_seed(seed),
        [TokenTree.root(5, capacity, DEVICE) for _ in range(2)],
    )
    names = (
        "tokens",
        "parents",
        "depths",
        "log_probs",
        "path_log_probs",
        "ancestors",
        "size",
        "overflow",
    )
    for _ in range(asked):
        most = int(torch.randint(0, capacity + 2, (), generator=random))
        count = number(int(torch.randint(0, most + 1, (), generator=random)))
        parents = torch.randint(0, int(trees[0].size), (most,), generator=random).to(DEVICE)
        given = parents, parents * 7 + 1, -torch.rand(most, generator=random).to(DEVICE), count
        arrays = [[getattr(tree, name) for name in names] for tree in trees]
        found = ops.append_nodes(tuple(arrays[0][:6]), arrays[0][6], *given, arrays[0][7])
        wanted = ops.by_meaning(
            ops.append_nodes, tuple(arrays[1][:6]), arrays[1][6], *given, arrays[1][7]
        )
        assert found.tolist() == wanted.tolist()
        assert not found[int(count) :].any()
        for name in names:
            assert torch.equal(getattr(trees[0], name), getattr(trees[1], name)), name
    edges = torch.zeros(len(parents) + 1, device=DEVICE)
    with pytest.raises(InputError, match=r"^log_probs: got"):
        ops.append_nodes(
            tuple(arrays[0][:6]), arrays[0][6], given[0], given[0], edges, count, arrays[0][7]
        )


def test_attention_of_rows_that_see_everything() -> None:
    query, key = normal(4, 3, 16), normal(2, 50, 16, seed=1)
    found = ops.tree_attention(query, key, key, None, 0.25)
    torch.testing.assert_close(
        found, ops.by_meaning(ops.tree_attention, query, key, key, None, 0.25), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("wide", [True, False], ids=["wide heads", "strided channels"])
def test_what_the_kernel_does_not_take_runs_by_the_reference(wide: bool) -> None:
    size = 272 if wide else 16
    query, key = normal(2, 3, size), normal(1, 9, size, seed=1)
    if not wide:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    mask = torch.ones(3, 9, dtype=torch.bool, device=DEVICE).tril(6)
    found = ops.tree_attention(query, key, key, ops.pack_mask(mask, 2, query.dtype, 6), 0.1)
    wanted = ops.by_meaning(ops.tree_attention, query, key, key, mask.repeat(2, 1), 0.1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_an_engine_on_the_kernels_answers_as_plain_decoding_does() -> None:
    model = toy.tiny("llama").to(DEVICE)
    prompt, count = [7, 3, 9, 7, 3], 5
    expected = model.generate(
        torch.tensor([prompt], device=DEVICE), max_new_tokens=count, do_sample=False
    )
    drafter = SmallModel(toy.near_copy("llama").to(DEVICE))
    engine = Engine(HuggingFaceTarget(model), drafter, toy.policy_for("talon"))
    assert [*prompt, *engine.generate(prompt, max_new_tokens=count).token_ids] == expected[
        0
    ].tolist()


@pytest.mark.slow
@examples(8)
@given(
    live=st.integers(0, 20),
    padding=st.integers(1, 5),
    prefix=st.integers(0, 80),
    seed=st.integers(0, 99),
    garbage=st.booleans(),
)
def test_cached_attention(live: int, padding: int, prefix: int, seed: int, garbage: bool) -> None:
    rows = live + padding
    query, slots = normal(6, rows, 16, seed=seed), prefix + rows + 7
    key, value = (normal(2, slots, 16, seed=seed + i) for i in (1, 2))
    words = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE)
    if live:
        words[:live] = toy.random_tree(seed, live, 300).ancestors.to(DEVICE)
    if garbage:
        key[:, prefix + live :], value[:, prefix + live :] = math.nan, math.nan
    numbers = [
        torch.tensor([number], dtype=torch.int32, device=DEVICE) for number in (prefix, live, live)
    ]
    exact = (query.double(), key.double(), value.double())
    wanted = ops.by_meaning(ops.cached_attention, *exact, words, *numbers, 0.25)
    most = rounding(*(tensor[:, : prefix + live] for tensor in (query[:, :live], key, value)), 0.25)
    found = ops.cached_attention(query, key, value, words, *numbers, 0.25)
    torch.testing.assert_close(found.double(), wanted, atol=most, rtol=0)
    strict = ops.strict_cached_attention(
        query, key, value, ops.order_paths(words), *numbers[:2], 0.25
    )
    torch.testing.assert_close(strict.double(), wanted, atol=most, rtol=0)


def rounding(query: Tensor, key: Tensor, value: Tensor, scale: float) -> float:
    """Return how far float32 attention may be from the exact one, from the sizes of its summands.

    A score is a sum of products, each rounded against all of them: as independent errors they add up like a walk. What
    a score is off by in absolute terms a weight is off by in relative ones, twice, as the weights' sum is off too; the
    answer is a mean of values by these weights, rounded once more for each slot.
    """
    if not query.numel() or not key.numel():
        return 0.0
    unit, (heads, _, size), slots = torch.finfo(torch.float32).eps / 2, key.shape, key.shape[1]
    terms = query.abs().reshape(heads, -1, size) @ key.abs().transpose(1, 2)
    steps = 2 * math.sqrt(size + 2) * scale * float(terms.max()) + math.sqrt(slots)
    return unit * steps * float(value.abs().max())


def test_rope_store() -> None:
    query, both = normal(6, 5, 16), normal(2, 5, 2, 16, seed=1)
    key, value = both[:, :, 0], both[:, :, 1]
    positions, angles = torch.arange(5, device=DEVICE) * 3, normal(20, 8, seed=2)
    slabs = [torch.zeros(2, 2, 12, 16, device=DEVICE) for _ in range(2)]
    numbers = torch.tensor([4], device=DEVICE), torch.tensor([3], dtype=torch.int32, device=DEVICE)
    given_all = (query, key, value, positions, (angles.cos(), angles.sin()))
    found = ops.rope_store(*given_all, slabs[0], *numbers)
    torch.testing.assert_close(
        found, ops.by_meaning(ops.rope_store, *given_all, slabs[1], *numbers)
    )
    torch.testing.assert_close(slabs[0][:, :, :7], slabs[1][:, :, :7])
    with pytest.raises(InputError, match="slab"):
        ops.rope_store(*given_all, slabs[0][:, :1], *numbers)
    with pytest.raises(InputError, match="tables"):
        ops.rope_store(*given_all[:4], (angles, angles.double()), slabs[0], *numbers)
    turn = ops.Rotation(
        angles.cos(), angles.sin(), normal(16, seed=3), normal(16, seed=4), 1e-6, stepwise=True
    )
    given_all = *given_all[:4], turn
    found = ops.rope_store(*given_all, slabs[0], *numbers)
    torch.testing.assert_close(
        found, ops.by_meaning(ops.rope_store, *given_all, slabs[1], *numbers)
    )
    for wrong in (
        turn._replace(k_norm=None),
        turn._replace(q_norm=normal(8)),
        turn._replace(q_norm=normal(16).half()),
    ):
        with pytest.raises(InputError, match="q_norm, k_norm"):
            ops.rope_store(*given_all[:4], wrong, slabs[0], *numbers)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_of_several_texts(rows: int) -> None:
    """Trees over caches of several lengths, with NaN where nothing was written: what the meanings give, by text."""
    query, both = normal(6, 3 * rows, 16), normal(2, 3 * rows, 2, 16, seed=1)
    key, value = both[:, :, 0], both[:, :, 1]
    filled = torch.tensor([7, 0, 20], dtype=torch.int32, device=DEVICE)
    live = torch.tensor([rows, 1, max(1, rows - 1)], dtype=torch.int32, device=DEVICE)
    words = torch.stack([toy.random_tree(seed, rows, 9).ancestors for seed in range(3)]).to(DEVICE)
    positions = (filled.long()[:, None] + torch.arange(rows, device=DEVICE)).flatten()
    angles = normal(30, 8, seed=2)
    caches = [normal(2, 2, 2, slots, 16, seed=slots) for slots in (11, 16, 32)]
    for cache, count in zip(caches, filled.tolist(), strict=True):
        cache[..., count:, :] = math.nan
    results = []
    for run in (lambda op, *given: op(*given), ops.by_meaning):
        copies = [cache.clone() for cache in caches]
        slabs = ops.Slabs.by_layer(copies, ops.tables_of(copies))[1]
        tables = angles.cos(), angles.sin()
        turned = run(
            ops.rope_store, query, key, value, positions, tables, slabs, filled.long(), live
        )
        attended = run(ops.lanes_attention, turned, slabs, words, filled, live, live, 0.25)
        for copy, first, count in zip(copies, filled.tolist(), live.tolist(), strict=True):
            copy[..., first + count : first + rows, :] = math.nan  # padding may be stored
        assert torch.equal(copies[0][0].nan_to_num(), caches[0][0].nan_to_num())  # another layer
        results.append([turned, attended, *copies])
    for ours, meant in zip(*results, strict=True):
        torch.testing.assert_close(ours, meant, equal_nan=True)
    assert results[0][1].isfinite().all()
    for text, (slab, first, count) in enumerate(
        zip(slabs.each, filled.tolist(), live.tolist(), strict=True)
    ):
        mask = torch.ones(count, first + count, dtype=torch.bool, device=DEVICE)
        mask[:, first:] = ops.tree_mask(words[text, :count], count)
        own = slice(text * rows, text * rows + count)
        ends = (part[:, : first + count] for part in slab)
        alone = ops.tree_attention(turned[:, own], *ends, mask, 0.25)
        torch.testing.assert_close(attended[:, own], alone)
    with pytest.raises(InputError, match="prefix"):
        ops.lanes_attention(query, slabs, words, filled[:2], live, live, 0.25)
    with pytest.raises(InputError, match="slab"):
        ops.rope_store(query, key[:1], value[:1], positions, tables, slabs, filled.long(), live)


def test_parts_of_a_layer() -> None:
    states, residual, weight = normal(3, 40)[:, :33], normal(3, 33, seed=1), normal(33, seed=2)
    for before in (None, residual):
        found = ops.add_rms_norm(states, before, weight, 1e-5)
        torch.testing.assert_close(
            found, ops.by_meaning(ops.add_rms_norm, states, before, weight, 1e-5)
        )
    columns = normal(33, 3)  # of which a transposed view is not contiguous: by the meaning
    torch.testing.assert_close(
        ops.silu_mul(columns.t(), residual), ops.by_meaning(ops.silu_mul, columns.t(), residual)
    )
    torch.testing.assert_close(
        ops.silu_mul(states, residual), ops.by_meaning(ops.silu_mul, states, residual)
    )
    assert ops.silu_mul(states[:0], residual[:0]).shape == (0, 33)
    assert ops.add_rms_norm(states[:0], None, weight, 1e-5)[0].shape == (0, 33)
    with pytest.raises(InputError, match="weight"):
        ops.add_rms_norm(states, None, weight[:3], 1e-5)
    with pytest.raises(InputError, match="one dtype"):
        ops.silu_mul(states, residual.half())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_fused_layers_on_the_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With views of merged weights, whose heads and rows are strided."""
    model = toy.tiny(family).to(DEVICE)
    results = []
    for devices in ((), (DEVICE,)):
        monkeypatch.setattr(fused, "DEVICES", devices)
        lm = CausalLM(model, merge=True)
        cache = lm.new_cache(20)
        logits, _ = lm.extend(cache, [7, 3, 9, 7, 3], logits="all")
        rated, states = lm.forward(Rows.of(toy.random_tree(1, 6, 50), cache.filled), cache, (0, 1))
        results.append((logits, rated, states))
    assert lm.modules == "fused, merged products"
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_captured_engine_on_the_kernels_answers_as_plain_decoding_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specengine.ops.cuda_graphs.MIN_SLOTS", 256)
    model = toy.tiny("llama").to(DEVICE)
    prompt, count = [7, 3, 9, 7, 3], 4
    expected = model.generate(
        torch.tensor([prompt], device=DEVICE), max_new_tokens=count, do_sample=False
    )
    policy = policies.make("talon", budget=6, width=2)
    engine = Engine.from_pretrained(model, toy.near_copy("llama").to(DEVICE), policy, graphs=True)
    assert [*prompt, *engine.generate(prompt, max_new_tokens=count).token_ids] == expected[
        0
    ].tolist()


@examples(12)
@given(
    rows=st.integers(1, 5),
    columns=sizes(2100),
    seed=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    temperature=st.floats(0.1, 2.0),
    odd=st.booleans(),
    dense=st.booleans(),
)
def test_choose_tokens(
    rows: int, columns: int, seed: int | None, temperature: float, odd: bool, dense: bool
) -> None:
    logits, positions = (
        normal(rows, columns, seed=columns),
        torch.arange(rows, device=DEVICE) * 2**33 + 5,
    )
    if odd:
        logits[0], logits[-1, columns // 2 :] = -math.inf, math.nan
    logits = logits if dense else logits.t().contiguous().t()
    given = (
        logits,
        positions,
        None if seed is None else number(seed, torch.int64),
        number(temperature, torch.float32),
    )
    assert ops.choose_tokens(*given).tolist() == ops.by_meaning(ops.choose_tokens, *given).tolist()


@examples(12)
@given(
    seed=st.integers(0, 999),
    size=st.integers(1, 30),
    padding=st.integers(0, 5),
    choiceless=st.booleans(),
)
def test_walk(seed: int, size: int, padding: int, choiceless: bool) -> None:
    """Siblings carry distinct tokens; behind the size stands what would be walked."""
    tree, random = (
        toy.random_tree(seed, size + padding, size + padding + 2),
        torch.Generator().manual_seed(seed),
    )
    chosen = torch.randint(-1, size + padding + 2, (size + padding,), generator=random)
    node = int(torch.randint(size + padding, (), generator=random))
    while node > 0:
        chosen[tree.parents[node]] = tree.tokens[node]
        node = int(tree.parents[node])
    if choiceless:
        chosen[0] = -1
    given = (*(part.to(DEVICE) for part in (tree.tokens, tree.parents, chosen)), number(size))
    found, wanted = ops.walk(*given), ops.by_meaning(ops.walk, *given)
    assert [part.tolist() for part in found] == [part.tolist() for part in wanted]


@examples(10)
@given(
    prefix=st.integers(0, 9),
    later=st.sets(st.integers(1, 20), max_size=12),
    live=st.integers(0, 13),
    dense=st.booleans(),
)
def test_compact_kv(prefix: int, later: set[int], live: int, dense: bool) -> None:
    slab = normal(2, 2, 2, 40, 8)
    slab = slab if dense else slab.transpose(3, 4).contiguous().transpose(3, 4)
    path = torch.tensor([0, *sorted(later), 0, 0], device=DEVICE)
    wanted, given = slab.clone(), (path, number(min(live, len(later) + 1)), number(prefix))
    ops.by_meaning(ops.compact_kv, wanted, *given)
    ops.compact_kv(slab, *given)
    assert torch.equal(slab, wanted)


@pytest.mark.parametrize("width", [16, 20], ids=["one width", "two widths"])
def test_gather_rows(width: int) -> None:
    given = (
        normal(6, 16),
        torch.tensor([4, 0, 0], device=DEVICE),
        normal(9, width),
        torch.tensor([8, 0, 3], device=DEVICE),
    )
    for found, wanted in zip(
        ops.gather_rows(*given), ops.by_meaning(ops.gather_rows, *given), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("wide", [16, 20], ids=["one width", "two widths"])
def test_gather_norms(wide: int) -> None:
    states, table = normal(6, 16), normal(9, wide)
    sources, tokens = (torch.tensor(ids, device=DEVICE) for ids in ([4, 0, 0], [8, 0, 3]))
    given = states, sources, table, tokens, (normal(wide, seed=1), normal(16, seed=2)), 1e-5
    means = ops.by_meaning(ops.gather_norms, *given)
    for found, wanted in zip(ops.gather_norms(*given), means, strict=True):
        torch.testing.assert_close(found, wanted)
    columns = table.t().contiguous().t()
    found, _ = ops.gather_norms(states, sources, columns, tokens, *given[4:])
    torch.testing.assert_close(found, means[0])
    with pytest.raises(InputError, match=r"^states, table, weights: got"):
        ops.gather_norms(states.half(), *given[1:])


@pytest.mark.parametrize("dense", [True, False])
def test_level_rows(dense: bool) -> None:
    """On nodes that are not dense the meaning runs; without a count of passes as well."""
    tree = small_inputs._tree(torch.device(DEVICE), 70)
    nodes = torch.tensor([3, 9, 2, 9, 0, 9], device=DEVICE)
    frontier = ops.Nodes(nodes[::2] if not dense else nodes[::2].clone(), number(2))
    seen, factors = torch.zeros(71, 2, dtype=torch.int64, device=DEVICE), normal(2)
    found = []
    for run in ops.level_rows, lambda *given: ops.by_meaning(ops.level_rows, *given):
        counts, words = (number(9), number(4)), seen.clone()
        passes = number(1)
        rows = run(tree, number(5), frontier, *counts, words, factors, passes)
        found.append([*rows[:6], rows.factors, *counts, words[:-1], passes])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    alone = ops.level_rows(tree, number(5), frontier, number(9), number(4), seen, factors)
    assert torch.equal(alone.words, found[0][2])


class OfDevice(Tensor):
    """A tensor that says which of the devices it is on; its numbers are on the host."""

    at = torch.device("cuda", 0)

    @property
    def device(self) -> torch.device:
        return self.at


@pytest.mark.parametrize(("index", "current"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_kernels_run_on_the_device_of_their_tensors(
    index: int, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton itself launches on the current device."""
    entered: list[int] = []

    @contextmanager
    def device(at: torch.device) -> Iterator[None]:
        entered.append(at.index)
        yield

    provider = importlib.import_module("specengine.ops.triton")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    given = torch.zeros(2).as_subclass(OfDevice)
    given.at = torch.device("cuda", index)
    for first in (given, (given, given)):
        assert provider._on_its_device(lambda *parts: len(parts))(first, 3) == 2
    assert entered == ([] if index == current else [index] * 2)
