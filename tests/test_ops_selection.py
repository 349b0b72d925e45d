"""best_candidates, top_entropy and best_first: each backend against brute force, and against each other."""

import math
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine import ops
from specengine.errors import InputError

NAN, INF = math.nan, math.inf
LARGEST = np.float32(ops.LARGEST)
BACKENDS = ops.backends("cpu")["best_first"].available

many = settings(deadline=None, max_examples=500, derandomize=True)
some = settings(many, max_examples=100)

each_backend = pytest.mark.parametrize("backend", ["cpp", "reference"])


@contextmanager
def running(backend):
    if backend not in BACKENDS:
        pytest.skip("specengine._expander is not built (pip install -e .)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ops.VARIABLE, backend)
        yield


def of_each(call):
    """What `call` gives with each backend, by its name."""
    results = {}
    for backend in BACKENDS:
        with running(backend):
            results[backend] = call()
    return results


@pytest.fixture(scope="module", autouse=True)
def poisoned_buffers():
    """Fresh tensors hold NaN or the largest integer, so that an output that is not written shows."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def test_fresh_buffers_are_poisoned_and_both_backends_are_compared():
    assert torch.empty(4).isnan().all()
    assert torch.empty(4).resize_(2).isnan().all()
    if "cpp" not in BACKENDS:
        pytest.skip("specengine._expander is not built (pip install -e .)")


# ---------------------------------------------------------------------------------------------------- inputs

COLUMNS = st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 300, 512, 1000]))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SPECIAL = np.array([NAN, INF, -INF, 3.4e38, -3.4e38, 0.0, -0.0], np.float32)


@st.composite
def matrices(draw, rows, columns=COLUMNS, highest=INF):
    """Random rows: fine or coarse (which ties), of several spreads, with or without special values."""
    width = draw(columns)
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = generator.normal(0, draw(st.sampled_from([0.0, 0.5, 4.0, 30.0])), (draw(rows), width))
    if draw(st.booleans()):
        values = values.round()
    values = values.astype(np.float32)
    if draw(st.booleans()):
        places = generator.random(values.shape) < draw(st.sampled_from([0.05, 0.5, 1.0]))
        values[places] = generator.choice(SPECIAL, int(places.sum()))
    return torch.from_numpy(np.fmin(values, np.float32(highest))).to(draw(DTYPES))


@st.composite
def path_scores(draw, rows):
    """Rows' path log-probabilities: with ties, paddings of -inf, and what must not occur but may."""
    value = st.one_of(st.sampled_from([0.0, -0.0, -1.0, -2.0, -INF]), st.floats(-40, 0, width=32))
    if draw(st.integers(0, 9)) == 0:
        value = st.one_of(value, st.sampled_from([NAN, INF, 3.4e38]))
    return torch.tensor(draw(st.lists(value, min_size=rows, max_size=rows)), dtype=torch.float32)


def defined(tensor):
    values = tensor.float().numpy()
    return np.minimum(np.where(np.isnan(values), np.float32(-INF), values), LARGEST)


def exact_log_probs(logits, normalized):
    """float64 [rows, V]."""
    values = defined(logits).astype(np.float64)
    if normalized:
        return values
    peaks = values.max(1, initial=-INF, keepdims=True)
    peaks[peaks == -INF] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > -INF, values - peaks - np.log(np.exp(values - peaks).sum(1, keepdims=True)), -INF)


# ---------------------------------------------------------------------------------------------------- best_candidates


def brute_candidates(logits, scores, count, log_gate, bound):
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
    return found[:count]


def margin(score):
    """How far rounding may move a score of float32."""
    return 1e-5 + 2e-6 * np.abs(score)


def check_candidates(logits, scores, count, log_gate, bound, normalized, got):
    """Every promise that does not depend on how the backend rounds; selection is exact up to `margin`."""
    assert [tensor.dtype for tensor in got] == [torch.int64, torch.int64, torch.float32, torch.float32]
    size = len(got.rows)
    assert {tuple(tensor.shape) for tensor in got} == {(size,)}
    assert size <= count
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
    if size == count:
        limit = max(limit, float(got.scores[-1])) if count else INF
    with np.errstate(invalid="ignore"):
        assert not np.any(~taken & (exact > limit + slack))


