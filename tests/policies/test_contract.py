"""Tree policies: what each of them promises, and the EAGLE beam against a slow reference."""

import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from research.drafting import draft_tree
from specengine import ops, policies, registry
from specengine.errors import InputError
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy
from specengine.policies.auto import Auto
from specengine.policies.baselines.ddtree import DDTree
from specengine.policies.baselines.eagle import Eagle
from specengine.records import Seconds
from tests.examples import examples
from tests.ops.test_token_tree import check_structure
from tests.toy import CPU, RandomShape, Tables, ToyDrafter, ToyTarget, nodes_of, policy_for

ROOT = Path(__file__).parents[2]
NAMES = [name for name in policies.names() if name != "plain"]
CONTRACT = [*NAMES, "random"]


def drafter(
    vocabulary: int, seed: int, *, concentration: float = 0.3, exact: float = 0.3, **kind: Any
) -> ToyDrafter:
    draft = ToyDrafter(Tables(vocabulary, seed, concentration=concentration, exact=exact), **kind)
    draft.begin([seed % vocabulary, 1 % vocabulary])
    return draft


def grown(policy: TreePolicy, draft: ToyDrafter, token: int = 0) -> tuple[TokenTree, int]:
    found = draft_tree(token, draft, policy, Seconds(), CPU)
    return found.tree, len(found.grown) - 1


def even(policy: TreePolicy) -> TreePolicy:
    """auto with one table of chances for all nodes."""
    if isinstance(policy, Auto):
        table = policy._state[CPU].bound.counts.table
        table.copy_(table[:1].clone())
    return policy


def behind(policy: TreePolicy, source: ToyDrafter, tree: TokenTree, node: int) -> list[int]:
    """Tokens below the root that a node's token was drafted behind: its path, or the only one drafted at its depth."""
    if isinstance(policy, DDTree):
        return source.paths[int(tree.depths[node]) - 1][0]
    return tree.path_tokens(int(tree.parents[node]))


def edge(policy: TreePolicy, stated: Tensor) -> Tensor:
    """Return a policy's own edge value for the draft's log-probability: auto counts chances."""
    if not isinstance(policy, Auto):
        return stated
    return ops.chances(
        stated[None], torch.zeros(1, dtype=torch.int64), policy._state[CPU].bound.counts.table
    )[0]


# ---------------------------------------------------------------------------------------------------- the contract

settings_of_a_draft = st.fixed_dictionaries(
    {
        "vocabulary": st.sampled_from([2, 3, 6, 20, 64]),
        "seed": st.integers(0, 10_000),
        "concentration": st.sampled_from([0.05, 0.3, 2.0]),
        "exact": st.sampled_from([0.0, 0.5, 1.0]),
        "normalized": st.booleans(),
    }
)


@pytest.mark.parametrize("name", CONTRACT)
@examples(12)
@given(draft=settings_of_a_draft)
def test_contract(name: str, draft: dict[str, Any]) -> None:
    """It ends; the tree is sound, within budget, made of the draft's own distributions, and comes out again."""
    policy, source = even(policy_for(name, draft["seed"])), drafter(**draft)
    tree, drafted = grown(policy, source)
    check_structure(tree)
    assert len(tree) <= policy.budget <= policy.capacity
    assert len(tree) - 1 <= drafted < policy.capacity
    assert 1 <= int(tree.passes) == len(source.stepped)
    assert source.stepped[0] == [0]
    for node in range(1, len(tree)):
        context = [*source.tokens, 0, *behind(policy, source, tree, node)]
        stated = source.tables.logits(context)[tree.tokens[node]]
        expected = edge(policy, stated)
        assert (
            math.isclose(float(tree.log_probs[node]), float(expected), abs_tol=1e-4)
            or expected == -math.inf
        )
        assert not (draft["normalized"] and expected == -math.inf)

    again, _ = grown(even(policy_for(name, draft["seed"])), drafter(**draft))
    for array in ("tokens", "parents", "log_probs"):
        assert torch.equal(getattr(tree, array), getattr(again, array))


@pytest.mark.parametrize("name", NAMES)
def test_contract_with_the_default_options(name: str) -> None:
    policy, source = policies.make(name), drafter(64, 5, exact=0.0)
    tree, drafted = grown(policy, source)
    check_structure(tree)
    assert 1 < len(tree) <= policy.budget <= policy.capacity
    assert drafted < policy.capacity


@pytest.mark.parametrize("name", CONTRACT)
def test_a_draft_with_nothing_to_say_gives_the_root(name: str) -> None:
    source = drafter(6, 0, normalized=True)
    source.tables.logits = lambda context: torch.full((6,), -math.inf)  # type: ignore[method-assign]
    tree, drafted = grown(policy_for(name), source, token=3)
    assert (tree.tokens.tolist(), drafted) == ([3], 0)


