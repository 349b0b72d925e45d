"""The same rule over padded rows as over exactly what is alive: the same trees, whatever stands in the padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

from research.drafting import draft_tree
from specengine import ops, policies
from specengine.costs import PassCosts
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy
from specengine.records import Cycle, Outcome, Seconds
from tests.examples import examples
from tests.ops.backends import choose
from tests.policies import slow
from tests.toy import CPU, Tables, ToyDrafter, hidden_states

BEAM = {"width": st.integers(1, 5), "expansions": st.integers(0, 5), "budget": st.integers(1, 20)}
THRESHOLD = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0]))
CHAIN = slow.options(length=st.integers(1, 8), threshold=THRESHOLD)
COSTS = st.builds(
    lambda verify, draft: PassCosts("toy", {1: 1.0, 12: 1.0 + verify}, {1: draft}),
    st.floats(0, 2),
    st.floats(0, 0.3),
)
OPTIONS: dict[str, Any] = {
    "auto": slow.options(
        budget=st.integers(1, 14),
        width=st.integers(1, 5),
        max_passes=st.integers(1, 4),
        rounds=st.integers(1, 3),
        costs=COSTS,
    ),
    "eagle": slow.options(**BEAM),
    "chain": slow.options(length=st.integers(1, 6)),
    "fixed": slow.options(branching=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)),
    "ddd": slow.options(
        **BEAM,
        checks=st.lists(st.integers(0, 5), max_size=4).map(tuple),
        threshold=st.floats(-3, 0),
    ),
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
        history=st.booleans(),
        base_depth=st.integers(1, 2),
        max_depth=st.integers(3, 4),
        stop=st.sampled_from([0.0, 0.02, 0.1]),
        deep=st.sampled_from([0.15, 0.5]),
        nodes=st.integers(1, 20),
        root=st.sampled_from(["known", "paper"]),
        prune=st.sampled_from(["leaf", "expand", "none"]),
    ),
    "talon": slow.options(
        budget=st.integers(2, 14), width=st.integers(1, 5), mu=st.floats(0.01, 1)
    ),
    "salf": slow.options(
        budget=st.integers(2, 14), batch=st.integers(1, 5), threshold=st.floats(0, 0.9)
    ),
    "gammatune": slow.options(
        width=st.integers(1, 4), expansions=st.just(4), height=st.integers(1, 5)
    ),
    "ltd": slow.options(networks=st.just("cpu")),
    "smart": slow.options(
        budget=st.integers(1, 14),
        children=st.integers(1, 5),
        width=st.integers(1, 5),
        passes=st.integers(1, 4),
        discount=st.floats(0.3, 1),
        costs=COSTS,
    ),
    "ddtree": slow.options(budget=st.integers(2, 14), block=st.integers(1, 4)),
    "caddtree": slow.options(
        budget=st.integers(2, 14), block=st.integers(1, 4), width=st.integers(1, 4), costs=COSTS
    ),
    "cast": slow.options(
        budget=st.integers(1, 14),
        children=st.integers(1, 4),
        width=st.integers(1, 4),
        passes=st.integers(1, 4),
        breadth=st.floats(0, 5),
        deeper=st.floats(0, 5),
        verified=st.floats(0, 5),
        recent=st.integers(1, 3),
        costs=COSTS,
    ),
    "c2t": slow.options(
        children=st.integers(1, 4), layer=st.integers(1, 5), max_depth=st.integers(1, 4)
    ),
}
DRAFTS = st.fixed_dictionaries(
    {
        "vocabulary": st.sampled_from([2, 5, 16, 40]),
        "seed": st.integers(0, 100_000),
        "concentration": st.sampled_from([0.05, 0.3, 2.0]),
    }
)


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


def exactly(policy: TreePolicy, draft: ToyDrafter) -> tuple[Grown, Cycle]:
    """The tree as the host grows it, and what became of it, which the policy has learnt."""
    tree, grown, kept = draft_tree(0, draft, policy, Seconds(), CPU)
    assert kept is not None
    found = Grown(grown.tokens.tolist(), grown.parents.tolist(), kept.tolist(), int(grown.passes))
    cycle = Cycle(tree, list(range(1 + len(tree) % 2)), [0] * (1 + len(tree) % 2), Seconds())
    policy.learn(Outcome(grown, *outcome(grown), None if policy.state_on(CPU) else cycle))
    return found, cycle


def outcome(tree: TokenTree, width: int | None = None) -> tuple[Nodes, torch.Tensor]:
    """A path to the last node, so many entries wide, and the target's choices after its nodes."""
    path, size = [len(tree) - 1], len(tree)
    while path[-1]:
        path.append(int(tree.parents[path[-1]]))
    path = path[::-1]
    chosen = [*tree.tokens[path[1:]].tolist(), size % 3]
    padding = [0] * (0 if width is None else width - len(path))
    ids = torch.tensor([*path, *padding])
    return Nodes(ids, torch.tensor([len(path)], dtype=torch.int32)), torch.tensor(
        [*chosen, *padding]
    )


