"""Ops of the search that weighs worth against costs: each backend against trying everything; what they refuse."""

import gc
import math

import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.errors import InputError
from specengine.ops import (
    Counts,
    Drafted,
    Limits,
    Nodes,
    Notes,
    Prices,
    SearchState,
    Throughput,
    worth,
)
from specengine.ops.worth import KNOTS, LEVELS, MAX_CHANCE, MIN_CHANCE, ODDS, PLACES, WINDOW, WORTH
from tests import toy
from tests.ops import cases
from tests.ops.backends import each_backend, of_each
from tests.ops.inputs import INF, alive, count, poisoned, quick, some

STEPS = [0.0, 0.01, 0.05, 0.3]


def table_of(least, *points):
    return torch.tensor([0.0, *(least * float(point) for point in points)])


@st.composite
def prices(draw, nodes=12, width=5):
    verify = draw(st.lists(st.integers(0, 9), min_size=1, max_size=nodes))
    draft = draw(st.lists(st.integers(0, 9), min_size=1, max_size=width))
    if draw(st.booleans()):
        verify.sort()
    widths = sorted({*draw(st.lists(st.integers(1, len(draft)), max_size=3)), len(draft)})
    scales = draw(st.sampled_from(STEPS)), draw(st.sampled_from(STEPS))
    tables = (
        table_of(scale, *points) for scale, points in zip(scales, (verify, draft), strict=True)
    )
    return Prices(*tables, torch.tensor(widths))


# ---- next_pass


def worth_of(found, verify):
    """The best over n of the summed chances of the n likeliest less their price."""
    best = sorted((chance for chance in found if chance > 0), reverse=True)[: len(verify) - 1]
    return max(sum(best[:n]) - verify[n] for n in range(1, len(best) + 1))


class Slow:
    """The search as its op states it, a pass after the other, in lists."""

    def __init__(self, profile, given):
        self.profile, self.levels = profile, len(profile)
        self.verify, self.draft, self.widths = (part.tolist() for part in given)

    def best(self, chances, waiting, width, left, spent=0.0):
        """Return a tree's best worth after up to `left` passes from `width` nodes. waiting: chance, level, place."""
        order = sorted(waiting, key=lambda node: (-node[0], node[2]))
        drawn, rest = order[:width], order[width:]
        spent += self.draft[len(drawn)]
        chances = list(chances)
        for chance, level, _ in drawn:
            for edge in self.profile[level].tolist():
                chances.append(chance * edge)
                if chance * edge > 0:
                    rest.append(
                        (
                            chance * edge,
                            int(worth.level_of(torch.tensor(edge), self.levels)),
                            len(chances) - 1,
                        )
                    )
        now = worth_of(chances, self.verify) - spent
        return now if left == 1 else max(now, self.best(chances, rest, width, left - 1, spent))

    def next(self, chances, waiting, rounds):
        values = [self.best(chances, waiting, width, rounds) for width in self.widths]
        if max(values) <= worth_of(chances, self.verify) + WORTH:
            return []
        width = next(
            width
            for width, value in zip(self.widths, values, strict=True)
            if value >= max(values) - WORTH
        )
        order = sorted(waiting, key=lambda node: (-node[0], node[2]))
        return sorted(place for _, _, place in order[:width])


@st.composite
def searches(draw):
    size = draw(st.integers(1, 14))
    tree = toy.random_tree(draw(st.integers(0, 10**6)), size, 60)
    scale = draw(st.sampled_from([0.1, 0.5, 2.0]))
    flags = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 4))
    profile = torch.rand(shape, generator=generator).sort(1, descending=True).values * draw(
        st.sampled_from([0.2, 1.0])
    )
    paths, edges = tree.path_log_probs * scale, tree.log_probs * scale
    return paths, edges, torch.tensor(flags), profile, draw(prices()), draw(st.integers(1, 3))


