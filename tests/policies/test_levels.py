"""Growth on the device against growth on the host: the same trees from the same distributions, padded with NaN."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specengine.device_tree import DeviceTree
from specengine.policies._levels import Levels
from torch import Tensor

from specengine import ops, policies
from specengine.cycle import Seconds
from specengine.drafting import draft_tree
from specengine.policies import TreePolicy, _classifier
from tests.ops.backends import running
from tests.policies import slow
from tests.toy import CPU, Tables, ToyDrafter, hidden_states

BEAM = {"width": st.integers(1, 5), "expansions": st.integers(0, 5), "budget": st.integers(1, 20)}
THRESHOLD = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0]))
CHAIN = slow.options(length=st.integers(1, 8), threshold=THRESHOLD)
OPTIONS: dict[str, Any] = {
    "eagle": slow.options(**BEAM),
    "chain": slow.options(length=st.integers(1, 6)),
    "fixed": slow.options(branching=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)),
    "ddd": slow.options(**BEAM, checks=st.lists(st.integers(0, 5), max_size=4).map(tuple), threshold=st.floats(-3, 0)),
    "svip": slow.options(**BEAM, factor=st.floats(0.05, 1), threshold=st.floats(0, 1)),
    "disco": slow.options(**BEAM, threshold=st.floats(0.1, 0.9)),
    "specdecpp": slow.options(**BEAM, threshold=st.floats(0.2, 1), minimum=st.just(0)),
    "dymax": CHAIN,
    "dyjoint": CHAIN,
    "opt_tree": slow.options(
        nodes=st.integers(1, 9),
        threshold=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
        max_depth=st.integers(2, 6),
        lag=st.booleans(),
    ),
    "dynatree": slow.options(
        history=st.just(False),
        base_depth=st.integers(1, 2),
        max_depth=st.integers(3, 4),
        stop=st.sampled_from([0.0, 0.02, 0.1]),
        deep=st.sampled_from([0.15, 0.5]),
        nodes=st.integers(1, 20),
        root=st.sampled_from(["known", "paper"]),
        prune=st.sampled_from(["leaf", "expand", "none"]),
    ),
    "talon": slow.options(budget=st.integers(2, 14), width=st.integers(1, 5), mu=st.floats(0.01, 1)),
    "salf": slow.options(budget=st.integers(2, 14), batch=st.integers(1, 5), threshold=st.floats(0, 0.9)),
    "c2t": slow.options(children=st.integers(1, 4), layer=st.integers(1, 5), max_depth=st.integers(1, 4)),
}
DRAFTS = st.fixed_dictionaries(
    {
        "vocabulary": st.sampled_from([2, 5, 16, 40]),
        "seed": st.integers(0, 100_000),
        "concentration": st.sampled_from([0.05, 0.3, 2.0]),
    }
)


HISTORY: dict[str, dict[str, Any]] = {"dynatree": {"history": False}}  # is not known on the device


class Grown(NamedTuple):
    tokens: list[int]
    parents: list[int]
    kept: list[int]
    passes: int


def drafter(vocabulary: int, seed: int, concentration: float) -> ToyDrafter:
    """A draft whose columns are in another order than the target's tokens."""
    columns = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed)).tolist()
    draft = ToyDrafter(Tables(vocabulary, seed, concentration=concentration), columns=columns)
    draft.begin([seed % vocabulary])
    return draft


def on_the_host(policy: TreePolicy, draft: ToyDrafter) -> Grown:
    _, grown, kept = draft_tree(0, draft, policy, Seconds(), CPU)
    assert kept is not None
    return Grown(grown.tokens.tolist(), grown.parents.tolist(), kept.tolist(), int(grown.passes))


