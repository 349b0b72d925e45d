"""step_queues: each backend against the whole history of what was ever pushed."""

import math
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.errors import InputError
from tests.ops.backends import BACKENDS, each_backend, of_each, running
from tests.ops.inputs import HUGE, INF, NAN, count, many, poisoned, some


class History:
    """The queues as sets of all candidates ever pushed: what the ranking says, recomputed from the start each time."""

    def __init__(self, budget, batch, max_depth):
        self.budget, self.batch, self.max_depth = budget, batch, max_depth
        # score, parent, token, depth, edge by order of creation
        self.known = {0: (0.0, -1, -1, 0, 0.0)}
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
        inner = [
            place
            for place, number in enumerate(self.queued)
            if self.known[number][3] < self.max_depth
        ]
        nodes = self.take(
            inner[self.batch - 1] + 1 if len(inner) >= self.batch else len(self.queued)
        )
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

    def step(self, candidates, begins, decide, fill):
        """Step as the op does; returns what it draws, and the mass. decide: the threshold, by the mass."""
        if begins:
            self.__init__(self.budget, self.batch, self.max_depth)
        self.push(candidates)
        *drawn, expand, mass = self.pop()
        threshold = decide(mass)
        expand = expand if mass >= threshold else []
        if fill and not expand:  # for the last time: what the queues hold after it is not asked for
            accepted, queued = self.accepted, self.queued
            drawn = [part + more for part, more in zip(drawn, self.fill()[:3], strict=True)]
            self.accepted, self.queued = accepted, queued
        return *drawn, expand, threshold

    def told(self, nodes, expand):
        known = [self.known[number] for number in nodes]
        mass = sum(math.exp(known[place][0]) for place in expand)
        return (
            [entry[1] for entry in known],
            [entry[2] for entry in known],
            [entry[4] for entry in known],
            expand,
            mass,
        )


class Queues:
    """The op, given lists: a frontier of the nodes that are the candidates' parents."""

    def __init__(self, budget, batch, max_depth, backend=None):
        self.arrays = ops.Queues.start(budget, "cpu")
        self.search = ops.Search(batch, max_depth, 0.0, False)
        self.backend, self.passes = backend, 0

    @property
    def bound(self):
        return float(self.arrays.bound)

    def step(
        self,
        candidates,
        threshold=0.0,
        fill=False,
        *,
        begins=None,
        going=True,
        token_ids=None,
        padding=0,
    ):
        """candidates: score, parent, its depth, column, edge."""
        self.passes = self.passes + 1 if begins is None else 1 if begins else 2
        places = sorted({entry[1:3] for entry in candidates})
        ids, depths = frontier_of(places)
        found = candidates_of(
            [(places.index(entry[1:3]), *entry[3:], entry[0]) for entry in candidates], padding
        )
        given = (
            ops.Nodes(
                torch.cat([ids, ids.new_zeros(padding + 1)]),
                count(max(len(ids), 1) if going else 0),
            ),
            depths,
        )
        search = self.search._replace(threshold=threshold, fill=fill)
        ids = None if token_ids is None else torch.tensor(token_ids)
        with running(self.backend) if self.backend else nullcontext():
            return checked(
                ops.step_queues(self.arrays, found, *given, ids, count(self.passes), search), self
            )


def frontier_of(places):
    """Nodes and the depths of all nodes. One node is named at several depths by adding a multiple of `APART`."""
    depths = torch.full((16 * APART,), HUGE)
    depths[0] = 0
    ids = torch.tensor([parent + APART * depth for parent, depth in places], dtype=torch.int64)
    depths[ids] = torch.tensor([depth for _, depth in places], dtype=torch.int64)
    return ids, depths


def candidates_of(rows, padding):
    """Places, columns, edges and scores; behind them NaN, and indices that exist."""
    places, columns, edges, scores = ([row[part] for row in rows] for part in range(4))
    whole = (torch.tensor([*part, *[0] * padding], dtype=torch.int64) for part in (places, columns))
    floats = (
        poisoned(torch.tensor(part, dtype=torch.float32), padding) for part in (edges, scores)
    )
    return ops.Candidates(*whole, *floats, count(len(rows)))