class TestNextPass:
    @given(searches(), st.integers(0, 5))
    @some
    def test_against_a_slow_recursion(self, search, padding):
        paths, edges, waiting, profile, given, rounds = search
        chances = paths.double().exp().tolist()
        levels = worth.level_of(edges.exp(), len(profile)).tolist()
        nodes = [
            (chances[i], levels[i] if i else 0, i)
            for i, there in enumerate(waiting.tolist())
            if there
        ]
        expected = Slow(profile.double(), given).next(chances, nodes, rounds)
        behind = torch.ones(padding, dtype=torch.bool)
        for found in of_each(
            lambda: ops.next_pass(
                poisoned(paths, padding),
                poisoned(edges, padding),
                torch.cat([waiting, behind]),
                count(len(paths)),
                profile,
                given,
                rounds,
            )
        ).values():
            assert found.alive().tolist() == expected
            assert len(found.ids) == len(given.draft) - 1

    @each_backend
    def test_of_widths_worth_the_same_the_narrowest_is_taken(self, backend):
        """One node more can be verified, so that further rows bring nothing."""
        given = Prices(torch.zeros(6), torch.zeros(5), torch.tensor([1, 2, 4]))
        flags, paths = torch.ones(4, dtype=torch.bool), torch.zeros(4)
        found = ops.next_pass(paths, paths, flags, count(4), torch.tensor([[0.5]]), given, 1)
        assert found.alive().tolist() == [0]

    @each_backend
    def test_a_second_round_sees_what_one_does_not(self, backend):
        """Of verifying more than the root the price is paid once, by two passes."""
        given = Prices(
            torch.tensor([0, 0, 0.5, 0.5, 0.5]), torch.tensor([0, 0.5]), torch.tensor([1])
        )
        profile = torch.tensor([[0.9], [0.95], [0.95]])
        root = torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), count(1)
        assert [int(ops.next_pass(*root, profile, given, rounds).live) for rounds in (1, 2, 3)] == [
            0,
            1,
            1,
        ]

    @each_backend
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"paths": torch.zeros(3, dtype=torch.float64)}, "^(paths|edges|waiting): got"),
            ({"edges": torch.zeros(2)}, "^(paths|edges|waiting): got"),
            ({"waiting": torch.ones(3)}, "^(paths|edges|waiting): got"),
            ({"size": torch.tensor([3])}, "^size: got"),
            ({"size": torch.tensor([3, 3], dtype=torch.int32)}, "^size: got"),
            ({"profile": torch.zeros(3)}, "^(profile|paths, profile.*): got"),
            ({"profile": torch.zeros(2, 0)}, "^(profile|paths, profile.*): got"),
            (
                {"prices": Prices(torch.zeros(1), torch.zeros(2), torch.tensor([1]))},
                "^(verify|draft|paths.*): got",
            ),
            (
                {"prices": Prices(torch.zeros(2), torch.zeros(1), torch.tensor([1]))},
                "^(verify|draft|paths.*): got",
            ),
            ({"prices": Prices(torch.zeros(2), torch.zeros(2), torch.ones(1))}, "^widths: got"),
            (
                {"prices": Prices(torch.zeros(2), torch.zeros(2).double(), torch.tensor([1]))},
                "^draft: got",
            ),
            ({"rounds": 0}, "rounds: got"),
        ],
    )
    def test_refusals(self, backend, changes, message):
        given = {
            "paths": torch.zeros(3),
            "edges": torch.zeros(3),
            "waiting": torch.ones(3, dtype=torch.bool),
            "size": count(3),
            "profile": torch.full((2, 2), 0.3),
            "prices": Prices(torch.zeros(4), torch.zeros(3), torch.tensor([1, 2])),
            "rounds": 2,
        }
        ops.next_pass(**given)
        with pytest.raises(InputError, match=message):
            ops.next_pass(**{**given, **changes})


# ---- select_worth


