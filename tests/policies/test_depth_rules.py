"""The rules that end a beam or a chain: the EAGLE beam up to where they say stop."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specengine import policies
from specengine.errors import InputError
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy
from specengine.policies.baselines.ddd import Ddd
from specengine.policies.baselines.dyjoint import DyJoint
from specengine.policies.baselines.dymax import DyMax
from specengine.policies.baselines.eagle import Eagle
from specengine.policies.baselines.gammatune import Gammatune
from specengine.policies.baselines.svip import Svip
from specengine.records import Cycle, Outcome, Seconds
from tests.examples import examples
from tests.policies import slow
from tests.policies.test_dynatree import cycle

BEAM = slow.options(
    width=st.integers(1, 4), expansions=st.integers(0, 5), budget=st.integers(1, 30)
)


def same(one: TokenTree, other: TokenTree) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)


def beams(draft: Any, beam: dict[str, int], passes: int) -> list[list[tuple[slow.Path, float]]]:
    """The beam after each pass: the nodes to be drafted from next."""
    found, level = [], {(): 0.0}
    for _ in range(passes):
        per_parent = [
            sorted(slow.children(draft, path, score), key=lambda child: (-child[1], child[0]))[
                : beam["width"]
            ]
            for path, score in level.items()
        ]
        level = dict(
            sorted((child for group in per_parent for child in group), key=lambda child: -child[1])[
                : beam["width"]
            ]
        )
        found.append(list(level.items()))
    return found


@examples(500)
@given(
    slow.DRAFTS,
    BEAM,
    st.one_of(
        st.builds(
            Ddd,
            checks=st.lists(st.integers(0, 5), max_size=4).map(tuple),
            threshold=st.floats(-3, 0.5),
        ),
        st.builds(Svip, factor=st.floats(0.01, 2), threshold=st.floats(0, 2)),
        st.integers(1, 6).map(lambda height: Gammatune(height=height)),
    ),
)
def test_is_the_eagle_beam_of_the_height_it_stops_at(
    draft: dict[str, Any], beam: dict[str, int], rule: Any
) -> None:
    values = {name: getattr(rule, name) for name in vars(rule) if not name.startswith("_")} | beam
    if isinstance(rule, Gammatune):
        values["height"] = min(values["height"], beam["expansions"] + 1)
    policy = type(rule)(**values)
    tree = slow.grow(policy, slow.drafter(**draft))
    assert 1 <= int(tree.passes) <= beam["expansions"] + 1
    plain = Eagle(beam["width"], int(tree.passes) - 1, beam["budget"])
    assert same(tree, slow.grow(plain, slow.drafter(**draft)))


def stops_at(policy: TreePolicy, draft: dict[str, Any]) -> int:
    return slow.grow(policy, slow.drafter(**draft)).passes


@examples(500)
@given(slow.DRAFTS, st.integers(1, 3), st.lists(st.integers(0, 5), max_size=4), st.floats(-3, 0))
def test_ddd_asks_the_mass_of_the_beam_at_its_checks(
    draft: dict[str, Any], width: int, checks: list[int], threshold: float
) -> None:
    draft = {**draft, "exact": 0.0}
    policy = Ddd(width, 5, 40, tuple(checks), threshold)
    masses = [
        math.log(math.fsum(math.exp(score) for _, score in beam))
        for beam in beams(slow.drafter(**draft), {"width": width}, 6)
    ]
    expected = (
        next((done for done in range(6) if done in checks and masses[done] < threshold), 5) + 1
    )
    if all(abs(mass - threshold) > 1e-5 for mass in masses):
        assert stops_at(policy, draft) == expected


@examples(500)
@given(slow.DRAFTS, st.integers(1, 3), st.floats(0.05, 1.0))
def test_svip_asks_the_entropy_behind_the_best_node(
    draft: dict[str, Any], width: int, threshold: float
) -> None:
    draft = {**draft, "exact": 0.0}
    policy, source = Svip(width, 5, 40, factor=0.5, threshold=threshold), slow.drafter(**draft)
    roots = []
    for beam in [[((), 0.0)], *beams(source, {"width": width}, 5)]:
        path = max(beam, key=lambda node: node[1])[0]
        row = source.tables.probabilities([*source.tokens, 0, *path])
        roots.append(math.sqrt(0.5 * -math.fsum(p * math.log(p) for p in row if p)))
    expected = next((passes for passes, root in enumerate(roots, 1) if root > threshold), 6)
    if all(abs(root - threshold) > 1e-4 for root in roots):
        assert stops_at(policy, draft) == min(expected, 6)


def test_the_entropy_rule_of_learning_to_draft_is_that_of_the_paper() -> None:
    """sqrt(0.15 H) > 0.3 is H > 0.6 nats."""
    flat, peaked = torch.zeros(8), torch.tensor([9.0, *[0.0] * 7])
    for row, passes in ((flat, 1), (peaked, 13)):
        source = slow.drafter(8, 0)
        source.normalized = False
        source.tables.logits = lambda context, row=row: row  # type: ignore[method-assign,misc]
        assert slow.grow(Svip(width=2), source).passes == passes


def test_gammatune_follows_the_accepted_length() -> None:
    policy = Gammatune(height=4, rate=0.5)
    policy.learn(Outcome.of(cycle(4, 4)))
    assert policy._height == 5  # everything was accepted: one more
    policy.learn(Outcome.of(cycle(0, 5)))
    assert policy._height == 3  # the average of 4, 4 and 0 is 2
    for _ in range(9):
        policy.learn(Outcome.of(cycle(0, 5)))
    assert policy._height == 2  # half of the default
    for _ in range(9):
        policy.learn(Outcome.of(cycle(policy._height, policy._height)))
    assert policy._height == 6  # one and a half times the default


class _Rows:
    """A draft whose best token has these probabilities, one after the other."""

    def __init__(self, probabilities: list[float]) -> None:
        self.probabilities = probabilities

    def logits(self, context: list[int]) -> Tensor:
        best = self.probabilities[min(len(context) - 2, len(self.probabilities) - 1)]
        return torch.tensor([best, *[(1 - best) / 63] * 63]).log()


@pytest.mark.parametrize(
    ("policy", "probabilities", "nodes", "passes"),
    [
        (DyMax(), [0.9, 0.8, 0.2, 0.9], 2, 3),
        (DyMax(), [0.1, 0.9], 1, 1),
        (DyMax(length=3), [0.9], 3, 3),
        (DyJoint(), [0.5, 0.5, 0.5, 0.5], 3, 4),
        (DyJoint(), [0.05, 0.9], 1, 1),
        (DyJoint(length=4), [0.99], 4, 4),
        (DyMax(threshold=0.0), [0.2], 10, 10),
    ],
)
def test_chains_end_at_the_first_token_below_the_threshold(
    policy: TreePolicy, probabilities: list[float], nodes: int, passes: int
) -> None:
    source = slow.drafter(64, 0)
    source.tables = _Rows(probabilities)  # type: ignore[assignment]
    tree = slow.grow(policy, source)
    assert (len(tree) - 1, int(tree.passes)) == (nodes, passes)
    assert tree.parents.tolist() == list(range(-1, nodes))


def test_observe_of_the_beam_takes_cycles_without_drafts() -> None:
    for policy in (Ddd(), Svip(), Gammatune()):
        policy.learn(Outcome.of(Cycle(TokenTree.root(0), [0], [1], Seconds())))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "ddd",
            {"checks": (1, -1)},
            r"ddd\.checks: got \(1, -1\), accepted expansions of 0 or more",
        ),
        ("ddd", {"threshold": math.nan}, r"ddd\.threshold: got nan"),
        ("svip", {"factor": 0}, r"svip\.factor: got 0\.0, accepted above 0"),
        ("svip", {"threshold": -1}, r"svip\.threshold: got -1\.0, accepted 0 or more"),
        (
            "gammatune",
            {"height": 14},
            r"gammatune\.height: got 14, accepted 1 to expansions \+ 1 = 13",
        ),
        ("gammatune", {"rate": 0}, r"gammatune\.rate: got 0\.0, accepted above 0"),
        ("dymax", {"length": 0}, r"dymax\.length: got 0, accepted 1 or more"),
        ("dyjoint", {"threshold": 2}, r"dyjoint\.threshold: got 2\.0, accepted 0 to 1"),
        ("talon/none", {}, r"talon: unknown preset 'none', known are paper, "),
        ("chain/none", {}, r"chain: unknown preset 'none', known are \(none\)"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match="policy " + message):
        policies.make(name, **options)


@pytest.mark.parametrize("name", policies.presets())
def test_each_preset_makes_a_policy_that_options_can_change(name: str) -> None:
    policy = policies.make(name)
    base = name.partition("/")[0]
    assert repr(policy) == repr(policies.make(base, **policies.presets()[name]))
    options = {field.name for field in dataclasses.fields(policy) if field.init}  # type: ignore[arg-type]
    for field, value in {"width": 3, "length": 3, "nodes": 30, "budget": 30}.items():
        if field in options:
            assert getattr(policies.make(name, **{field: value}), field) == value