def checked(drawn, queues):
    """Parents, tokens, edges and places to expand, as lists."""
    budget, batch = len(queues.arrays.scores), queues.search.batch
    assert [part.dtype for part in drawn[:4]] == [
        torch.int64,
        torch.int64,
        torch.float32,
        torch.int32,
    ]
    assert [tuple(part.shape) for part in drawn[:4]] == [(budget,)] * 3 + [(1,)]
    assert (drawn.expand.ids.dtype, drawn.expand.live.dtype) == (torch.int64, torch.int32)
    assert drawn.expand.ids.shape == (min(batch, budget),)
    live, expanded = int(drawn.live), int(drawn.expand.live)
    assert not drawn.expand.ids[expanded:].any()
    assert bool(((drawn.parents[live:] >= 0) & (drawn.parents[live:] < 16 * APART)).all()), (
        "padding exists all the same"
    )
    parts = [part[:live].tolist() for part in drawn[:3]]
    return [
        [parent % APART for parent in parts[0]],
        *parts[1:],
        drawn.expand.ids[:expanded].tolist(),
    ]


def check_arrays(arrays, history):
    """The queues' state is the history's, behind their ends -inf."""
    budget = history.budget
    accepted = [history.known[number][0] for number in history.accepted]
    queued = [history.known[number] for number in history.queued]
    assert arrays.accepted.tolist() == accepted + [-INF] * (budget - len(accepted))
    assert arrays.scores.tolist() == [entry[0] for entry in queued] + [-INF] * (
        budget - len(queued)
    )
    assert (arrays.parents[: len(queued)] % APART).tolist() == [entry[1] for entry in queued]
    assert arrays.tokens[: len(queued)].tolist() == [entry[2] for entry in queued]
    assert arrays.depths[: len(queued)].tolist() == [entry[3] for entry in queued]
    assert arrays.log_probs[: len(queued)].tolist() == [entry[4] for entry in queued]
    assert arrays.bound.shape == (1,)
    assert float(arrays.bound) == history.bound


APART = 10
path = st.one_of(
    st.sampled_from([0.0, -0.0, -1.0, -1.5, -2.0, -3.0, -INF]), st.floats(-20, 0, width=32)
)
candidate = st.tuples(
    path, st.integers(0, 9), st.integers(0, 5), st.integers(0, 99), st.floats(-9, 0, width=32)
)
level = st.tuples(
    st.lists(candidate, max_size=25),
    st.sampled_from(["free", "free", "reached", "missed"]),  # the mass the threshold
    st.booleans(),  # filled up
    st.sampled_from([True, True, True, False]),  # there is a frontier
    st.sampled_from([False] * 9 + [True]),  # a new search begins
)
sizes = {"budget": st.integers(1, 30), "batch": st.integers(1, 40), "max_depth": st.integers(1, 7)}
THRESHOLDS = {
    "free": lambda mass: 0.0,
    "reached": lambda mass: mass * (1 - 1e-9),
    "missed": lambda mass: mass * (1 + 1e-9) + 1e-12,
}


def state(arrays):
    return [part.view(torch.int32).tolist() for part in arrays]