class TestSelectWorth:
    @given(st.integers(1, 20), st.integers(0, 5), st.integers(1, 25), st.data())
    @quick
    def test_against_all_counts(self, size, padding, most, data):
        tree = toy.random_tree(data.draw(st.integers(0, 10**6)), size, 60)
        price = data.draw(prices(nodes=24)).verify
        paths = tree.path_log_probs.round() if data.draw(st.booleans()) else tree.path_log_probs
        order = sorted(range(size), key=lambda node: (-float(paths[node]), node))
        considered = range(1, min(most, len(price) - 1, size) + 1)
        values = [
            float(paths[order[:n]].double().exp().sum()) - float(price[n]) for n in considered
        ]
        taken = next(
            n for n, value in zip(considered, values, strict=True) if value >= max(values) - WORTH
        )
        for found in of_each(
            lambda: ops.select_worth(poisoned(paths, padding), count(size), price, most)
        ).values():
            assert alive(found) == [sorted(order[:taken])]
            assert len(found.ids) == most

    @each_backend
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ((torch.zeros(2).double(), count(2), torch.zeros(3), 2), "^paths: got"),
            ((torch.zeros(2, 1), count(2), torch.zeros(3), 2), "^paths: got"),
            ((torch.zeros(2), torch.tensor([2]), torch.zeros(3), 2), "^size: got"),
            ((torch.zeros(2), count(2), torch.zeros(3), 0), r"^most(, price)?: got 0"),
            ((torch.zeros(2), count(2), torch.zeros(1), 2), "price: got"),
            ((torch.zeros(2), count(2), torch.zeros(3, dtype=torch.int64), 2), "price: got"),
        ],
    )
    def test_refusals(self, backend, given, message):
        with pytest.raises(InputError, match=message):
            ops.select_worth(*given)


# ---- chances and counts


def fresh(groups=1):
    """Counts of which every chance is a half, of two tries, and notes of four nodes: as a search would have them."""
    tries = torch.full((groups * worth.SOURCES * worth.DEPTHS * worth.RANKS, KNOTS), 2.0)
    passes = torch.ones(LEVELS)
    profile = torch.full((LEVELS, PLACES), 0.25)
    counts = Counts(
        tries / 2,
        tries,
        torch.full_like(tries, 0.5),
        profile.clone(),
        passes,
        profile,
        torch.zeros(1, dtype=torch.int64),
    )
    flags = [torch.zeros(5, dtype=torch.bool) for _ in range(2)]
    return counts, Notes(
        torch.zeros(5), *(torch.zeros(5, dtype=torch.int64) for _ in range(2)), *flags
    )


class TestChances:
    @each_backend
    def test_what_rounding_takes_above_one_is_certain(self, backend):
        """And the knots are told apart near it, where 1 - exp(x) has lost its digits."""
        table = torch.arange(1, KNOTS + 1, dtype=torch.float32)[None] / KNOTS
        stated = torch.tensor([1.2e-7, 0.5, 0.0, -1e-3])
        found = ops.chances(stated, torch.zeros(4, dtype=torch.int64), table)
        knot = (math.log(1e-3) * -1 + ODDS) * (KNOTS - 1) / (2 * ODDS)
        torch.testing.assert_close(
            found.exp(), torch.tensor([1.0, 1.0, 1.0, (knot + 1) / KNOTS]), rtol=1e-4, atol=0
        )

    @each_backend
    def test_linear_between_the_knots_and_flat_behind_them(self, backend):
        table = torch.linspace(0.1, 0.8, KNOTS)[None]
        odds = torch.tensor([-50.0, -ODDS, 0.0, 0.25, ODDS, 50.0])
        found = ops.chances(odds.sigmoid().log(), torch.zeros(6, dtype=torch.int64), table).exp()
        wanted = torch.tensor([0.1, 0.1, 0.45, 0.45 + 0.7 * 0.25 / (2 * ODDS), 0.8, 0.8])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)

    @each_backend
    def test_refusals(self, backend):
        stated, cells, table = torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(1, 3)
        for wrong in ((stated.double(), cells), (stated, cells.int()), (stated, cells[:1])):
            with pytest.raises(InputError, match=r"^(stated|cells): got"):
                ops.chances(*wrong, table)
        for wrong in (table.double(), table[0], table[:, :1]):
            with pytest.raises(InputError, match=r"^table: got"):
                ops.chances(stated, cells, wrong)


