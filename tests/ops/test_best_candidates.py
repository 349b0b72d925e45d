"""best_candidates: each backend against sorting all, and against each other."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.errors import InputError
from tests.ops.backends import BACKENDS, each_backend, of_each
from tests.ops.inputs import (
    INF,
    NAN,
    count,
    defined,
    exact_log_probs,
    many,
    matrices,
    path_scores,
    poisoned,
    real,
)


def test_fresh_buffers_are_poisoned_and_both_backends_are_compared():
    assert torch.empty(4).isnan().all()
    assert torch.empty(4).resize_(2).isnan().all()
    if "cpp" not in BACKENDS:
        pytest.skip("specengine._ops is not built (pip install -e .)")


def brute_candidates(logits, scores, most, log_gate, bound):
    """(score, row, column) of normalised rows by sorting all; scores are sums of two float32 there, hence exact."""
    found = []
    for row, (score, values) in enumerate(zip(defined(scores), defined(logits), strict=True)):
        with np.errstate(over="ignore"):
            found += [(score + value, row, column, value) for column, value in enumerate(values)]
    anchor = max((entry[0] for entry in found), default=-INF)
    with np.errstate(over="ignore"):
        gate = np.float32(anchor) + np.float32(log_gate) if log_gate > -INF else np.float32(-INF)
    found = [entry for entry in found if entry[0] > -INF and entry[0] > bound and entry[0] >= gate]
    found.sort(key=lambda entry: (-entry[0], entry[1], -entry[3], entry[2]))
    return found[:most]


def margin(score):
    """Return how far rounding may move a score of float32."""
    return 1e-5 + 2e-6 * np.abs(score)


def select(
    logits, scores, most, limit=None, log_gate=None, bound=None, normalized=False, live=None
):
    """The op, of numbers."""
    return ops.best_candidates(
        logits,
        scores,
        count(len(logits) if live is None else live),
        most,
        limit=None if limit is None else count(limit),
        log_gate=None if log_gate is None else real(log_gate),
        bound=None if bound is None else real(bound),
        normalized=normalized,
    )


def fewest(most, limit):
    return most if limit is None else max(0, min(most, limit))


def checked(got, most):
    """Return the selection without its padding, which must be 0."""
    assert [part.dtype for part in got] == [torch.int64] * 2 + [torch.float32] * 2 + [torch.int32]
    assert [tuple(part.shape) for part in got] == [(most,)] * 4 + [(1,)]
    size = int(got.live)
    assert 0 <= size <= most
    assert not any(part[size:].any() for part in got[:4])
    return ops.Candidates(*(part[:size] for part in got[:4]), got.live)


def check_candidates(logits, scores, most, log_gate, bound, normalized, got):
    """Check every promise that does not depend on the backend's rounding; selection is exact up to `margin`."""
    size = len(got.rows)
    assert size <= most
    log_gate, bound = (-INF if number is None else number for number in (log_gate, bound))
    rows, columns = got.rows.numpy(), got.columns.numpy()
    values, paths = defined(logits), defined(scores)
    with np.errstate(over="ignore"):
        assert np.array_equal(paths[rows] + got.log_probs.numpy(), got.scores.numpy())
    order = list(zip(-got.scores.numpy(), rows, -values[rows, columns], columns, strict=True))
    assert order == sorted(order)
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == size

    log_probs = exact_log_probs(logits, normalized)
    exact = np.where(paths[:, None] > -INF, paths[:, None].astype(np.float64) + log_probs, -INF)
    if np.any(np.isfinite(exact) & (np.abs(exact) > 3.3e38)):
        return  # float32 says infinite or not as it rounds
    slack = margin(exact) + 2e-6 * np.abs(paths[:, None])
    assert np.all(np.abs(log_probs[rows, columns] - got.log_probs.numpy()) <= slack[rows, columns])
    limit = max(bound, exact.max(initial=-INF) + log_gate)
    taken = np.zeros(exact.shape, bool)
    taken[rows, columns] = True
    assert np.all(exact[taken] >= limit - slack[taken])
    if size == most:
        limit = max(limit, float(got.scores[-1])) if most else INF
    with np.errstate(invalid="ignore"):
        assert not np.any(~taken & (exact > limit + slack))