class TestBestCandidates:
    gates = st.one_of(st.just(-INF), st.sampled_from([0.0, -1.0, -2.0, math.log(0.03)]), st.floats(-60, 0, width=32))
    bounds = st.one_of(st.just(-INF), st.sampled_from([0.0, -2.0, -4.0, INF]), st.floats(-60, 5, width=32))
    counts = st.one_of(st.integers(0, 12), st.sampled_from([59, 255, 10_000, 10**9]))

    @given(st.data(), st.integers(0, 5), counts, gates, bounds)
    @many
    def test_of_log_probabilities_exactly(self, data, rows, count, log_gate, bound):
        logits, scores = data.draw(matrices(st.just(rows))), data.draw(path_scores(rows))
        expected = brute_candidates(logits, scores, count, log_gate, bound)
        for got in of_each(
            lambda: ops.best_candidates(logits, scores, count, log_gate=log_gate, bound=bound, normalized=True)
        ).values():
            assert got.rows.tolist() == [row for _, row, _, _ in expected]
            assert got.columns.tolist() == [column for _, _, column, _ in expected]
            assert got.scores.tolist() == [float(score) for score, _, _, _ in expected]
            assert got.log_probs.tolist() == [float(value) for _, _, _, value in expected]

    @given(st.data(), st.integers(0, 5), counts, gates, bounds)
    @many
    def test_of_logits_up_to_rounding(self, data, rows, count, log_gate, bound):
        logits, scores = data.draw(matrices(st.just(rows))), data.draw(path_scores(rows))
        results = of_each(lambda: ops.best_candidates(logits, scores, count, log_gate=log_gate, bound=bound))
        for got in results.values():
            check_candidates(logits, scores, count, log_gate, bound, False, got)
        ranked = [got.scores.double().numpy() for got in results.values()]
        common = min(map(len, ranked))
        assert ranked[0][:common] == pytest.approx(ranked[-1][:common], rel=1e-5, abs=1e-5)

    @given(st.data(), st.integers(0, 4), counts, gates, st.booleans())
    @many
    def test_padding_changes_nothing(self, data, rows, count, log_gate, normalized):
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
        extra = torch.full((len(where), logits.shape[1] + data.draw(st.integers(0, 300))), -INF, dtype=logits.dtype)
        extra[:, : logits.shape[1]] = 7.0
        padded_scores = torch.full((len(where),), data.draw(st.sampled_from([-INF, NAN])))
        for place, source in enumerate(where):
            if source >= 0:
                extra[place, : logits.shape[1]], padded_scores[place] = logits[source], scores[source]
        arguments = {"log_gate": log_gate, "normalized": normalized}
        plain = of_each(lambda: ops.best_candidates(logits, scores, count, **arguments))
        padded = of_each(lambda: ops.best_candidates(extra, padded_scores, count, **arguments))
        for backend in plain:
            if normalized or backend == "cpp":  # torch's sums depend on the length of a row
                assert padded[backend].rows.tolist() == [rows_of[row] for row in plain[backend].rows.tolist()]
                for name in ("columns", "log_probs", "scores"):
                    assert torch.equal(getattr(padded[backend], name), getattr(plain[backend], name))
            else:
                check_candidates(extra, padded_scores, count, log_gate, -INF, normalized, padded[backend])

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
        with running(backend):
            for count in (1, 59, 2000):
                for log_gate in (-INF, math.log(0.03)):
                    got = ops.best_candidates(logits, scores, count, log_gate=log_gate)
                    check_candidates(logits, scores, count, log_gate, -INF, False, got)

    @each_backend
    def test_where_all_tie_the_first_ones_win(self, backend):
        with running(backend):
            got = ops.best_candidates(torch.zeros(3, 2000), torch.zeros(3), 2100, normalized=True)
        assert got.rows.tolist() == [0] * 2000 + [1] * 100
        assert got.columns.tolist() == [*range(2000), *range(100)]

    @each_backend
    def test_of_columns_that_round_to_one_log_probability_the_larger_logit_wins(self, backend):
        logits = torch.tensor([[0.0, 1e-7, 2e-7, 30.0]])
        with running(backend):
            got = ops.best_candidates(logits, torch.zeros(1), 4)
        assert got.log_probs[1:].unique().numel() == 1
        assert got.columns.tolist() == [3, 2, 1, 0]

    @each_backend
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_strided_inputs(self, backend, dtype):
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(600, 600, generator=generator).to(dtype)
        scores = torch.randn(1200, 2, generator=generator)
        views = (wide[:6, 17:400], wide[::200], wide[:, :5].T, wide[:6, ::2], wide[:1].expand(6, 600))
        with running(backend):
            for view in views:
                arguments = scores[: 2 * len(view) : 2, 1], 40
                got = ops.best_candidates(view, *arguments, normalized=True)
                expected = ops.best_candidates(view.contiguous(), arguments[0].contiguous(), 40, normalized=True)
                assert all(map(torch.equal, got, expected))

    @each_backend
    def test_nothing_to_select(self, backend):
        with running(backend):
            for logits, count in ((torch.zeros(0, 5), 3), (torch.zeros(2, 0), 3), (torch.zeros(2, 5), 0)):
                got = ops.best_candidates(logits, torch.zeros(len(logits)), count)
                assert [len(tensor) for tensor in got] == [0] * 4

    @each_backend
    def test_refuses(self, backend):
        logits, scores = torch.zeros(2, 3), torch.zeros(2)
        with running(backend):
            for wrong in (torch.zeros(3), torch.zeros(2, 3, dtype=torch.float64)):
                with pytest.raises(InputError, match="logits"):
                    ops.best_candidates(wrong, scores, 1)
            for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1)):
                with pytest.raises(InputError, match="scores"):
                    ops.best_candidates(logits, wrong, 1)
            for count, options in ((-1, {}), (1, {"log_gate": 0.1}), (1, {"log_gate": NAN}), (1, {"bound": NAN})):
                with pytest.raises(InputError, match="count, log_gate, bound"):
                    ops.best_candidates(logits, scores, count, **options)