class Padded:
    """A tree under the token 0 grown at the widths that a capture would have, without a look at any count."""

    def __init__(self, policy: TreePolicy, draft: ToyDrafter) -> None:
        self.draft, self.policy = draft, policy
        self.tree = TokenTree(policy.capacity)

    def grow(self) -> Grown:
        """Run the maximum number of passes and two more, though the tree may have ended."""
        tree = self.tree
        for array in (tree.log_probs, tree.path_log_probs):
            array[1:] = math.nan
        tree.size.fill_(1)
        tree.passes.zero_()
        frontier = tree.root_alone()
        if self.policy.plan().patience:
            frontier = on_a_device(
                self.policy.grow, tree, frontier.where(False), Step(tree.log_probs[:0, None])
            )
        for _ in range(self.policy.passes + 2):
            tree.passes += frontier.live > 0
            step = self._step(frontier)
            ended, before = not int(frontier.live), len(tree)
            found = on_a_device(self.policy.grow, tree, frontier, step)
            assert not ended or (len(tree) == before and not int(found.live))
            assert int(found.live) <= self.policy.rows
            assert bool(((found.ids >= 0) & (found.ids < tree.capacity)).all())
            ids = torch.zeros(self.policy.rows, dtype=torch.int64)
            ids[: len(found.ids)] = found.ids[: self.policy.rows]
            frontier = Nodes(ids.masked_fill(Nodes(ids, found.live).padding(), 0), found.live)
        assert not int(tree.overflow)
        size, kept = len(tree), self.policy.keep(tree).alive()
        self._outcome = Outcome(tree, *outcome(tree, self.policy.passes + 2), None)
        if self.policy.state_on(CPU):
            on_a_device(self.policy.learn, self._outcome)
        return Grown(
            tree.tokens[:size].tolist(),
            tree.parents[:size].tolist(),
            kept.tolist(),
            int(tree.passes),
        )

    def _path(self, node: int) -> list[int]:
        found = []
        while node:
            found.append(int(self.tree.tokens[node]))
            node = int(self.tree.parents[node])
        return found[::-1]

    def _step(self, frontier: Nodes) -> Step:
        columns = self.draft.columns
        assert columns is not None
        rows = torch.full((len(frontier.ids), len(columns)), math.nan)
        for row, node in enumerate(frontier.alive().tolist()):
            rows[row] = self.draft.tables.logits([*self.draft.tokens, 0, *self._path(node)])[
                columns
            ]
        return Step(rows, columns, hidden=hidden_states(rows))


def on_a_device(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function where no count may be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specengine.ops.tree.FREE", "none")
        return function(*given)


@pytest.fixture(scope="module", params=["cpp", "reference"], autouse=True)
def one_arithmetic(request: Any) -> Any:
    if request.param not in ops.backends()["append_nodes"].available:
        pytest.skip("the extension is not built")
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, request.param)
        yield


@pytest.mark.sliced(6)
@pytest.mark.parametrize("name", OPTIONS)
def test_padding_changes_no_tree(name: str) -> None:
    @examples(30)
    @given(DRAFTS, OPTIONS[name])
    def check(draft: dict[str, Any], options: dict[str, Any]) -> None:
        ours, theirs = (policies.make(name, **options) for _ in range(2))
        padded = Padded(ours, drafter(**draft))
        for _ in range(
            6 if type(theirs).learn is not TreePolicy.learn else 2
        ):  # what the last tree left behind does not matter
            expected, cycle = exactly(theirs, drafter(**draft))
            assert padded.grow() == expected
            if not ours.state_on(CPU):
                ours.learn(Outcome.of(cycle))

    check()


@pytest.mark.sliced(5)
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
def test_rules_end_trees_at_many_heights(
    name: str, options: dict[str, Any], thresholds: tuple[float, float]
) -> None:
    """So that the trees above are not all of one."""
    least, most = thresholds
    passes = {
        Padded(
            policies.make(name, **options, threshold=least + (most - least) * part / 8),
            drafter(16, seed, 0.3),
        )
        .grow()
        .passes
        for part in range(9)
        for seed in range(4)
    }
    assert len(passes) >= 3


def test_every_policy_is_here() -> None:
    assert set(OPTIONS) == set(policies.names()) - {"plain"}