@pytest.mark.parametrize("name", CONTRACT)
def test_a_draft_vocabulary_is_mapped_to_target_ids(name: str) -> None:
    tables, columns = Tables(20, 3), [17, 4, 11, 8, 2]
    source = ToyDrafter(tables, columns=columns)
    policy = even(policy_for(name, 4))
    tree, _ = grown(policy, source)
    assert len(tree) > 1
    assert set(tree.tokens.tolist()[1:]) <= set(columns)
    for node in range(1, len(tree)):
        row = tables.logits([0, *behind(policy, source, tree, node)])[columns].log_softmax(-1)
        expected = edge(policy, row[columns.index(int(tree.tokens[node]))])
        assert math.isclose(float(tree.log_probs[node]), float(expected), abs_tol=1e-4)


@pytest.mark.parametrize("name", CONTRACT)
def test_equal_instances_shape_equal_trees_over_a_whole_generation(name: str) -> None:
    """Policies may learn from what they observe, but from nothing else."""
    from specengine.engine import Engine

    def trees() -> list[list[int]]:
        tables = Tables(6, 1)
        engine = Engine(
            ToyTarget(tables), ToyDrafter(Tables(6, 2, like=tables, share=0.7)), policy_for(name, 3)
        )
        return [
            piece.cycle.tree.tokens.tolist() for piece in engine.stream([0, 1], max_new_tokens=24)
        ]

    assert trees() == trees()


class PaddedDrafter(ToyDrafter):
    """Its rows end in columns of -inf, as those of a vocabulary that is padded to a round size."""

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        step = super().step(tree, frontier)
        padding = torch.full((len(frontier.alive()), 7), -math.inf)
        return dataclasses.replace(step, logits=torch.cat([step.logits, padding], 1))


@pytest.mark.parametrize("name", CONTRACT)
@examples(12)
@given(draft=settings_of_a_draft)
def test_padded_rows_shape_the_same_tree(name: str, draft: dict[str, Any]) -> None:
    draft = {**draft, "normalized": True}
    padded = PaddedDrafter(drafter(**draft).tables, normalized=True)
    padded.begin(drafter(**draft).tokens)
    ragged, _ = grown(policy_for(name, draft["seed"]), drafter(**draft))
    same, _ = grown(policy_for(name, draft["seed"]), padded)
    for array in ("tokens", "parents", "log_probs"):
        assert torch.equal(getattr(ragged, array), getattr(same, array))


SHOWN = re.compile(r'```python title="specengine/policies/comb.py"\n(.*?)```', re.DOTALL)
FIND_IT = """
import specengine.policies
specengine.policies.__path__.append({folder!r})
"""


