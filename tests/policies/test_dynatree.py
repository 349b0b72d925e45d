"""DynaTree against its queue written out, and its history (P7)."""

import math
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specengine import policies
from specengine.errors import InputError
from specengine.ops.tree import TokenTree
from specengine.policies.dynatree import DynaTree
from specengine.records import Cycle, Outcome, Seconds
from tests.examples import examples
from tests.policies import slow

OPTIONS = slow.options(
    base_depth=st.integers(1, 3),
    max_depth=st.integers(4, 6),
    branch_min=st.just(1),
    branch_mid=st.integers(1, 2),
    branch_max=st.integers(2, 4),
    high=st.sampled_from([0.6, 0.9]),
    low=st.sampled_from([0.2, 0.4]),
    stop=st.sampled_from([0.0, 0.05, 0.1]),
    deep=st.sampled_from([0.2, 0.5]),
    least=st.sampled_from([0.0, 0.05, 0.2]),
    nodes=st.integers(1, 40),
    root=st.sampled_from(["known", "paper"]),
    prune=st.sampled_from(["leaf", "expand", "none"]),
)


def log(probability: float) -> float:
    return math.log(probability) if probability else -math.inf


def slow_dynatree(policy: DynaTree, draft: Any) -> list[slow.Path]:
    """The first-in, first-out queue of the paper, a node at a time."""
    found: list[slow.Path] = [()]
    queue: deque[tuple[slow.Path, torch.Tensor]] = deque([((), torch.tensor(0.0))])
    while queue and len(found) <= policy.nodes:
        path, score = queue.popleft()
        depth = len(path) - 1  # the paper's: its first drafted token has depth 0
        lowest = max(policy.stop, policy.least) if policy.prune == "expand" else policy.stop
        deep_enough = depth < policy.base_depth or score >= torch.tensor(log(policy.deep))
        if path and not (
            depth < policy.max_depth and score >= torch.tensor(log(lowest)) and deep_enough
        ):
            continue
        row = draft.tables.logits([*draft.tokens, 0, *path])
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        surest = row[order[0]]
        count = policy.branch_mid
        if surest >= torch.tensor(math.log(policy.high)):
            count = policy.branch_min
        elif surest < torch.tensor(math.log(policy.low)):
            count = policy.branch_max
        if not path and policy.root == "paper":
            count = 1
        for token in order[:count]:
            child = score + row[token]
            pruned = policy.prune == "leaf" and child < torch.tensor(log(policy.least))
            if (
                len(found) > policy.nodes
                or row[token] == -math.inf
                or (pruned and not (not path and token == order[0]))
            ):
                break
            found.append((*path, token))
            queue.append(((*path, token), child))
    return found


@examples(500)
@given(slow.DRAFTS, OPTIONS)
def test_is_the_papers_queue(draft: dict[str, Any], options: dict[str, Any]) -> None:
    policy = DynaTree(**options)
    tree = slow.grow(policy, slow.drafter(**draft))
    assert list(slow.paths(tree)) == slow_dynatree(policy, slow.drafter(**draft))


@examples(500)
@given(slow.DRAFTS, OPTIONS)
def test_promises(draft: dict[str, Any], options: dict[str, Any]) -> None:
    policy = DynaTree(**options)
    tree = slow.grow(policy, slow.drafter(**draft))
    assert len(tree) <= 1 + policy.nodes
    assert int(tree.depths.max()) <= policy.max_depth + 1
    counts = tree.parents[1:].bincount(minlength=len(tree))
    assert int(counts.max()) <= policy.branch_max
    for node in range(1, len(tree)):
        if counts[node]:
            depth, path = int(tree.depths[node]) - 1, float(tree.path_log_probs[node].exp())
            assert depth < policy.max_depth
            assert path >= policy.stop - 1e-6
            assert depth < policy.base_depth or path >= policy.deep - 1e-6


def cycle(accepted: int, height: int) -> Cycle:
    tree = TokenTree.root(0, height + 1)
    for node in range(height):
        tree.add(torch.tensor([node]), torch.tensor([1]), torch.zeros(1))
    return Cycle(tree, list(range(accepted + 1)), [0], Seconds())


@examples(500)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=80),
    st.sampled_from(["banded", "proportional"]),
)
def test_history_stays_in_its_ranges(lengths: list[tuple[int, int]], law: Any) -> None:
    policy = DynaTree(window=5, law=law)
    for accepted, height in lengths:
        policy.learn(Outcome.of(cycle(min(accepted, height), height)))
        assert 2 <= policy._base_depth <= policy.max_depth - 1
        assert 0.5 <= policy._high <= 0.95
        assert 0.3 <= policy._deep <= 0.8


@pytest.mark.parametrize(
    ("rate", "base", "high", "deep"),
    [(1.0, 6, 0.85, 0.45), (0.0, 4, 0.95, 0.55), (0.7, 5, 0.9, 0.5)],
)
def test_one_window_moves_each_setting_once(
    rate: float, base: int, high: float, deep: float
) -> None:
    policy = DynaTree()
    for _ in range(policy.window):
        assert (policy._base_depth, policy._high, policy._deep) == (5, 0.9, 0.5)
        policy.learn(Outcome.of(cycle(round(10 * rate), 10)))
    assert policy._base_depth == base
    assert (policy._high, policy._deep) == (pytest.approx(high), pytest.approx(deep))