# ---------------------------------------------------------------------------------------------------- top_entropy


def brute_entropy(logits, top, normalized):
    """float64 [rows]."""
    log_probs = -np.sort(-exact_log_probs(logits, normalized), axis=1)[:, :top]
    with np.errstate(over="ignore", invalid="ignore"):
        return -np.where(log_probs > -INF, np.exp(log_probs) * log_probs, 0.0).sum(1)


def check_entropy(logits, top, normalized):
    expected = brute_entropy(logits, top, normalized)
    for got in of_each(lambda: ops.top_entropy(logits, top, normalized=normalized)).values():
        assert got.dtype == torch.float32
        assert got.shape == (len(logits),)
        got = got.double().numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            close = np.abs(got - expected) <= 1e-5 + 2e-6 * np.abs(expected)
        assert np.all(close | (got == expected.astype(np.float32)))


class TestTopEntropy:
    @given(st.data(), st.integers(0, 4), st.one_of(st.integers(1, 30), st.sampled_from([255, 256, 300, 5000])))
    @many
    def test_against_float64(self, data, rows, top):
        check_entropy(data.draw(matrices(st.just(rows))), top, False)

    @given(st.data(), st.integers(0, 4), st.one_of(st.integers(1, 30), st.sampled_from([255, 256, 300, 5000])))
    @many
    def test_of_log_probabilities(self, data, rows, top):
        check_entropy(data.draw(matrices(st.just(rows), highest=0.0)), top, True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("columns", [4099, 8192, 49157])
    @pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
    def test_long_rows(self, dtype, columns, spread):
        logits = spread * torch.randn(3, columns, generator=torch.Generator().manual_seed(columns))
        logits[1] = logits[1].round()
        logits[2, 500:] = -INF  # fewer than `top` that count
        for top in (1, 100, 1000, columns - 1, columns):
            check_entropy(logits.to(dtype), top, False)

    @each_backend
    def test_known_values(self, backend):
        with running(backend):
            even = ops.top_entropy(torch.zeros(1, 1024), 2000)
            half = ops.top_entropy(torch.zeros(1, 1024), 512)
            certain = ops.top_entropy(torch.tensor([[0.0, -INF, -INF], [-INF, -INF, NAN], [90.0, -90.0, 0.0]]), 2)
            alone = ops.top_entropy(torch.tensor([[3.0]]), 1)
        assert even.tolist() == pytest.approx([math.log(1024)], abs=1e-5)
        assert half.tolist() == pytest.approx([math.log(1024) / 2], abs=1e-5)  # of p over the whole row
        assert certain.tolist() + alone.tolist() == pytest.approx([0.0] * 4, abs=1e-30)

    @each_backend
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_strided_rows_and_columns(self, backend, dtype):
        wide = torch.randn(600, 600, generator=torch.Generator().manual_seed(0)).to(dtype)
        with running(backend):
            for view in (wide[:6, 17:400], wide[::200], wide[:, :5].T, wide[:6, ::2], wide[:1].expand(6, 600)):
                torch.testing.assert_close(ops.top_entropy(view, 50), ops.top_entropy(view.contiguous(), 50))

    @each_backend
    def test_refuses(self, backend):
        with running(backend):
            for logits, top in ((torch.zeros(2, 3), 0), (torch.zeros(2, 0), 1)):
                with pytest.raises(InputError, match="top: got"):
                    ops.top_entropy(logits, top)
            for wrong in (torch.zeros(3), torch.zeros(2, 3, dtype=torch.float64)):
                with pytest.raises(InputError, match="logits"):
                    ops.top_entropy(wrong, 1)


# ---------------------------------------------------------------------------------------------------- best_first


class History:
    """The queues as sets of all candidates ever pushed: what the ranking says, recomputed from the start each time."""

    def __init__(self, budget, batch, max_depth):
        self.budget, self.batch, self.max_depth = budget, batch, max_depth
        self.known = {0: (0.0, -1, -1, 0, 0.0)}  # score, parent, token, depth, edge by order of creation
        self.accepted, self.queued = [0], []

    def best(self, numbers, count):
        return sorted(numbers, key=lambda number: (-self.known[number][0], number))[:count]

    @property
    def bound(self):
        best = self.best(self.accepted + self.queued, self.budget)
        return self.known[best[-1]][0] if len(best) == self.budget else -INF

    def push(self, candidates):
        for score, parent, depth, token, edge in candidates:
            if score > -INF:
                self.queued.append(len(self.known))
                self.known[len(self.known)] = (score, parent, token, depth + 1, edge)
        self.queued = self.best(self.queued, self.budget)

    def take(self, count):
        taken = self.queued[:count]
        self.queued = self.queued[count:]
        self.accepted = self.best(self.accepted + taken, self.budget)
        return [number for number in taken if number in self.accepted]

    def pop(self):
        inner = [place for place, number in enumerate(self.queued) if self.known[number][3] < self.max_depth]
        nodes = self.take(inner[self.batch - 1] + 1 if len(inner) >= self.batch else len(self.queued))
        full = len(self.accepted) == self.budget
        worst = self.known[self.accepted[-1]][0] if full else -INF
        expand = [
            place
            for place, (score, _, _, depth, _) in enumerate(self.known[number] for number in nodes)
            if score > worst and depth < self.max_depth
        ]
        return self.told(nodes, expand)

    def fill(self):
        return self.told(self.take(self.budget - len(self.accepted)), [])

    def told(self, nodes, expand):
        known = [self.known[number] for number in nodes]
        mass = sum(math.exp(known[place][0]) for place in expand)
        return [entry[1] for entry in known], [entry[2] for entry in known], [entry[4] for entry in known], expand, mass


def push(queue, candidates):
    score, parent, depth, token, edge = zip(*candidates, strict=True) if candidates else ([],) * 5
    whole = {"dtype": torch.int64}
    queue.push(
        torch.tensor(parent, **whole),
        torch.tensor(depth, **whole),
        torch.tensor(token, **whole),
        torch.tensor(edge, dtype=torch.float32),
        torch.tensor(score, dtype=torch.float32),
    )


def check_popped(popped, expected):
    parents, tokens, log_probs, expand, mass = expected
    assert [tensor.dtype for tensor in popped[:4]] == [torch.int64, torch.int64, torch.float32, torch.int64]
    assert popped.parents.tolist() == parents
    assert popped.tokens.tolist() == tokens
    assert popped.log_probs.tolist() == log_probs
    assert popped.expand.tolist() == expand
    assert popped.mass == pytest.approx(mass, rel=1e-12, abs=1e-300)


def plain(popped):
    return [field.tolist() if isinstance(field, torch.Tensor) else field for field in popped]


path = st.one_of(st.sampled_from([0.0, -0.0, -1.0, -1.5, -2.0, -3.0, -INF]), st.floats(-20, 0, width=32))
candidate = st.tuples(path, st.integers(0, 9), st.integers(0, 5), st.integers(0, 10**12), st.floats(-9, 0, width=32))
steps = st.lists(st.one_of(st.lists(candidate, max_size=25), st.just("pop"), st.just("pop"), st.just("fill")))
sizes = {"budget": st.integers(1, 30), "batch": st.integers(1, 40), "max_depth": st.integers(1, 7)}


class TestBestFirst:
    @given(**sizes, steps=steps, ordered=st.booleans())
    @many
    def test_random_sequences_against_the_history(self, budget, batch, max_depth, steps, ordered):
        queues = of_each(lambda: ops.best_first(budget, batch, max_depth))
        history = History(budget, batch, max_depth)
        for step in [*steps, "pop", "fill"]:
            if isinstance(step, list) and ordered:
                step = sorted(step, key=lambda entry: -entry[0])
            expected = getattr(history, step)() if isinstance(step, str) else history.push(step)
            for queue in queues.values():
                if isinstance(step, str):
                    check_popped(getattr(queue, step)(), expected)
                else:
                    push(queue, step)
                assert queue.bound == history.bound

    @given(**sizes, steps=steps)
    @many
    def test_what_is_not_above_the_bound_changes_nothing(self, budget, batch, max_depth, steps):
        for backend in BACKENDS:
            with running(backend):
                everything, pruned = ops.best_first(budget, batch, max_depth), ops.best_first(budget, batch, max_depth)
            for step in [*steps, "pop", "fill"]:
                if isinstance(step, str):
                    assert plain(getattr(everything, step)()) == plain(getattr(pruned, step)())
                else:
                    above = [entry for entry in step if entry[0] > pruned.bound]
                    push(everything, step)
                    push(pruned, above)
                    assert everything.bound == pruned.bound

    @given(
        st.integers(1, 30),
        st.integers(1, 12),
        st.integers(1, 4),
        st.integers(2, 4),
        st.integers(0, 10**6),
        st.sampled_from([0.1, 1.0, 10.0]),
    )
    @some
    def test_a_search_finds_the_most_probable_nodes(self, budget, batch, max_depth, width, seed, concentration):
        """Without an early stop: the most probable nodes of all that are not deeper than max_depth."""
        table = np.log(
            np.random.default_rng(seed).dirichlet([concentration] * width, size=sum(width**d for d in range(max_depth)))
            + 1e-30
        ).astype(np.float32)
        # a heap: the distribution of node n is row n + 1, that of the root, -1, is row 0
        scores = {-1: 0.0}
        for row in range(len(table)):
            for column in range(width):
                scores[width * row + column] = float(np.float32(scores[row - 1]) + table[row, column])
        best = sorted(scores.values(), reverse=True)[:budget]

        def search():
            queue = ops.best_first(budget, batch, max_depth)
            nodes, masses, rows, depths = [-1], [1.0], [-1], [0]
            while rows:
                candidates = [
                    (scores[width * (row + 1) + column], place, depth, width * (row + 1) + column, 0.0)
                    for place, (row, depth) in enumerate(zip(rows, depths, strict=True))
                    for column in range(width)
                ]
                push(queue, candidates)
                popped = queue.pop()
                drawn = popped.tokens.tolist()
                nodes += drawn
                rows = [drawn[place] for place in popped.expand.tolist()]
                depths = [depth_of(row) for row in rows]
                masses.append(popped.mass)
            return nodes, masses

        def depth_of(node):
            depth = 0
            while node >= 0:
                node, depth = node // width - 1, depth + 1
            return depth

        for nodes, masses in of_each(search).values():
            got = sorted((scores[node] for node in nodes), reverse=True)[:budget]
            assert got == best
            assert all(later <= earlier + 1e-6 for earlier, later in pairwise(masses))

    @each_backend
    def test_ties_are_driven_out_by_order_of_creation(self, backend):
        with running(backend):
            queue = ops.best_first(3, 2)
            push(queue, [(-1.0, 0, 0, token, -1.0) for token in range(5)])
            assert queue.bound == -1.0
            assert plain(queue.pop()) == [[0, 0], [0, 1], [-1.0, -1.0], [], 0.0]  # G is full, and both are its worst
            push(queue, [(-1.0, 1, 1, 7, 0.0), (-0.5, 1, 1, 8, 0.5)])
            assert plain(queue.pop()) == [[1], [8], [0.5], [0], math.exp(-0.5)]

    @each_backend
    def test_a_budget_of_one_is_the_root_alone(self, backend):
        with running(backend):
            queue = ops.best_first(1, 5)
            assert queue.bound == 0.0
            push(queue, [(0.0, 0, 0, 1, 0.0), (-1.0, 0, 0, 2, -1.0)])
            assert plain(queue.pop()) == plain(queue.fill()) == [[], [], [], [], 0.0]

    @each_backend
    def test_a_batch_of_the_budget_or_more_takes_all(self, backend):
        with running(backend):
            for batch in (4, 5, 1000):
                queue = ops.best_first(4, batch)
                push(queue, [(-float(score), 0, 0, score, 0.0) for score in (3, 1, 2, 4)])
                assert plain(queue.pop())[1] == [1, 2, 3]

    @each_backend
    def test_greatest_depth(self, backend):
        with running(backend):
            queue = ops.best_first(10, 10, max_depth=2)
            push(queue, [(-1.0, 0, 0, 1, 0.0), (-2.0, 0, 1, 2, 0.0)])
            assert queue.pop().expand.tolist() == [0]

    @each_backend
    def test_outputs_are_not_shared(self, backend):
        with running(backend):
            queue = ops.best_first(10, 2)
            push(queue, [(-float(score), 0, 0, score, 0.0) for score in range(1, 6)])
            first = queue.pop()
            queue.pop()
        assert first.tokens.tolist() == [1, 2]

    @each_backend
    def test_strided_candidates(self, backend):
        whole, real = torch.arange(8).reshape(4, 2), -torch.arange(8.0).reshape(4, 2)
        with running(backend):
            queue = ops.best_first(10, 10)
            queue.push(whole[:, 0], whole[:, 1], whole[:, 1], real[:, 0], real[:, 1])
            popped = queue.pop()
        assert popped.parents.tolist() == [0, 2, 4, 6]
        assert popped.tokens.tolist() == [1, 3, 5, 7]
        assert popped.log_probs.tolist() == [0.0, -2.0, -4.0, -6.0]

    @each_backend
    def test_refuses(self, backend):
        whole, real = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
        with running(backend):
            for arguments in ((0, 1), (1, 0), (1, 1, 0)):
                with pytest.raises(InputError, match="accepted 1 or more"):
                    ops.best_first(*arguments)
            queue = ops.best_first(3, 3)
            with pytest.raises(InputError, match="NaN"):
                queue.push(whole, whole, whole, real, torch.tensor([-1.0, NAN]))
            assert not queue.pop().tokens.numel()
            for wrong in (
                (whole, whole, whole, real, real[:1]),
                (whole, whole[:1], whole, real, real),
                (whole, whole.int(), whole, real, real),
                (whole, whole, whole, real.double(), real),
                (whole[:, None], whole[:, None], whole[:, None], real[:, None], real[:, None]),
            ):
                with pytest.raises(InputError, match="candidates"):
                    queue.push(*wrong)