class TestStepQueues:
    @given(
        **sizes,
        levels=st.lists(level, max_size=6),
        ordered=st.booleans(),
        ids=st.booleans(),
        padding=st.integers(0, 3),
    )
    @many
    def test_random_searches_against_the_history(
        self, budget, batch, max_depth, levels, ordered, ids, padding
    ):
        """Each begins with queues that hold anything, and draws what the history says, as the queues after it do."""
        token_ids = [(7 * column + 10**12) % 101 for column in range(100)] if ids else None
        queues = [Queues(budget, batch, max_depth, backend) for backend in BACKENDS]
        history, begun = History(budget, batch, max_depth), False
        for queue in queues:
            for array in queue.arrays:
                array.fill_(NAN if array.is_floating_point() else HUGE)
        for candidates, kind, fill, going, begins in levels:
            if ordered:
                candidates = sorted(candidates, key=lambda entry: -entry[0])
            begins, going = begins or not begun, going or not begun
            options = {"begins": begins, "going": going, "token_ids": token_ids, "padding": padding}
            if not going:
                for queue in queues:
                    before = state(queue.arrays)
                    assert queue.step(candidates, 0.0, fill, **options) == [[], [], [], []]
                    assert state(queue.arrays) == before
                continue
            begun, known = True, candidates
            if ids:
                known = [(*entry[:3], token_ids[entry[3]], entry[4]) for entry in candidates]
            *expected, threshold = history.step(known, begins, THRESHOLDS[kind], fill)
            for queue in queues:
                assert queue.step(candidates, threshold, fill, **options) == expected
                check_arrays(queue.arrays, history)

    @pytest.mark.slow
    @given(**sizes, levels=st.lists(level, max_size=6))
    @many
    def test_what_is_not_above_the_bound_changes_nothing(self, budget, batch, max_depth, levels):
        for backend in BACKENDS:
            everything, pruned = (Queues(budget, batch, max_depth, backend) for _ in range(2))
            for candidates, _, fill, _, _ in levels:
                above = [
                    entry for entry in candidates if entry[0] > pruned.bound or pruned.passes == 0
                ]
                assert everything.step(candidates, 0.0, fill) == pruned.step(above, 0.0, fill)
                assert everything.bound == pruned.bound

    @given(
        st.integers(1, 30),
        st.integers(1, 12),
        st.integers(1, 4),
        st.integers(2, 4),
        st.integers(0, 10**6),
        st.sampled_from([0.1, 1.0, 10.0]),
        st.booleans(),
    )
    @some
    def test_a_search_finds_the_most_probable_nodes(
        self, budget, batch, max_depth, width, seed, concentration, bounded
    ):
        """Without an early stop: the most probable nodes of all that are not deeper than max_depth."""
        table = np.log(
            np.random.default_rng(seed).dirichlet(
                [concentration] * width, size=sum(width**d for d in range(max_depth))
            )
            + 1e-30
        ).astype(np.float32)
        # a heap: the distribution of node n is row n + 1, that of the root, -1, is row 0
        scores = {-1: 0.0}
        for row in range(len(table)):
            for column in range(width):
                scores[width * row + column] = float(
                    np.float32(scores[row - 1]) + table[row, column]
                )
        best = sorted(scores.values(), reverse=True)[:budget]

        def search():
            """Over a tree as the ops grow it, of which `heap` says where each node stands."""
            arrays, heap, masses = ops.Queues.start(budget, "cpu"), [-1], [1.0]
            depths, frontier, passes = torch.zeros(4 * budget + 1, dtype=torch.int64), [0], 0
            while frontier:
                rows = [heap[node] + 1 for node in frontier]
                paths = torch.tensor([scores[row - 1] for row in rows])
                found = ops.best_candidates(
                    torch.from_numpy(table[rows]),
                    paths,
                    count(len(rows)),
                    max(budget - 1, 1),
                    bound=arrays.bound if bounded and passes else None,
                    normalized=True,
                )
                passes, nodes = passes + 1, ops.Nodes.of(torch.tensor(frontier))
                # a column's token is its place in the heap: by the row that it comes from
                found = found._replace(
                    columns=torch.tensor(rows)[found.rows] * width + found.columns
                )
                given = (
                    arrays,
                    found,
                    nodes,
                    depths,
                    None,
                    count(passes),
                    ops.Search(batch, max_depth, 0.0, False),
                )
                drawn = ops.step_queues(*given)
                first = len(heap)
                heap += drawn.tokens[: int(drawn.live)].tolist()
                depths[first : len(heap)] = depths[drawn.parents[: int(drawn.live)]] + 1
                frontier = [first + place for place in drawn.expand.alive().tolist()]
                masses.append(math.fsum(math.exp(scores[heap[node]]) for node in frontier))
            return heap, masses

        for heap, masses in of_each(search).values():
            got = sorted((scores[node] for node in heap), reverse=True)[:budget]
            assert got == best
            assert all(later <= earlier + 1e-6 for earlier, later in pairwise(masses))

    @each_backend
    def test_ties_are_driven_out_by_order_of_creation(self, backend):
        queue = Queues(3, 2, 2**40)
        # G is full, and both are its worst
        assert queue.step([(-1.0, 0, 0, token, -1.0) for token in range(5)]) == [
            [0, 0],
            [0, 1],
            [-1.0, -1.0],
            [],
        ]
        assert queue.bound == -1.0
        assert queue.step([(-0.5, 1, 1, 8, 0.5), (-1.0, 1, 1, 7, 0.0)]) == [[1], [8], [0.5], [0]]

    @each_backend
    def test_of_equals_the_one_that_waited_is_drawn_first(self, backend):
        queue = Queues(10, 1, 9)
        assert queue.step([(-1.0, 0, 0, 1, -1.0), (-2.0, 0, 0, 2, -2.0)])[1] == [1]
        assert queue.step([(-2.0, 1, 1, 3, -1.0)])[1] == [2]

    @each_backend
    def test_a_budget_of_one_is_the_root_alone(self, backend):
        queue = Queues(1, 5, 9)
        assert queue.bound == 0.0
        for _ in range(2):
            assert queue.step([(0.0, 0, 0, 1, 0.0), (-1.0, 0, 0, 2, -1.0)], fill=True) == [
                [],
                [],
                [],
                [],
            ]
            assert queue.bound == 0.0

    @each_backend
    def test_a_batch_of_the_budget_or_more_takes_all(self, backend):
        for batch in (4, 5, 1000):
            queue = Queues(4, batch, 9)
            assert queue.step([(-float(score), 0, 0, score, 0.0) for score in (3, 1, 2, 4)])[1] == [
                1,
                2,
                3,
            ]

    @each_backend
    def test_greatest_depth(self, backend):
        """Nodes at it cost no pass, so they do not count in the batch, and none is drafted from."""
        queue = Queues(10, 1, 2)
        given = [
            (-1.0, 0, 1, 1, 0.0),
            (-2.0, 0, 1, 2, 0.0),
            (-3.0, 0, 0, 3, 0.0),
            (-4.0, 0, 0, 4, 0.0),
        ]
        assert queue.step(given) == [[0] * 3, [1, 2, 3], [0.0] * 3, [2]]

    @each_backend
    def test_the_threshold_is_of_those_drafted_from(self, backend):
        """A node at the greatest depth adds nothing to the mass, however likely it is."""
        given = [
            (-0.1, 0, 1, 1, 0.0),
            (math.log(0.25), 0, 0, 2, 0.0),
            (math.log(0.125), 0, 0, 3, 0.0),
        ]
        for threshold, expand in ((0.3749, [1, 2]), (0.3751, []), (0.0, [1, 2])):
            assert Queues(10, 5, 2).step(given, threshold)[3] == expand

    @each_backend
    def test_a_batch_of_the_threshold_itself_is_worth_a_pass(self, backend):
        given = [(0.0, 0, 0, 2, 0.0)]  # of a mass of exactly 1
        for threshold, expand in ((1.0, [0]), (math.nextafter(1.0, 2.0), [])):
            assert Queues(10, 5, 2, backend).step(given, threshold)[3] == expand

    @each_backend
    def test_the_tree_is_filled_up_when_the_search_stops(self, backend):
        given = [(-float(score), 0, 0, score, 0.0) for score in range(1, 8)]
        for threshold, fill, tokens in (
            (0.0, True, [1, 2]),
            (0.9, False, [1, 2]),
            (0.9, True, [1, 2, 3, 4]),
        ):
            parents, drawn, edges, expand = Queues(5, 2, 9).step(given, threshold, fill)
            assert (drawn, expand) == (tokens, [] if threshold else [0, 1])
            assert parents == edges == [0] * len(drawn)

    @each_backend
    def test_where_nothing_waits_nothing_is_filled_up(self, backend):
        assert Queues(5, 2, 9).step([(-INF, 0, 0, 1, 0.0)], fill=True) == [[], [], [], []]
        assert Queues(5, 2, 9).step([], fill=True) == [[], [], [], []]

    @each_backend
    def test_the_first_pass_forgets_the_search_before(self, backend):
        queue, fresh, given = (
            Queues(5, 1, 9),
            Queues(5, 1, 9),
            [(-3.0, 0, 0, 3, 0.0), (-4.0, 0, 0, 4, 0.0)],
        )
        queue.step([(-1.0, 0, 0, 1, 0.0), (-2.0, 0, 0, 2, 0.0)])
        assert queue.step(given, begins=True) == fresh.step(given) == [[0], [3], [0.0], [0]]
        check_same = zip(queue.arrays, fresh.arrays, strict=True)
        assert all(one.tolist() == other.tolist() for one, other in check_same)

    @each_backend
    def test_outputs_are_not_shared(self, backend):
        queue = Queues(10, 2, 9)
        arguments = (
            queue.arrays,
            candidates_of([(0, score, 0.0, -float(score)) for score in range(1, 6)], 0),
        )
        given = ops.Nodes.of(torch.tensor([0])), torch.zeros(1, dtype=torch.int64), None
        first = ops.step_queues(*arguments, *given, count(1), queue.search)
        queue.passes = 1
        queue.step([])
        assert first.tokens[:2].tolist() == [1, 2]
        assert first.expand.alive().tolist() == [0, 1]

    @each_backend
    def test_strided_candidates(self, backend):
        whole, floats = torch.arange(8).reshape(4, 2), -torch.arange(8.0).reshape(4, 2)
        found = ops.Candidates(whole[:, 0], whole[:, 1], floats[:, 0], floats[:, 1], count(4))
        nodes = ops.Nodes(
            torch.stack([torch.arange(8) + 1, torch.full((8,), HUGE)], 1)[:, 0], count(8)
        )
        depths, token_ids = torch.full((9, 2), HUGE), torch.full((8, 3), HUGE)
        depths[:, 0], token_ids[:, 1] = torch.arange(9), torch.arange(8) + 20
        given = depths[:, 0], token_ids[:, 1], count(1), ops.Search(10, 6, 0.0, False)
        drawn = ops.step_queues(ops.Queues.start(10, "cpu"), found, nodes, *given)
        assert int(drawn.live) == 4
        assert drawn.parents[:4].tolist() == [1, 3, 5, 7]
        assert drawn.tokens[:4].tolist() == [21, 23, 25, 27]
        assert drawn.expand.alive().tolist() == [0, 1]
        assert drawn.log_probs[:4].tolist() == [0.0, -2.0, -4.0, -6.0]

    @each_backend
    def test_refuses(self, backend):
        whole, floats, one = torch.zeros(3, dtype=torch.int64), torch.zeros(3), count(1)
        queues, found = (
            ops.Queues.start(3, "cpu"),
            ops.Candidates(whole, whole, floats, floats, one),
        )
        frontier, search = ops.Nodes(whole, one), ops.Search(1, 1, 0.0, False)

        def step(
            queues=queues,
            found=found,
            frontier=frontier,
            depths=whole,
            ids=None,
            passes=one,
            search=search,
        ):
            return ops.step_queues(queues, found, frontier, depths, ids, passes, search)

        for wrong in (
            found._replace(rows=whole[:2]),
            found._replace(log_probs=floats[:2]),
            found._replace(scores=floats.double()),
            found._replace(rows=whole.int()),
            found._replace(columns=whole.int()),
            found._replace(log_probs=floats.double()),
            ops.Candidates(*(part[:, None] for part in found[:4]), one),
        ):
            with pytest.raises(InputError, match=r"^(rows|columns|log_probs|scores): got"):
                step(found=wrong)
        for options in (
            {"depths": whole.int()},
            {"depths": whole[None]},
            {"ids": whole.int()},
            {"frontier": ops.Nodes(whole.int(), one)},
        ):
            with pytest.raises(InputError, match=r"^(frontier|depths|token_ids): got"):
                step(**options)
        for options in (
            {"queues": queues._replace(tokens=whole[:2])},
            {"passes": one.long()},
            {"frontier": ops.Nodes(whole, one.long())},
            {"found": found._replace(live=whole[:1])},
        ):
            with pytest.raises(InputError, match=r"^(tokens|live|passes): got"):
                step(**options)
        for wrong in (search._replace(batch=0), search._replace(max_depth=0)):
            with pytest.raises(InputError, match=r"^(batch|max_depth): got"):
                step(search=wrong)
        before = state(queues)
        with pytest.raises(InputError, match="NaN"):
            step(found=found._replace(scores=torch.tensor([-1.0, NAN, 0.0]), live=count(2)))
        assert state(queues) == before
        step(found=found._replace(scores=torch.tensor([-1.0, NAN, NAN])))
