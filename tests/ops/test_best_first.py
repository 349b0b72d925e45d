"""best_first: each backend against the whole history of what was ever pushed."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specengine import ops
from specengine.errors import InputError
from tests.ops.backends import BACKENDS, each_backend, of_each, running
from tests.ops.inputs import INF, NAN, many, some


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
        queue = ops.best_first(3, 2)
        push(queue, [(-1.0, 0, 0, token, -1.0) for token in range(5)])
        assert queue.bound == -1.0
        assert plain(queue.pop()) == [[0, 0], [0, 1], [-1.0, -1.0], [], 0.0]  # G is full, and both are its worst
        push(queue, [(-1.0, 1, 1, 7, 0.0), (-0.5, 1, 1, 8, 0.5)])
        assert plain(queue.pop()) == [[1], [8], [0.5], [0], math.exp(-0.5)]

    @each_backend
    def test_a_budget_of_one_is_the_root_alone(self, backend):
        queue = ops.best_first(1, 5)
        assert queue.bound == 0.0
        push(queue, [(0.0, 0, 0, 1, 0.0), (-1.0, 0, 0, 2, -1.0)])
        assert plain(queue.pop()) == plain(queue.fill()) == [[], [], [], [], 0.0]

    @each_backend
    def test_a_batch_of_the_budget_or_more_takes_all(self, backend):
        for batch in (4, 5, 1000):
            queue = ops.best_first(4, batch)
            push(queue, [(-float(score), 0, 0, score, 0.0) for score in (3, 1, 2, 4)])
            assert plain(queue.pop())[1] == [1, 2, 3]

    @each_backend
    def test_greatest_depth(self, backend):
        queue = ops.best_first(10, 10, max_depth=2)
        push(queue, [(-1.0, 0, 0, 1, 0.0), (-2.0, 0, 1, 2, 0.0)])
        assert queue.pop().expand.tolist() == [0]

    @each_backend
    def test_outputs_are_not_shared(self, backend):
        queue = ops.best_first(10, 2)
        push(queue, [(-float(score), 0, 0, score, 0.0) for score in range(1, 6)])
        first = queue.pop()
        queue.pop()
        assert first.tokens.tolist() == [1, 2]

    @each_backend
    def test_strided_candidates(self, backend):
        whole, real = torch.arange(8).reshape(4, 2), -torch.arange(8.0).reshape(4, 2)
        queue = ops.best_first(10, 10)
        queue.push(whole[:, 0], whole[:, 1], whole[:, 1], real[:, 0], real[:, 1])
        popped = queue.pop()
        assert popped.parents.tolist() == [0, 2, 4, 6]
        assert popped.tokens.tolist() == [1, 3, 5, 7]
        assert popped.log_probs.tolist() == [0.0, -2.0, -4.0, -6.0]

    @each_backend
    def test_refuses(self, backend):
        whole, real = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
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