class Device:
    """A tree on the device under the token 0, and the rows of its frontiers."""

    def __init__(self, policy: TreePolicy, draft: ToyDrafter) -> None:
        self.draft, self.levels = draft, policy.levels()
        assert isinstance(self.levels, Levels)
        self.levels.states = self._states
        self.tree = DeviceTree(policy.capacity)
        self.budget = min(policy.budget, policy.capacity)

    def grow(self) -> Grown:
        """Every pass that there may be, and two more, though the tree may have ended."""
        tree, level = self.tree, torch.zeros(1, dtype=torch.int32)
        for array in (tree.log_probs, tree.path_log_probs):
            array[1:] = math.nan
        tree.start(torch.zeros(1, dtype=torch.int64))
        nodes, scores = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        frontier = ops.Frontier(nodes, nodes.clone(), scores, torch.ones(1, dtype=torch.int32))
        for _ in range(self.levels.passes + 2):
            level = level + (frontier.live > 0)
            logits = self._logits(frontier.nodes, int(frontier.live))
            ended = not int(frontier.live)
            before = len(tree)
            frontier = self.levels.grow(tree, frontier, logits, self.draft.columns, level.int())
            assert not ended or (len(tree) == before and not int(frontier.live))
            self._check(frontier)
        self.levels.finish(tree)
        size = len(tree)
        kept = tree.best(self.budget) if self.budget < tree.capacity else ops.Found(torch.arange(size), len(tree))
        chosen = kept.indices[: int(kept.live)]
        return Grown(tree.tokens[:size].tolist(), tree.parents[:size].tolist(), chosen.tolist(), int(level))

    def _check(self, frontier: ops.Frontier) -> None:
        live = int(frontier.live)
        assert len(frontier.nodes) == self.levels.width
        assert not frontier.nodes[live:].any()
        assert not frontier.depths[live:].any()
        assert bool((frontier.scores[live:] == -math.inf).all())
        assert torch.equal(frontier.scores[:live], self.tree.path_log_probs[frontier.nodes[:live]])

    def _path(self, node: int) -> list[int]:
        found = []
        while node:
            found.append(int(self.tree.tokens[node]))
            node = int(self.tree.parents[node])
        return found[::-1]

    def _logits(self, nodes: Tensor, live: int) -> Tensor:
        assert self.draft.columns is not None
        known = [self.draft.tables.logits([*self.draft.tokens, 0, *self._path(int(node))]) for node in nodes[:live]]
        rows = torch.full((len(nodes), len(self.draft.columns)), math.nan)
        for row, logits in zip(rows, known, strict=False):
            row[:] = logits[self.draft.columns]
        return rows

    def _states(self, nodes: Tensor) -> Tensor:
        return hidden_states(self._logits(nodes, len(nodes)))


@pytest.fixture(scope="module", autouse=True)
def one_arithmetic() -> Any:
    """Of the ops on the device there is no C++."""
    with running("reference"):
        yield


@pytest.mark.parametrize("name", OPTIONS)
def test_grows_the_trees_of_the_host(name: str) -> None:
    @settings(deadline=None, max_examples=30)
    @given(DRAFTS, OPTIONS[name])
    def check(draft: dict[str, Any], options: dict[str, Any]) -> None:
        policy = policies.make(name, **options)
        device = Device(policy, drafter(**draft))
        for _ in range(2):  # what the last tree left behind does not matter
            assert device.grow() == on_the_host(policy, drafter(**draft))

    check()


@pytest.mark.parametrize(
    ("name", "options", "thresholds"),
    [
        ("ddd", {"width": 3, "expansions": 4, "checks": (1, 2, 3)}, (-2.0, -0.3)),
        ("svip", {"width": 3, "expansions": 4, "factor": 0.5}, (0.7, 1.2)),
        ("disco", {"width": 3, "expansions": 4}, (0.1, 0.9)),
        ("specdecpp", {"width": 3, "expansions": 4}, (0.1, 0.9)),
        ("dymax", {"length": 5}, (0.2, 0.6)),
        ("dyjoint", {"length": 5}, (0.05, 0.5)),
        ("opt_tree", {"nodes": 5, "max_depth": 6}, (0.0, 0.2)),
    ],
)
def test_rules_end_trees_at_many_heights(name: str, options: dict[str, Any], thresholds: tuple[float, float]) -> None:
    """So that the trees above are not all of one."""
    least, most = thresholds
    passes = {
        Device(policies.make(name, **options, threshold=least + (most - least) * part / 8), drafter(16, seed, 0.3))
        .grow()
        .passes
        for part in range(9)
        for seed in range(4)
    }
    assert len(passes) >= 3


def test_policies_with_levels_are_all_here() -> None:
    made = {name: policies.make(name, **HISTORY.get(name, {})) for name in policies.names() if name != "plain"}
    assert set(OPTIONS) == {name for name, policy in made.items() if policy.levels() is not None}
    assert policies.make("dynatree").levels() is None


@pytest.mark.parametrize("seed", range(20))
def test_discos_network_reads_the_same_features(seed: int) -> None:
    """On the device one by one, on the host in one op: the same bits."""
    policy: Any = policies.make("disco")
    net, facts = policy._learned
    torch.manual_seed(seed)
    row = torch.randn(1, 5 if seed % 2 else 300) * (1 + seed % 4)
    probabilities, entropy = ops.top_children(row, 10)[0].exp(), ops.top_entropy(row, facts["top"])
    for depth in range(1, 4):
        passes = torch.full((1,), depth, dtype=torch.int32)
        features = _classifier.disco_features(probabilities, entropy, passes, facts["depth_base"])
        expected = ops.classify_row(row[0], facts["top"], depth - 1 + facts["depth_base"], net.parts)
        assert float(net(features[0])) == expected