class TestCounting:
    @each_backend
    def test_children_of_the_path_were_tried_and_others_not(self, backend):
        """Nodes 1 and 2 under the root, 3 under 1; the target goes to 1 and then elsewhere."""
        tree = toy.TokenTree.root(9, 4)
        tree.graft([0, 0, 1], [5, 6, 7], [math.log(0.5), math.log(0.25), math.log(0.5)])
        counts, notes = fresh()
        # at the middle knot
        notes.stated[:4] = torch.tensor([0.0, *torch.tensor([0.5, 0.5, 0.5]).log()])
        notes.cells[:4] = torch.tensor([0, 1, 2, 3])
        notes.places[:4] = torch.tensor([0, 0, 1, 0])
        notes.drafted[:2] = True
        path = Nodes(torch.tensor([0, 1, 0]), count(2))
        ops.count_outcomes(
            tree.arrays,
            count(4),
            path,
            torch.tensor([5, 8, 5]),
            SearchState(counts, notes, throughput_of()),
        )
        middle = KNOTS // 2
        assert counts.tries[:5, middle].tolist() == [2, 3, 3, 3, 2]
        assert counts.hits[:5, middle].tolist() == [1, 2, 1, 1, 1]
        assert math.isclose(float(counts.table[1, middle]), 2 / 3, rel_tol=1e-6)
        assert int((counts.tries != 2).sum()) == 3
        level = int(worth.level_of(torch.tensor([0.5]), LEVELS))
        passes = [2.0 if at in (0, level) else 1.0 for at in range(LEVELS)]
        assert counts.passes.tolist() == passes
        torch.testing.assert_close(counts.gains[0, :2], torch.tensor([0.75, 0.5]))
        torch.testing.assert_close(counts.gains[level, :2], torch.tensor([0.75, 0.25]))
        torch.testing.assert_close(counts.profile, counts.gains / counts.passes[:, None])

    @pytest.mark.slow
    @each_backend
    def test_a_knot_forgets_beyond_its_window_and_keeps_a_chance_within_bounds(self, backend):
        tree = toy.TokenTree.root(9, 2)
        tree.add(torch.tensor([0]), torch.tensor([5]), torch.tensor([-0.5]))
        counts, notes = fresh()
        notes.stated[1], path = math.log(0.5), Nodes.of(torch.tensor([0]))
        for token, bound in ((5, MAX_CHANCE), (6, MIN_CHANCE)):
            for _ in range(3000):
                ops.count_outcomes(
                    tree.arrays,
                    count(2),
                    path,
                    torch.tensor([token]),
                    SearchState(counts, notes, throughput_of()),
                )
            assert math.isclose(float(counts.tries[0, KNOTS // 2]), WINDOW, rel_tol=1e-4)
            assert math.isclose(float(counts.table[0, KNOTS // 2]), bound, rel_tol=1e-4)

    @each_backend
    def test_refusals(self, backend):
        tree, (counts, notes) = toy.TokenTree.root(9, 4), fresh()
        path, chosen = Nodes.of(torch.tensor([0, 0])), torch.tensor([1, 1])
        for wrong in (
            (count(1), path, chosen.int()),
            (count(1), path, chosen[:1]),
            (torch.tensor([1]), path, chosen),
            (count(1), Nodes(path.ids, torch.tensor([1])), chosen),
        ):
            with pytest.raises(InputError, match=r"^(path|chosen|size|live): got"):
                ops.count_outcomes(tree.arrays, *wrong, SearchState(counts, notes, throughput_of()))


def throughput_of(nodes=9, width=3, seconds=0.0):
    """Verification that costs nothing, and passes of so many seconds; nothing was earned yet."""
    verify, draft = torch.zeros(nodes + 1), torch.full((width + 1,), seconds)
    prices = Prices(verify.clone(), torch.zeros(width + 1), torch.tensor([width]))
    return Throughput(
        verify,
        draft,
        prices,
        torch.ones(2),
        torch.zeros(1),
        count(0),
        torch.zeros(1),
        torch.zeros(0),
    )


class TestGrowLikely:
    def grow(self, tree, frontier, logits, tokens=None, marks=None, **changes):
        """Grow by log-probabilities as stated; returns the notes and the throughput as well."""
        counts, notes = fresh()
        counts.table.copy_(torch.linspace(-ODDS, ODDS, KNOTS).sigmoid())
        limits = Limits(changes.pop("least", -20.0), changes.pop("budget", 4), 1, 9)
        throughput = changes.pop("throughput", None) or throughput_of()
        counters = tuple(
            changes.get(name, getattr(tree, name)) for name in ("size", "passes", "overflow")
        )
        drafted = Drafted(logits, tokens, True, marks)
        return (
            ops.grow_likely(
                tree.arrays,
                counters,
                frontier,
                drafted,
                SearchState(counts, notes, throughput),
                limits,
            ),
            notes,
            throughput,
        )

    @each_backend
    def test_the_likeliest_by_path_in_the_order_of_their_rows(self, backend):
        tree = toy.TokenTree.root(9, 4)
        stated = torch.tensor([[0.6, 0.3, 0.05, 0.0]]).log()
        marks = torch.tensor([[0, 3, 1, 0]], dtype=torch.uint8)
        found, notes, _ = self.grow(
            tree, tree.root_alone(), stated, torch.tensor([4, 5, 6, 7]), marks, budget=2
        )
        assert tree.tokens[:3].tolist() == [9, 4, 5]
        assert alive(found) == [[1, 2]]
        assert notes.waiting.tolist()[:4] == [False, True, True, False]
        assert notes.drafted.tolist()[:4] == [True, False, False, False]
        assert notes.places[1:3].tolist() == [0, 1]
        assert notes.cells[1:3].tolist() == [0, 3 * worth.DEPTHS * worth.RANKS + 1]
        torch.testing.assert_close(notes.stated[1:3], stated[0, :2])
        again, _, _ = self.grow(
            tree, Nodes.of(torch.tensor([1])), stated[:, :2], least=math.log(0.3)
        )
        assert alive(again) == [[3]]
        assert tree.parents[:4].tolist() == [-1, 0, 0, 1]

    @each_backend
    def test_without_room_nothing_is_appended_and_the_overflow_says_so(self, backend):
        tree = toy.TokenTree.root(9, 2)
        self.grow(tree, tree.root_alone(), torch.tensor([[-1.0, -1.0]]))
        assert (int(tree.size), int(tree.overflow)) == (1, 1)

    @each_backend
    def test_seconds_are_entered_and_a_tree_has_only_so_many_passes(self, backend):
        for passes, wanted in ((8, [[1]]), (9, [[]])):
            tree, throughput = toy.TokenTree.root(9, 4), throughput_of(seconds=2.0)
            tree.passes.fill_(passes)
            assert (
                alive(
                    self.grow(
                        tree, tree.root_alone(), torch.tensor([[-0.5]]), throughput=throughput
                    )[0]
                )
                == wanted
            )
            assert float(throughput.drafting) == 2.0

    @each_backend
    def test_a_pass_that_costs_more_than_it_brings_is_not_drafted(self, backend):
        tree, throughput = toy.TokenTree.root(9, 4), throughput_of()
        throughput.prices.draft.fill_(9.0)
        assert alive(
            self.grow(tree, tree.root_alone(), torch.tensor([[-0.5]]), throughput=throughput)[0]
        ) == [[]]

    @each_backend
    def test_refusals(self, backend):
        tree = toy.TokenTree.root(9, 4)
        root, logits = tree.root_alone(), torch.tensor([[-1.0, -INF]])
        for wrong in (
            (root, logits[0]),
            (root, logits.double()),
            (Nodes.of(torch.zeros(2).long()), logits),
        ):
            with pytest.raises(InputError, match=r"^(frontier|logits): got"):
                self.grow(tree, *wrong)
        with pytest.raises(InputError, match=r"^token_ids: got"):
            self.grow(tree, root, logits, torch.zeros(2))
        for wrong in (torch.zeros(1, 2), torch.zeros(2, 2, dtype=torch.uint8)):
            with pytest.raises(InputError, match=r"^marks: got"):
                self.grow(tree, root, logits, None, wrong)
        for name in ("size", "passes", "overflow"):
            with pytest.raises(InputError, match=rf"^{name}: got"):
                self.grow(tree, root, logits, **{name: torch.tensor([1])})


class TestBindSearch:
    @pytest.mark.parametrize(
        "name", ["start_search", "grow_likely", "keep_likely", "count_outcomes"]
    )
    @each_backend
    @quick
    @given(st.integers(0, 2**32))
    def test_a_bound_state_is_read_and_written_as_the_one_it_was_made_of(self, backend, name, seed):
        plain, bound = (cases.CASES[name](cases.Draw(seed))[0] for _ in range(2))
        at = next(n for n, part in enumerate(plain) if isinstance(part, SearchState))
        given_bound = [*bound[:at], ops.bind_search(bound[at]), *bound[at + 1 :]]
        for state in (plain[at], bound[at]):  # after it was bound
            state.counts.table.mul_(0.5)
        run = getattr(ops, name)
        assert equal(run(*given_bound), run(*plain))
        assert equal(bound, plain)

    @pytest.mark.slow
    @each_backend
    def test_it_keeps_its_tensors_and_hands_them_out(self, backend):
        tree, state = toy.TokenTree.root(9, 4), SearchState(*fresh(), throughput_of())
        bound = ops.bind_search(SearchState(*state))
        del state
        gc.collect()
        bound.throughput.prices.draft.fill_(9.0)
        skipped = torch.zeros(1, dtype=torch.int32)
        started = 1, None, (1, -1.0), skipped, 2
        for cycles, drafts in (1, 0), (2, 0), (0, 1), (1, 0):  # a pass is due after two cycles
            found = ops.start_search(tree.arrays, tree.size, bound, *started)
            assert (int(skipped), int(found)) == (cycles, drafts)
        assert bound.notes.waiting.tolist()[:2] == [True, False]

    @pytest.mark.parametrize("backend", ["cpp"], indirect=True)
    def test_refusals(self, backend):
        tree, (counts, notes) = toy.TokenTree.root(9, 4), fresh()
        with pytest.raises(InputError, match=r"^hits: got"):
            ops.bind_search(
                SearchState(counts._replace(hits=counts.hits[0]), notes, throughput_of())
            )
        bound = ops.bind_search(SearchState(counts, notes, throughput_of()))
        counts.group.fill_(99)
        started = 1, None, (1, -1.0), torch.zeros(1, dtype=torch.int32), 2
        with pytest.raises(InputError, match=r"^group: got 99"):
            ops.start_search(tree.arrays, tree.size, bound, *started)
        counts.group.zero_()
        larger = toy.TokenTree.root(9, 400)
        with pytest.raises(InputError, match=r"^stated: got"):
            ops.start_search(larger.arrays, larger.size, bound, *started)


def equal(one, other):
    """Return whether all bits are equal, of what counts."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    if isinstance(one, Nodes):
        one, other = (
            tuple(part[: int(nodes.live)] for part in nodes[:1]) for nodes in (one, other)
        )
    if isinstance(one, tuple):
        return all(equal(a, b) for a, b in zip(one, other, strict=True))
    return True  # numbers and functions, which are the same by their seed