class TestBestCandidates:
    gates = st.one_of(
        st.none(),
        st.just(-INF),
        st.sampled_from([0.0, -1.0, -2.0, math.log(0.03)]),
        st.floats(-60, 0, width=32),
    )
    bounds = st.one_of(
        st.none(),
        st.just(-INF),
        st.sampled_from([0.0, -2.0, -4.0, INF]),
        st.floats(-60, 5, width=32),
    )
    mosts = st.one_of(st.integers(1, 12), st.sampled_from([59, 255, 10_000]))
    limits = st.one_of(
        st.none(), st.sampled_from([0, -1, -(2**31), 2**31 - 1]), st.integers(-2, 70)
    )

    @given(st.data(), st.integers(0, 5), st.integers(0, 2), mosts, limits, gates, bounds)
    @many
    def test_of_log_probabilities_exactly(self, data, rows, padding, most, limit, log_gate, bound):
        logits, scores = data.draw(matrices(st.just(rows))), data.draw(path_scores(rows))
        numbers = (-INF if number is None else number for number in (log_gate, bound))
        expected = brute_candidates(logits, scores, fewest(most, limit), *numbers)
        given = poisoned(logits, padding), poisoned(scores, padding), most, limit, log_gate, bound
        for got in of_each(
            lambda: checked(select(*given, normalized=True, live=rows), most)
        ).values():
            assert got.rows.tolist() == [row for _, row, _, _ in expected]
            assert got.columns.tolist() == [column for _, _, column, _ in expected]
            assert got.scores.tolist() == [float(score) for score, _, _, _ in expected]
            assert got.log_probs.tolist() == [float(value) for _, _, _, value in expected]

    @given(st.data(), st.integers(0, 5), st.integers(0, 2), mosts, limits, gates, bounds)
    @many
    def test_of_logits_up_to_rounding(self, data, rows, padding, most, limit, log_gate, bound):
        logits, scores = data.draw(matrices(st.just(rows))), data.draw(path_scores(rows))
        given = poisoned(logits, padding), poisoned(scores, padding), most, limit, log_gate, bound
        results = of_each(lambda: checked(select(*given, live=rows), most))
        for got in results.values():
            check_candidates(logits, scores, fewest(most, limit), log_gate, bound, False, got)
        ranked = [got.scores.double().numpy() for got in results.values()]
        common = min(map(len, ranked))
        assert ranked[0][:common] == pytest.approx(ranked[-1][:common], rel=1e-5, abs=1e-5)

    @given(st.data(), st.integers(0, 4), mosts, gates, st.booleans())
    @many
    def test_rows_and_columns_of_nothing_change_nothing(
        self, data, rows, most, log_gate, normalized
    ):
        """Rows of score -inf, and columns of -inf at the end."""
        logits, scores = data.draw(matrices(st.just(rows))), data.draw(path_scores(rows))
        padding = data.draw(st.lists(st.booleans(), min_size=rows + 2, max_size=rows + 2))
        where, rows_of, row = [], [], 0
        for pad in padding:
            if not pad and row < rows:
                rows_of.append(len(where))
                where.append(row)
                row += 1
            else:
                where.append(-1)
        for rest in range(row, rows):
            rows_of.append(len(where))
            where.append(rest)
        extra = torch.full(
            (len(where), logits.shape[1] + data.draw(st.integers(0, 300))), -INF, dtype=logits.dtype
        )
        extra[:, : logits.shape[1]] = 7.0
        padded_scores = torch.full((len(where),), data.draw(st.sampled_from([-INF, NAN])))
        for place, source in enumerate(where):
            if source >= 0:
                extra[place, : logits.shape[1]], padded_scores[place] = (
                    logits[source],
                    scores[source],
                )
        arguments = {"log_gate": log_gate, "normalized": normalized}
        plain = of_each(lambda: checked(select(logits, scores, most, **arguments), most))
        padded = of_each(lambda: checked(select(extra, padded_scores, most, **arguments), most))
        for backend in plain:
            if normalized or backend == "cpp":  # torch's sums depend on the length of a row
                assert padded[backend].rows.tolist() == [
                    rows_of[row] for row in plain[backend].rows.tolist()
                ]
                for name in ("columns", "log_probs", "scores"):
                    assert torch.equal(
                        getattr(padded[backend], name), getattr(plain[backend], name)
                    )
            else:
                check_candidates(
                    extra, padded_scores, most, log_gate, -INF, normalized, padded[backend]
                )

    @each_backend
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("columns", [4099, 49157])
    def test_long_rows(self, backend, dtype, columns):
        generator = torch.Generator().manual_seed(columns)
        logits = 3 * torch.randn(10, columns, generator=generator)
        logits[1] = logits[1].round()
        logits[2, ::11] = NAN
        logits[3] = 0.0
        logits, scores = logits.to(dtype), torch.randn(10, generator=generator) - 2
        for most in (1, 59, 2000):
            for log_gate in (None, math.log(0.03)):
                got = checked(select(logits, scores, most, log_gate=log_gate), most)
                check_candidates(logits, scores, most, log_gate, -INF, False, got)

    @each_backend
    def test_where_all_tie_the_first_ones_win(self, backend):
        got = select(torch.zeros(3, 2000), torch.zeros(3), 2100, normalized=True)
        assert got.rows.tolist() == [0] * 2000 + [1] * 100
        assert got.columns.tolist() == [*range(2000), *range(100)]

    @each_backend
    def test_of_columns_that_round_to_one_log_probability_the_larger_logit_wins(self, backend):
        logits = torch.tensor([[0.0, 1e-7, 2e-7, 30.0]])
        got = select(logits, torch.zeros(1), 4)
        assert got.log_probs[1:].unique().numel() == 1
        assert got.columns.tolist() == [3, 2, 1, 0]

    @each_backend
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_strided_inputs(self, backend, dtype):
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(600, 600, generator=generator).to(dtype)
        scores = torch.randn(1200, 2, generator=generator)
        views = (
            wide[:6, 17:400],
            wide[::200],
            wide[:, :5].T,
            wide[:6, ::2],
            wide[:1].expand(6, 600),
        )
        for view in views:
            arguments = scores[: 2 * len(view) : 2, 1], 40
            got = select(view, *arguments, normalized=True)
            expected = select(view.contiguous(), arguments[0].contiguous(), 40, normalized=True)
            assert all(map(torch.equal, got, expected))

    @each_backend
    def test_nothing_to_select(self, backend):
        scores, nothing = torch.zeros(2), torch.full((2,), -INF)
        for logits, paths, options in (
            (torch.zeros(0, 5), scores[:0], {}),
            (torch.zeros(2, 5), scores, {"live": 0}),
            (torch.zeros(2, 5), scores, {"limit": 0}),
            (torch.zeros(2, 5), scores, {"limit": -7}),
            (torch.zeros(2, 5), scores, {"bound": INF}),
            (torch.zeros(2, 5), nothing, {"log_gate": -1.0}),
            (torch.full((2, 5), -INF), scores, {"log_gate": 0.0}),
        ):
            assert len(checked(select(logits, paths, 3, **options), 3).rows) == 0

    @each_backend
    def test_sums_beyond_float32_pass_any_gate(self, backend):
        for log_gate in (None, -INF, -1.0):
            got = select(
                torch.tensor([[0.0, INF]]),
                torch.tensor([INF]),
                5,
                log_gate=log_gate,
                normalized=True,
            )
            assert got.columns[:1].tolist() == [1]
            assert int(got.live) == (1 if log_gate == -1.0 else 2)

    @each_backend
    def test_a_count_of_more_than_there_are_is_all(self, backend):
        assert int(select(torch.zeros(2, 3), torch.zeros(2), 9, live=5).live) == 6

    @each_backend
    def test_refuses(self, backend):
        logits, scores, one = torch.zeros(2, 3), torch.zeros(2), count(1)
        for wrong in (torch.zeros(3), torch.zeros(2, 3, dtype=torch.float64)):
            with pytest.raises(InputError, match="logits"):
                ops.best_candidates(wrong, scores, one, 1)
        with pytest.raises(
            InputError, match=r"(logits|most): got .*accepted .*(at least 1|1 column)"
        ):
            ops.best_candidates(logits[:, :0], scores, one, 1)
        for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1)):
            with pytest.raises(InputError, match="scores"):
                ops.best_candidates(logits, wrong, one, 1)
        with pytest.raises(InputError, match="most"):
            ops.best_candidates(logits, scores, one, 0)
        for wrong in (one.long(), torch.zeros(2, dtype=torch.int32)):
            with pytest.raises(InputError, match=r"^live: got"):
                ops.best_candidates(logits, scores, wrong, 1)
            with pytest.raises(InputError, match=r"^limit: got"):
                ops.best_candidates(logits, scores, one, 1, limit=wrong)
        for name in ("log_gate", "bound"):
            for wrong in (scores, torch.zeros(1, dtype=torch.float64), one):
                with pytest.raises(InputError, match=name):
                    ops.best_candidates(logits, scores, one, 1, **{name: wrong})
