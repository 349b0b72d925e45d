"""auto: its trees against the best of all, what it counts and corrects, and answers that stay the target's."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import Engine, ops, policies
from specengine.costs import MEASURED, PassCosts
from specengine.drafters import About, Drafter
from specengine.drafters.lookup import Lookup
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.errors import InputError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import Nodes
from specengine.ops.select import FREE, RECYCLED
from specengine.ops.tree import Free, TokenTree
from specengine.ops.worth import KNOTS, LEVELS, MAX_CHANCE, MIN_CHANCE, ODDS, PLACES
from specengine.policies.auto.auto import REPRICED, Auto
from specengine.records import Cycle, Outcome, Seconds
from tests import toy
from tests.examples import examples
from tests.graphs.engines import PROMPT, model, near_copy
from tests.policies.lawful import ELSEWHERE, Lawful, Rows, World, all_ways, drafted
from tests.toy import CPU

# that a table holds exactly
HELD = [float(torch.tensor(odds).sigmoid()) for odds in (3.0, 2.0, 1.0, 0.0, -1.0, -2.0)]
CHEAP = PassCosts("cheap", {1: 1.0, 64: 1.5}, {1: 0.05})


def auto(costs: str | PassCosts = CHEAP, **options: Any) -> Auto:
    """Return an `auto` that takes chances as stated until it has counted others."""
    policy = policies.make("auto", costs=costs, **options)
    assert isinstance(policy, Auto)
    counts = state_of(policy).bound.counts
    counts.table.copy_(torch.linspace(-ODDS, ODDS, KNOTS).sigmoid().clamp(MIN_CHANCE, MAX_CHANCE))
    counts.hits.copy_(counts.tries * counts.table)
    return policy


def state_of(policy: Auto) -> Any:
    return policy._state[CPU]


# ---- the best tree


@st.composite
def rows(draw: Any) -> Rows:
    """A law whose chances a table of chances holds, those of siblings 1 at most together."""
    found = list[list[float]]()
    for _ in range(LEVELS):
        row = list[float]()
        for chance in sorted(
            draw(st.lists(st.sampled_from(HELD), min_size=1, max_size=3)), reverse=True
        ):
            if sum(row) + chance <= 1:
                row.append(chance)
        found.append(row)
    return found


@st.composite
def costs(draw: Any, most: int, width: int, step: int | None) -> PassCosts:
    """Verification that rises more and more, or, with `step`, by so many nodes at once."""
    slope = draw(st.sampled_from([0.01, 0.03, 0.1, 0.3]))
    curved = 0.0 if step else draw(st.sampled_from([0.0, 0.2]))
    counts = {
        n: (n - 1) // step * step / 2 if step else (n - 1) * (1 + curved * (n - 2))
        for n in range(1, most + 1)
    }
    verify = {n: 1 + slope * count for n, count in counts.items()}
    least, more = (
        draw(st.sampled_from([0.02, 0.05, 0.1, 0.2, 0.4, 1.0])),
        draw(st.sampled_from([0.0, 0.01, 0.05])),
    )
    return PassCosts("drawn", verify, {1: least, width + 1: least + more * width})


def left_by(law: Rows, given: PassCosts, **shape: int) -> float:
    """The share of the best way's rate that auto's tree leaves; it knows the law and that rate."""
    best = max(found.rate for found in all_ways(law, given, **shape))
    policy = auto(given, budget=shape["budget"], width=shape["width"], max_passes=shape["passes"])
    state, profile = state_of(policy), torch.zeros(LEVELS, PLACES)
    for row, chances in zip(profile, law, strict=True):
        row[: len(chances)] = torch.tensor(chances)
    state.bound.counts.profile.copy_(profile)
    state.bound.throughput.recent.copy_(torch.tensor([best, 1.0]))
    ops.update_throughput(state.bound.throughput, state.none)
    tree = drafted(policy, Lawful(law)).tree
    time = state.bound.throughput.verify[len(tree)] + state.bound.throughput.drafting
    return 1 - float(tree.path_log_probs.exp().sum() / time) / best


@pytest.mark.parametrize(("step", "bound"), [(None, 0.04), (4, 0.08), (16, 0.08)])
def test_the_tree_of_the_most_tokens_per_time(step: int | None, bound: float) -> None:
    """Of all sequences of widths and all counts of nodes, at the long-run rate of the best (Dinkelbach's fixpoint).

    What is left comes of thinking two rounds ahead, of one width, without knowing of the last pass.
    """
    left = list[float]()

    @examples(80, derandomize=True)
    @given(rows(), st.integers(2, 20), st.integers(1, 3), st.integers(1, 4), st.data())
    def check(law: Rows, budget: int, width: int, passes: int, data: Any) -> None:
        drawn = data.draw(costs(budget, width, step))
        left.append(left_by(law, drawn, budget=budget, width=width, passes=passes))
        assert -1e-5 < left[-1] < bound

    check()
    assert np.mean(np.array(left) < 1e-5) > 0.85
    assert np.mean(left) < 0.004


@pytest.mark.parametrize(
    ("given", "law"),
    [
        (PassCosts("dear", {1: 1.0}, {1: 100.0}), [[0.9]] * LEVELS),
        (PassCosts("cheap", {1: 1.0, 64: 1.5}, {1: 0.3}), [[0.01, 0.01]] * LEVELS),
    ],
    ids=["draft that costs too much", "draft that is never right"],
)
def test_where_nothing_pays_it_decodes_plainly_and_asks_again_after_patience(
    given: PassCosts, law: Rows
) -> None:
    policy = auto(given)
    world = World(policy, Lawful(law), lambda tree, node: 0.0)
    drafts = [world.cycle() for _ in range(150)]
    asked = [at for at, draft in enumerate(drafts) if int(draft.grown.passes)]
    assert np.diff(asked)[-3:].tolist() == [policy.patience + 1] * 3
    assert {int(draft.grown.passes) for draft in drafts[-60:]} == {0, 1}
    assert all(len(draft.tree) == 1 for draft in drafts[-60:] if not int(draft.grown.passes))


@examples(40)
@given(
    rows(),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_caps_hold_whatever_was_counted(
    law: Rows, budget: int, width: int, passes: int, rounds: int, seed: int
) -> None:
    policy = auto(
        PassCosts("free", {1: 1.0}, {1: 0.0}),
        budget=budget,
        width=width,
        max_passes=passes,
        rounds=rounds,
    )
    drafter, asked = Lawful(law), list[int]()
    step = drafter.step
    drafter.step = lambda tree, frontier: (
        asked.append(len(frontier.alive())) or step(tree, frontier)
    )  # type: ignore
    world = World(policy, drafter, lambda tree, node: math.exp(tree.log_probs[node]), seed)
    for _ in range(4):
        asked.clear()
        draft = world.cycle()
        assert len(asked) == int(draft.grown.passes) <= passes
        assert all(1 <= rows <= width for rows in asked)
        assert len(draft.tree) <= budget
        assert len(draft.grown) <= policy.capacity
        assert draft.kept is not None
        kept = set(draft.kept.tolist())
        assert all(node == 0 or int(draft.grown.parents[node]) in kept for node in kept)


# ---- what is counted


def read(policy: Auto, stated: float, place: int = 0, depth: int = 1) -> float:
    """The chance of a child of that stated probability, for answers as the present one."""
    counts = state_of(policy).bound.counts
    cell = ops.worth.cells_of(counts.group, None, torch.tensor([depth]), torch.tensor([place]))
    return float(ops.chances(torch.tensor([stated]).log(), cell, counts.table).exp())


def test_a_biased_draft_is_counted_by_kind_of_answer_and_kept() -> None:
    """The draft states 0.27, at a knot of the table, where the target agrees in half of all cases."""
    policy, stated = auto(), HELD[4]
    world = World(policy, Lawful([[stated]] * LEVELS), lambda tree, node: 0.5)
    assert math.isclose(read(policy, stated), stated, abs_tol=1e-3)
    for _ in range(400):
        world.cycle()
    greedy = read(policy, stated)
    assert abs(greedy - 0.5) < 4 * math.sqrt(0.25 / ops.worth.WINDOW)  # standard errors
    policy.begin(10, sampled=True)
    assert math.isclose(read(policy, stated), stated, abs_tol=1e-3)
    policy.begin(10)
    assert read(policy, stated) == greedy


def test_a_draft_that_becomes_worse_is_noticed() -> None:
    """What is lost against one that knows the chances, per cycle and in tokens, falls to 3 % of what a cycle gives."""
    given = PassCosts("drift", {1: 1.0, 16: 1.6}, {1: 0.15})
    policy, chance = auto(given, budget=16, width=2, max_passes=6), [0.9]
    world = World(policy, Lawful([[0.5]] * LEVELS), lambda tree, node: chance[0], seed=3)
    for chance[0] in (0.9, 0.1):
        best = max(
            found.rate for found in all_ways([chance] * LEVELS, given, budget=16, width=1, passes=6)
        )
        lost = list[float]()
        for _ in range(600):
            draft = world.cycle()
            time = float(
                state_of(policy).bound.throughput.verify[len(draft.tree)]
                + state_of(policy).bound.throughput.drafting
            )
            lost.append(best * time - world.expected(draft.tree))
        assert min(lost) > -1e-4
        assert np.mean(lost[-60:]) < 0.03 * best < np.mean(lost[:20])


# ---- what is corrected


def test_costs_that_are_wrong_by_a_factor_of_three_move_to_reality() -> None:
    """Those of the numbers of rows in use; the price of one row, which no cycle has, follows them."""
    thought = PassCosts("thought", {1: 0.010, 64: 0.015}, {1: 0.006}, measured=True)
    policy = auto(MEASURED)
    assert policy.plan().reads_costs
    policy.begin(0, costs=lambda: thought)
    verify, draft = 3.0, 1 / 3
    world = World(
        policy,
        Lawful([[0.7, 0.2]] * LEVELS),
        lambda tree, node: 0.7 if int(tree.tokens[node]) == 0 else 0.2,
    )
    drafted_before = thought.table(64, 8, 0)
    used = collections.Counter[int]()
    for _ in range(12 * REPRICED):
        cycle = world.cycle()
        used[len(cycle.tree)] += 1
        throughput = state_of(policy).bound.throughput
        passes = float(throughput.drafting) / float(throughput.draft[1])  # one price at all widths
        real = Seconds(
            verify=verify * float(drafted_before.verify[len(cycle.tree)]),
            draft=passes * draft * float(thought.draft[1]),
        )
        policy.learn(Outcome.of(Cycle(cycle.tree, [0], [ELSEWHERE], real, 1)))
    found = state_of(policy).bound.throughput
    (rows, _), *_ = used.most_common()
    assert math.isclose(
        float(found.verify[rows] / drafted_before.verify[rows]), verify, rel_tol=0.05
    )
    assert math.isclose(float(found.verify[1] / drafted_before.verify[1]), verify, rel_tol=0.15)
    assert math.isclose(float(found.draft[1] / drafted_before.draft[1]), draft, rel_tol=0.05)
    before = found.verify.clone()
    for _ in range(2 * REPRICED):  # whose parts nobody has timed
        policy.learn(
            Outcome.of(Cycle(cycle.tree, [0], [ELSEWHERE], Seconds(total=9.0, split=False), 1))
        )
    assert torch.equal(found.verify, before)


@pytest.mark.parametrize(("step", "filled"), [(0.5, 8), (0.3, 16), (0.15, 24)])
def test_a_tree_fills_the_rows_that_it_pays_for(step: float, filled: int) -> None:
    """Nodes that are worth little come with the width of those that are worth more, and open no other one."""
    widths = {1: 1.0, 8: 1.0 + step, 16: 1.0 + 2 * step, 24: 1.0 + 3 * step, 32: 1.0 + 4 * step}
    costs = PassCosts("widths", widths, {8: 0.01}, padded=True)
    law = [[0.4, 0.2, 0.1, 0.05, 0.04, 0.03]] * LEVELS
    tree = drafted(auto(costs, budget=32, width=8, max_passes=4), Lawful(law)).tree
    assert len(tree) == filled
    smooth = PassCosts("smooth", widths, {8: 0.01})
    assert len(drafted(auto(smooth, budget=32, width=8, max_passes=4), Lawful(law)).tree) % 8


def test_prices_of_graphs_stay_over_many_answers_whatever_their_eager_first_cycle_takes() -> None:
    """Of 200 answers, whose other cycles stay on a device and take what was measured."""
    verify, draft, overhead = 0.0090, 0.0008, 0.0004
    measured = PassCosts(
        "graphs", {64: verify}, {8: draft}, measured=True, overhead=overhead, padded=True
    )
    policy = auto(MEASURED)
    assert policy.plan().times
    tree = drafted(policy, Lawful([[0.7, 0.2]] * LEVELS)).tree
    for _ in range(200):
        policy.begin(30, costs=lambda: measured)
        eager = Seconds(verify=0.02, draft=0.03, policy=0.01, commit=0.002, total=0.062)
        policy.learn(Outcome.of(Cycle(tree, [0], [ELSEWHERE], eager, 1)))
        for number in range(36):
            passes = number % 4
            tree.passes.fill_(passes)
            took = overhead + passes * draft
            seconds = Seconds(
                draft=took, verify=verify, total=0.02, model=verify + took, captured=True
            )
            counted = state_of(policy).bound.counts.tries.clone() if number == 35 else None
            policy.learn(Outcome.of(Cycle(tree, [0], [ELSEWHERE], seconds, 1, learnt=True)))
            if counted is not None:  # inside the graph
                assert torch.equal(state_of(policy).bound.counts.tries, counted)
    corrections = policy._costs.corrections
    assert [corrections.verify.factor, corrections.draft.factor] == pytest.approx(
        [1.0, 1.0], abs=1e-3
    )
    assert float(state_of(policy).bound.throughput.verify[1]) == pytest.approx(verify, rel=1e-3)
    assert policy._pace._gain < 0.1  # one token of each cycle, whose passes brought nothing


def test_the_plan_of_a_resting_policy_can_be_read_outside_inference_mode() -> None:
    costs = PassCosts("two", {1: 1.0, 64: 1.5}, {1: 0.3}).beside(1, resting=lambda: True)
    policy = policies.make("auto", costs=costs)
    with torch.inference_mode():
        policy.state_on(CPU)
    assert all(policy.plan().rests for _ in range(2 * REPRICED))


def test_costs_that_stay_are_not_corrected() -> None:
    policy = auto(CHEAP)
    assert not policy.plan().reads_costs
    draft = drafted(policy, Lawful([[0.5]] * LEVELS))
    before = state_of(policy).bound.throughput.verify.clone()
    for _ in range(2 * REPRICED):
        policy.learn(
            Outcome.of(Cycle(draft.tree, [0], [ELSEWHERE], Seconds(verify=50.0, draft=1.0), 1))
        )
    assert torch.equal(state_of(policy).bound.throughput.verify, before)


@pytest.mark.parametrize("given", [3, "no such file", None])
def test_costs_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(InputError, match="costs"):
        auto(given)


# ---- free continuations


class Freely(Lawful):
    """Proposes a chain of tokens below the likeliest of the nodes that it is asked for, all at one probability."""

    def __init__(self, rows: Rows, stated: float, length: int) -> None:
        super().__init__(rows)
        self.stated, self.length = stated, length

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        length = min(self.length, most, int(least / math.log(self.stated)))
        if not len(nodes.alive()) or length < 1:
            return None
        first = int(nodes.alive()[0])
        parents = [first, *range(len(tree), len(tree) + length - 1)]
        tokens = [50 + i for i in range(length)]  # that the draft does not propose
        return Free(
            parents, tokens, [math.log(self.stated)] * length, [FREE] * length, [0] * length
        )


def sure(tree: TokenTree, node: int) -> float:
    """Free tokens are right."""
    return 1.0 if int(tree.tokens[node]) >= 50 else 0.0


def test_free_continuations_are_hung_and_accepted_and_passes_left_out_where_they_cover() -> None:
    policy = auto(PassCosts("flat", {1: 1.0, 64: 1.1}, {1: 0.3}), budget=8, width=2, max_passes=2)
    world = World(policy, Freely([[0.6, 0.2]] * LEVELS, 0.9, 5), sure)
    drafts = [world.cycle() for _ in range(60)]
    last = drafts[-1]
    assert int(last.grown.passes) == 0
    assert last.tree.tokens.tolist() == [0, *range(50, 55)]
    assert world.expected(last.tree) == 6.0
    cell = ops.worth.cells_of(
        torch.tensor([0]), torch.tensor([FREE]), torch.tensor([1]), torch.tensor([0])
    )
    counts = state_of(policy).bound.counts
    assert float(ops.chances(torch.tensor([0.9]).log(), cell, counts.table).exp()) > 0.95
    assert all(len(draft.grown) <= policy.capacity and len(draft.tree) <= 8 for draft in drafts)


def test_unlikely_free_continuations_replace_no_pass() -> None:
    policy = auto(PassCosts("flat", {1: 1.0, 64: 1.1}, {1: 0.05}), budget=8, width=2, max_passes=2)
    draft = drafted(policy, Freely([[0.6, 0.2]] * LEVELS, 0.3, 3))
    assert int(draft.grown.passes) > 0
    assert 50 in draft.grown.tokens.tolist()


def test_free_continuations_that_are_never_right_are_given_up() -> None:
    policy = auto(PassCosts("steep", {1: 1.0, 64: 5.0}, {1: 0.05}), budget=8, width=2, max_passes=2)
    truth = [0.6, 0.2]
    law = Freely([truth] * LEVELS, 0.9, 5)
    world = World(
        policy,
        law,
        lambda tree, node: 0.0 if int(tree.tokens[node]) >= 50 else truth[int(tree.tokens[node])],
    )
    verified = [
        sum(token >= 50 for token in world.cycle().tree.tokens.tolist()) for _ in range(400)
    ]
    assert np.mean(verified[-50:]) < 0.2 * np.mean(verified[:5])


# ---- answers


def lookup(draft: str, target: HuggingFaceTarget) -> Drafter:
    if draft == "recycling":
        return Lookup(Recycling())
    return Lookup(SmallModel(near_copy(), target.vocab_size), Recycling())


@pytest.mark.sliced(1)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("draft", ["recycling", "small model"])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"]
)
def test_answers_are_those_of_plain_decoding(
    draft: str, captured: bool, options: dict[str, Any]
) -> None:
    """Over three answers of one engine, so that what it has learnt shapes the trees of the later ones."""
    plain = Engine(HuggingFaceTarget(model()), None, None)
    target = HuggingFaceTarget(model(), captured=captured)
    engine = Engine(
        target, lookup(draft, target), dataclasses.replace(toy.policy_for("auto"), budget=16)
    )
    accepted = 0
    for prompt in (PROMPT, PROMPT[::-1], PROMPT):
        wanted = plain.generate(prompt, max_new_tokens=30, **options)
        found = engine.generate(prompt, max_new_tokens=30, **options)
        assert found.token_ids == wanted.token_ids
        accepted += found.stats.num_accepted_draft_tokens
    assert accepted > 0


class Recalled(Lawful):
    """The same law from a draft without a model of its own."""

    about = About(origin="recycled")


def test_drafts_without_a_model_have_chances_of_their_own() -> None:
    """The target agrees in half of all cases; what that teaches is none of a head's, nor of drawn answers'."""
    policy, stated = auto(), HELD[4]
    before = state_of(policy).bound.counts.hits.clone()
    world = World(policy, Recalled([[stated]] * LEVELS), lambda tree, node: 0.5)
    for _ in range(400):
        world.cycle()
    assert abs(read(policy, stated) - 0.5) < 4 * math.sqrt(0.25 / ops.worth.WINDOW)
    changed = (state_of(policy).bound.counts.hits != before).any(1).view(4, -1).any(1)
    assert changed.tolist() == [False, False, True, False]
    policy.begin(30, sampled=True)
    assert state_of(policy).bound.counts.group.tolist() == [3]
    assert math.isclose(read(policy, stated), stated, abs_tol=1e-3)
    policy.begin(30)
    World(policy, Lawful([[stated]] * LEVELS), lambda tree, node: 0.5).cycle()
    assert state_of(policy).bound.counts.group.tolist() == [0]
    assert math.isclose(read(policy, stated), stated, abs_tol=0.05)


def test_recycled_tokens_are_thought_less_sure_without_a_head() -> None:
    """As was counted of greedy answers: a successor seen last is no distribution of what comes now."""
    policy = policies.make("auto", costs=CHEAP)
    assert isinstance(policy, Auto)
    table = state_of(policy).bound.counts.table.view(4, ops.worth.SOURCES, -1, KNOTS)
    sure = table[:, FREE | RECYCLED, :, KNOTS // 2 + 2 :].mean((1, 2))
    assert sure[2] < sure[0]