@pytest.mark.slow
def test_a_new_file_is_a_policy_of_the_command_line_and_of_the_contract(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    shown = SHOWN.search((ROOT / "docs" / "develop" / "policy.md").read_text())
    assert shown is not None
    (tmp_path / "policies" / "comb.py").write_text(shown[1])
    (tmp_path / "finds_it.py").write_text(FIND_IT.format(folder=str(tmp_path / "policies")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    listed = run(
        "-c",
        "import finds_it; from specengine.cli import main; main(['doctor', '--inspect', '--json'])",
    )
    assert json.loads(listed)["policies"]["comb"]["about"].startswith("The draft's likeliest path")
    tests = [
        "tests/policies/test_contract.py",
        "-k",
        "comb and (contract or same or nothing)",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    assert " passed" in run("-m", "pytest", "-p", "finds_it", *tests)


# ---------------------------------------------------------------------------------------------------- eagle


def slow_eagle(
    policy: Eagle, draft: ToyDrafter, root: int
) -> tuple[int, list[tuple[list[int], np.float32]]]:
    """The number of candidates; paths and path log-probabilities of the kept ones."""
    candidates: list[tuple[list[int], np.float32]] = [([], np.float32(0.0))]

    def children(path: list[int], score: np.float32) -> list[tuple[list[int], np.float32]]:
        row = draft.tables.logits([*draft.tokens, root, *path]).numpy()
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))[: policy.width]
        return [([*path, token], score + row[token]) for token in order if row[token] > -math.inf]

    def best(indices: list[int], count: int) -> list[int]:
        return sorted(sorted(indices, key=lambda index: (-candidates[index][1], index))[:count])

    beam = [0]
    for _ in range(policy.expansions + 1):
        first = len(candidates)
        for index in beam:
            candidates.extend(children(*candidates[index]))
        beam = best(list(range(first, len(candidates))), policy.width)
    return len(candidates) - 1, [
        candidates[index] for index in best(list(range(len(candidates))), policy.budget)
    ]


class TiedTables(Tables):
    """Log-probabilities of 0 (an edge of probability one), -1 and -2 only: nearly everything ties."""

    def logits(self, context: Any) -> torch.Tensor:
        random = np.random.default_rng([self.seed, *context])
        return torch.from_numpy(-random.integers(0, 3, self.vocabulary).astype(np.float32))


@examples(60)
@given(
    st.integers(0, 10_000),
    st.sampled_from([2, 5, 9]),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 40),
    st.booleans(),
)
def test_eagle_equals_the_slow_reference(
    seed: int, vocabulary: int, width: int, expansions: int, budget: int, tied: bool
) -> None:
    policy = Eagle(width, expansions, budget)
    tables = TiedTables(vocabulary, seed) if tied else Tables(vocabulary, seed, exact=0.5)
    tree, drafted = grown(policy, ToyDrafter(tables, normalized=True))
    candidates, kept = slow_eagle(policy, ToyDrafter(tables), 0)
    assert drafted == candidates
    assert [tree.path_tokens(node) for node in range(len(tree))] == [path for path, _ in kept]
    assert tree.path_log_probs.tolist() == [float(score) for _, score in kept]


@examples(25)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(0, 5), st.integers(1, 80))
def test_eagle_counts(seed: int, width: int, expansions: int, budget: int) -> None:
    policy, source = Eagle(width, expansions, budget), drafter(12, seed, exact=0.0)
    tree, drafted = grown(policy, source)
    assert drafted == width + expansions * width**2 == policy.capacity - 1
    assert len(tree) == min(budget, policy.capacity)
    assert int(tree.passes) == expansions + 1 >= int(tree.depths.max())
    assert all(len(nodes) <= width for nodes in source.stepped)
    assert max(np.bincount(tree.parents[1:], minlength=1)) <= width


def test_eagle_keeps_the_parents_of_certain_children() -> None:
    """p = 1.0 edges: a child ties with its parent, and only an order that knows which came first is safe."""
    tree = TokenTree.root(0, 40)
    for node in range(39):
        tree.add(torch.tensor([max(0, node - 5)]), torch.tensor([node]), torch.zeros(1))
    for budget in range(1, 41):
        assert Eagle(budget=budget).keep(tree).alive().tolist() == list(range(budget))


def test_eagle_verifies_the_optimal_tree_when_the_beam_is_wide_enough() -> None:
    """With width and height of at least budget - 1 the rerank is the best connected tree of that size."""
    budget = 4
    tables = Tables(4, 8, concentration=1.0)
    tree, _ = grown(Eagle(budget - 1, budget - 2, budget), ToyDrafter(tables))
    paths = [
        [a, b, c][:length]
        for a in range(4)
        for b in range(4)
        for c in range(4)
        for length in (1, 2, 3)
    ]
    values = {
        tuple(path): math.prod(tables.probabilities([0, *path[:i]])[t] for i, t in enumerate(path))
        for path in paths
    }
    best = sorted(values.values(), reverse=True)[: budget - 1]
    assert math.isclose(float(tree.path_log_probs[1:].exp().sum()), sum(best), rel_tol=1e-5)


# ---------------------------------------------------------------------------------------------------- fixed shapes


def test_chain_is_the_greedy_path() -> None:
    source = drafter(9, 2, exact=0.0)
    tree, drafted = grown(policies.make("chain", length=7), source)
    assert tree.parents.tolist() == list(range(-1, 7))
    assert (drafted, int(tree.passes)) == (7, 7)
    for depth in range(7):
        row = source.tables.logits([*source.tokens, 0, *tree.path_tokens(depth)])
        assert int(tree.tokens[depth + 1]) == int(row.argmax())


def test_fixed_has_the_shape_it_says() -> None:
    source = drafter(9, 2, exact=0.0)
    policy = policies.make("fixed", branching=(3, 1, 2))
    tree, drafted = grown(policy, source)
    assert np.bincount(tree.depths).tolist() == [1, 3, 3, 6]
    assert (drafted, int(tree.passes), policy.capacity) == (12, 3, 13)
    for node in range(len(tree) - 6):
        children = tree.tokens[tree.parents == node].tolist()
        row = source.tables.logits([*source.tokens, 0, *tree.path_tokens(node)])
        assert children == row.argsort(descending=True)[: len(children)].tolist()