@pytest.mark.parametrize(("accepted", "settings"), [(10, (6, 0.85, 0.45)), (0, (4, 0.95, 0.55))])
def test_the_next_tree_follows_what_has_moved(
    accepted: int, settings: tuple[int, float, float]
) -> None:
    base, high, deep = settings
    limits: dict[str, Any] = {"stop": 0.0, "least": 0.0, "nodes": 200}
    moved, fresh = DynaTree(**limits), DynaTree(base_depth=base, high=high, deep=deep, **limits)
    before = [list(slow.paths(slow.grow(moved, slow.drafter(5, seed)))) for seed in range(8)]
    for _ in range(moved.window):
        moved.learn(Outcome.of(cycle(accepted, 10)))
    after = [list(slow.paths(slow.grow(moved, slow.drafter(5, seed)))) for seed in range(8)]
    assert after == [list(slow.paths(slow.grow(fresh, slow.drafter(5, seed)))) for seed in range(8)]
    assert after != before


def test_the_proportional_law_follows_the_distance() -> None:
    policy = DynaTree(law="proportional", step=0.2)
    for _ in range(policy.window):
        policy.learn(Outcome.of(cycle(9, 10)))
    assert policy._base_depth == pytest.approx(5.2)
    assert (policy._high, policy._deep) == (pytest.approx(0.86), pytest.approx(0.46))


@pytest.mark.parametrize("law", ["banded", "proportional"])
def test_within_the_band_nothing_moves(law: Any) -> None:
    policy = DynaTree(law=law, band=0.25)
    for _ in range(policy.window):
        policy.learn(Outcome.of(cycle(9, 10)))
    assert (policy._base_depth, policy._high, policy._deep) == (5, 0.9, 0.5)


@pytest.mark.parametrize(("statistic", "base"), [("height", 6), ("drafted", 4)])
def test_the_papers_statistic_is_the_share_of_drafted_tokens(statistic: Any, base: int) -> None:
    """Section 3.3: the fraction of drafted tokens committed in an iteration. Half of the tree's width is lost here."""
    tree = TokenTree.root(0, 5)
    tree.add(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.zeros(2))
    tree.add(torch.tensor([1, 1]), torch.tensor([1, 2]), torch.zeros(2))
    policy = DynaTree(statistic=statistic, window=3)
    for _ in range(3):
        policy.learn(Outcome.of(Cycle(tree, [1, 1, 9], [0, 1, 3], Seconds())))
    assert policy._base_depth == base


@pytest.mark.parametrize(
    ("accepted", "moved"), [(10, (0.85, 0.5, 0.35)), (0, (0.95, 0.5, 0.45)), (7, (0.9, 0.5, 0.4))]
)
def test_the_paper_moves_the_lower_threshold(
    accepted: int, moved: tuple[float, float, float]
) -> None:
    """Algorithm 1, line 7: tau_l, tau_h and D_0; the published code moves rho_deep instead."""
    limits: dict[str, Any] = {"stop": 0.0, "least": 0.0, "nodes": 60, "max_depth": 6}
    policy = DynaTree(moves="low", **limits)
    for _ in range(policy.window):
        policy.learn(Outcome.of(cycle(accepted, 10)))
    high, deep, low = moved
    assert (policy._high, policy._deep, policy._low) == pytest.approx(moved)
    base = {10: 5, 0: 4, 7: 5}[accepted]
    fresh = DynaTree(base_depth=base, high=high, deep=deep, low=low, **limits)
    for seed in range(8):
        grown = [slow.paths(slow.grow(each, slow.drafter(5, seed))) for each in (policy, fresh)]
        assert list(grown[0]) == list(grown[1])


def test_the_lower_threshold_stays_between_0_and_the_upper_one() -> None:
    for accepted in (0, 10):
        policy = DynaTree(moves="low", window=1, step=0.2)
        for _ in range(9):
            policy.learn(Outcome.of(cycle(accepted, 10)))
            assert 0.05 <= policy._low <= policy._high - 0.05


def test_a_window_may_be_of_one_cycle() -> None:
    policy = DynaTree(window=1)
    policy.learn(Outcome.of(cycle(10, 10)))
    assert policy._base_depth == 6
    policy.learn(Outcome.of(cycle(0, 10)))
    assert policy._base_depth == 5


def test_the_papers_settings() -> None:
    paper = policies.make("dynatree/paper")
    assert isinstance(paper, DynaTree)
    assert (paper.root, paper.least, paper.statistic, paper.moves) == (
        "paper",
        0.03,
        "drafted",
        "low",
    )


def test_without_history_nothing_moves_and_empty_trees_do_not_count() -> None:
    fixed, policy = DynaTree(history=False), DynaTree(window=5)
    for _ in range(30):
        fixed.learn(Outcome.of(cycle(10, 10)))
        policy.learn(Outcome.of(cycle(0, 0)))
    assert (fixed._base_depth, policy._base_depth) == (5, 5)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"base_depth": 8}, "base_depth, max_depth"),
        ({"branch_mid": 4}, "branch_min, _mid, _max"),
        ({"low": 0.95}, "low, high"),
        ({"stop": 0.6}, "stop, deep"),
        ({"least": 1.0}, "least"),
        ({"nodes": 0}, "nodes"),
        ({"window": 0}, "window"),
        ({"target": 1.5}, "target"),
        ({"root": "unknown"}, "root"),
        ({"prune": "all"}, "prune"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=rf"policy dynatree\.{field}: got .* accepted"):
        policies.make("dynatree", **options)