def test_shapes_wider_than_the_vocabulary_take_all_of_it() -> None:
    tree, _ = grown(policies.make("fixed", branching=(5, 5)), drafter(2, 0, exact=0.0))
    assert np.bincount(tree.depths).tolist() == [1, 2, 4]


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain", {"length": 0}, r"policy chain\.length: got 0, accepted 1 or more"),
        ("chain", {"length": "many"}, r"policy chain\.length: got 'many', expected int"),
        ("chain", {"length": 2.5}, r"policy chain\.length: got 2.5, expected int"),
        ("chain", {"length": True}, r"policy chain\.length: got True, expected int"),
        ("chain", {"size": 3}, r"policy chain: unknown option 'size', known are length"),
        ("eagle", {"width": 0}, r"policy eagle\.width: got 0, accepted 1 or more"),
        ("eagle", {"expansions": -1}, r"policy eagle\.expansions: got -1, accepted 0 or more"),
        ("eagle", {"budget": 0}, r"policy eagle\.budget: got 0, accepted 1 or more"),
        (
            "eagle",
            {"depth": 5},
            r"policy eagle: unknown option 'depth', known are width, expansions, budget",
        ),
        (
            "fixed",
            {"branching": (3, 0)},
            r"policy fixed\.branching: got \(3, 0\), accepted one count of 1 or more",
        ),
        ("fixed", {"branching": ()}, r"policy fixed\.branching: got \(\), accepted one count"),
        ("fixed", {"branching": "3,x"}, r"policy fixed\.branching: got '3,x', expected tuple"),
        ("fixed", {"branching": 3}, r"policy fixed\.branching: got 3, expected"),
        ("Eagle", {}, r"policy: unknown name 'Eagle', known are .*chain, .*eagle.*fixed"),
    ],
)
def test_wrong_options_say_what_is_accepted(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        policies.make(name, **options)


@pytest.mark.parametrize("name", NAMES)
def test_each_policy_refuses_unknown_options_and_lists_its_own(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(policies.make(name)) if field.init]  # type: ignore[arg-type]
    with pytest.raises(InputError) as refused:
        policies.make(name, no_such_option=1)
    assert (
        str(refused.value)
        == f"policy {name}: unknown option 'no_such_option', known are {', '.join(fields)}"
    )


def test_options_may_be_strings_as_a_command_line_gives_them() -> None:
    assert policies.make("eagle", width="4", budget="8") == policies.make(
        "eagle", width=4, budget=8
    )
    assert policies.make("fixed", branching="4,2") == policies.make("fixed", branching=[4, 2])


@dataclasses.dataclass
class Sample:
    """An option of each type."""

    flag: bool = False
    limit: int | None = 3
    share: float = 0.5
    shape: tuple[int, ...] = (1,)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"flag": "true", "limit": "none"}, Sample(flag=True, limit=None)),
        ({"flag": "0", "limit": "7"}, Sample(limit=7)),
        ({"flag": True, "limit": None, "share": "0.25"}, Sample(True, None, 0.25)),
        ({"share": 1, "shape": [2, "3"]}, Sample(share=1.0, shape=(2, 3))),
    ],
)
def test_option_types(given: dict[str, Any], expected: Sample) -> None:
    assert registry.build(Sample, given, "sample") == expected


@pytest.mark.parametrize(
    ("name", "value"), [("flag", "maybe"), ("limit", "7.5"), ("share", "half"), ("shape", "1,b")]
)
def test_option_types_are_checked(name: str, value: str) -> None:
    with pytest.raises(InputError, match=rf"sample\.{name}: got '{value}', expected"):
        registry.build(Sample, {name: value}, "sample")


@pytest.mark.parametrize("count", [0, 2])
def test_a_file_must_hold_exactly_one_policy(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"policies_with_{count}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    classes = "".join(f"class P{i}(TreePolicy): ...\n" for i in range(count))
    (package / "mine.py").write_text(f"from specengine.policies import TreePolicy\n{classes}")
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.import_module(package.name)
    assert registry.names(found) == ["mine"]
    with pytest.raises(
        InputError, match=f"mine must define exactly one TreePolicy, it has {count}"
    ):
        registry.find(found, TreePolicy, "mine", "policy")


def test_names_list_plain_and_each_file() -> None:
    assert {"chain", "eagle", "fixed", "plain"} <= set(policies.names())
    assert policies.names() == [*sorted(NAMES), "plain"]


def test_a_policy_without_its_methods_says_what_is_missing() -> None:
    nothing = TreePolicy()
    with pytest.raises(NotImplementedError, match="must state its capacity"):
        _ = nothing.capacity
    with pytest.raises(NotImplementedError, match="must define grow"):
        nothing.grow(TokenTree.root(0), nodes_of([]), None)  # type: ignore[arg-type]
    assert nothing.keep(TokenTree.root(0)).alive().tolist() == [0]
    assert RandomShape(1) != RandomShape(2)
