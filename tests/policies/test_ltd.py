"""LTD: observation layouts, when the networks are asked, equality with the beam under constants, files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from research.drafting import draft_tree
from research.ltd.files import save
from research.ltd.observations import best_actions, depth_observation, laid_out, size_observation
from research.ltd.steered import steered_policy
from specengine import ops, policies
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.ops.tree import TokenTree
from specengine.policies import _ltd
from specengine.policies._ltd import LtdShape, Networks
from specengine.policies.baselines.eagle import Eagle
from specengine.policies.ltd import Ltd, observed
from specengine.records import Seconds
from tests.examples import examples
from tests.ops.backends import choose
from tests.policies import slow
from tests.toy import CPU, LetterTokenizer, Tables, ToyDrafter, ToyTarget

SMALL = LtdShape(width=3, expansions=4, sizes=(2, 5, 9))
HIDDEN = {"depth": (8,), "size": (8, 4)}


class Constant:
    """Goes on until `depth` expansions are made, and takes the size with this index; notes what it was shown."""

    def __init__(self, depth: int, size: int) -> None:
        self.depth, self.size = depth, size
        self.asked: list[tuple[int, Tensor]] = []
        self.sized: list[Tensor] = []

    def goes_on(self, observation: Tensor, expansions: Tensor) -> Tensor:
        self.asked.append((int(expansions), observation))
        return expansions < self.depth

    def choose_size(self, observation: Tensor) -> Tensor:
        self.sized.append(observation)
        return torch.tensor([self.size])


def drafter(seed: int = 0, vocabulary: int = 12, **kind: Any) -> ToyDrafter:
    draft = ToyDrafter(Tables(vocabulary, seed), **kind)
    draft.begin([1, 2])
    return draft


def grown(policy: Ltd | Eagle, draft: ToyDrafter) -> tuple[TokenTree, TokenTree]:
    found = draft_tree(0, draft, policy, Seconds(), CPU)
    return found.tree, found.grown


# ---------------------------------------------------------------------------------------------------- the tree


@examples(40)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 2), st.booleans())
def test_under_constant_decisions_the_tree_is_eagles(
    seed: int, depth: int, size: int, sparse: bool
) -> None:
    """Sections 3.2 and 4: only depth and size differ; V leaves the root out, EAGLE's budget counts it."""
    tree, all_of_it = grown(
        steered_policy(SMALL, Constant(depth, size)), drafter(seed, normalized=sparse)
    )
    beam = Eagle(SMALL.width, depth, SMALL.sizes[size] + 1)
    expected, expected_all = grown(beam, drafter(seed, normalized=sparse))
    for array in ("tokens", "parents", "log_probs"):
        assert torch.equal(getattr(tree, array), getattr(expected, array))
    assert (len(all_of_it), int(tree.passes)) == (len(expected_all), int(expected.passes))
    fixed, _ = grown(
        steered_policy(SMALL, Constant(0, 0), depth, SMALL.sizes[size]),
        drafter(seed, normalized=sparse),
    )
    assert torch.equal(fixed.tokens, expected.tokens)


def constant_networks(shape: LtdShape, depth: int, size: int) -> Networks:
    """Return networks whose biases decide: always go on, and take one size."""
    networks = Networks(shape, {"depth": (4,), "size": (4,)})
    with torch.no_grad():
        for parameter in networks.parameters():
            parameter.zero_()
        networks.depth[-1].bias[depth] = 1.0
        networks.size[-1].bias[size] = 1.0
    return networks.requires_grad_(False)


@pytest.mark.parametrize(("action", "expansions"), [(_ltd.STOP, 1), (_ltd.GO_ON, 4)])
def test_constant_networks_give_eagles_tree(tmp_path: Path, action: int, expansions: int) -> None:
    save(tmp_path / "pair.safetensors", constant_networks(SMALL, action, 1), {})
    policy = policies.make("ltd", networks=str(tmp_path / "pair.safetensors"))
    assert (policy.capacity, policy.budget) == (1 + 3 + 4 * 9, 1 + 9)
    tree, _ = grown(policy, drafter(4))  # type: ignore[arg-type]
    expected, _ = grown(Eagle(3, expansions, 6), drafter(4))
    assert torch.equal(tree.tokens, expected.tokens)
    assert torch.equal(tree.parents, expected.parents)


@pytest.mark.parametrize(
    ("least", "every", "asked"),
    [(1, 1, [1, 2, 3]), (0, 1, [0, 1, 2, 3]), (1, 3, [3]), (0, 2, [0, 2]), (2, 1, [2, 3])],
)
def test_when_the_depth_network_is_asked(least: int, every: int, asked: list[int]) -> None:
    """The paper forces the first expansion and closes the episode at the most; the released code checks every third."""
    decisions = Constant(9, 0)
    tree, _ = grown(
        steered_policy(replace(SMALL, least=least, check_every=every), decisions), drafter()
    )
    assert [expansions for expansions, _ in decisions.asked] == asked
    assert int(tree.passes) == 1 + SMALL.expansions
    decisions = Constant(0, 0)
    tree, _ = grown(
        steered_policy(replace(SMALL, least=least, check_every=every), decisions), drafter()
    )
    assert int(tree.passes) == 1 + asked[0], "it stops at the first question"
    assert len(decisions.sized) == 1


# ---------------------------------------------------------------------------------------------------- observations


def test_the_papers_sizes() -> None:
    """Section 7 of the specification; the paper's networks read 128 and 1,268 values."""
    assert LtdShape().inputs == {"depth": 128, "size": 1268}
    assert LtdShape().outputs == {"depth": 2, "size": 12}
    assert (LtdShape().sizes[0], LtdShape().sizes[-1]) == (20, 240)
    assert SMALL.inputs == {"depth": 9 + 28, "size": 3 + 4 * 9 + 58}


def test_layout_against_a_slow_one() -> None:
    decisions = Constant(3, 2)
    policy = steered_policy(SMALL, decisions)
    policy.begin(250)
    _, tree = grown(policy, drafter(7))
    scores = tree.path_log_probs.tolist()
    by_level = [
        [s for s, d in zip(scores, tree.depths.tolist(), strict=True) if d == level]
        for level in range(1, 5)
    ]
    assert [len(level) for level in by_level] == [3, 9, 9, 9]
    for expansions, seen in decisions.asked:
        expected = [*by_level[expansions], *[0.25] * 14, *[expansions / 10] * 14]
        assert seen.tolist() == pytest.approx(expected)
    (seen,) = decisions.sized
    laid = [value for level in by_level for value in level] + [-20.0] * 9
    assert seen.tolist() == pytest.approx([*laid, *[0.25] * 29, *[0.3] * 29])


@pytest.mark.parametrize("sees", [(), ("length",), ("depth",), ("depth", "length")])
def test_facts_that_are_not_seen_are_0(sees: tuple[str, ...]) -> None:
    """In the running policy and in training; Table 6 of the paper leaves one or the other out."""
    decisions = Constant(3, 2)
    policy = steered_policy(replace(SMALL, sees=sees), decisions)
    policy.begin(250)
    _, tree = grown(policy, drafter(7))
    length, depth = 0.25 * ("length" in sees), 0.3 * ("depth" in sees)
    (size,) = decisions.sized
    assert size[-58:].tolist() == pytest.approx([*[length] * 29, *[depth] * 29])
    expansions, level = decisions.asked[-1]
    depth = expansions / 10 * ("depth" in sees)
    assert level[-28:].tolist() == pytest.approx([*[length] * 14, *[depth] * 14])
    shape = replace(SMALL, sees=sees)
    assert torch.equal(size_observation(laid(tree, SMALL), 250, 3, shape), size)
    everything = size_observation(laid(tree, SMALL), 250, 3, SMALL)
    assert torch.equal(everything, size) == (len(sees) == 2)


def test_files_without_newer_facts_of_the_shape_load(tmp_path: Path) -> None:
    """The shipped ones do not say what their networks see, nor in which order."""
    shape = replace(SMALL, sees=("depth",))
    save(tmp_path / "pair.safetensors", constant_networks(shape, 1, 1), {})
    assert _ltd.load(str(tmp_path / "pair.safetensors")).networks.shape == shape
    assert not {"sees", "best_first"} & set(_ltd.load("cpu").facts["shape"])
    assert _ltd.load("cpu").networks.shape.sees == ("length", "depth")


def levels_of_eagle(draft: ToyDrafter, shape: LtdShape, expansions: int) -> list[list[float]]:
    """The cumulative log-probabilities of each level as EAGLE's code lays them out: a row per node of the beam, and
    the beam sorted, best first."""

    def best(path: slow.Path, score: np.float32) -> list[tuple[slow.Path, np.float32]]:
        return slow.ranked(draft, {path: score})[: shape.width]

    level = best((), np.float32(0))
    found = [level]
    for _ in range(expansions):
        beam = sorted(level, key=lambda node: -node[1])[: shape.width]
        level = [child for node in beam for child in best(*node)]
        found.append(level)
    return [[float(score) for _, score in level] for level in found]


def test_the_authors_networks_see_a_levels_likeliest_parent_first() -> None:
    """They were trained on scores as EAGLE's code lays them out. In order of creation another beam would be shown."""
    changed = 0
    for seed in range(20):
        seen = {}
        for best_first in (True, False):
            decisions = Constant(3, 2)
            grown(
                steered_policy(replace(SMALL, best_first=best_first), decisions),
                slow.drafter(12, seed),
            )
            seen[best_first] = decisions
        by_level = levels_of_eagle(slow.drafter(12, seed), SMALL, 3)
        for expansions, observation in seen[True].asked:
            assert observation[:9].tolist() == by_level[expansions]
        (observation,) = seen[True].sized
        assert observation[:30].tolist() == [score for level in by_level for score in level]
        changed += not torch.equal(observation, seen[False].sized[0])
    assert changed > 10


def test_children_of_equally_likely_parents_stand_in_the_order_of_creation() -> None:
    tree = TokenTree.root(0, 12)  # with room that holds anything
    tree.add(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([-1.0, -1.0]))
    tree.add(
        torch.tensor([1, 1, 2, 2]), torch.tensor([5, 6, 5, 6]), torch.tensor([-0.5, -3, -0.1, -2])
    )
    tree.add(torch.tensor([3, 5]), torch.tensor([7, 7]), torch.tensor([-0.25, -0.25]))
    shape = LtdShape(width=2, expansions=2, sizes=(2,), best_first=True)
    for vacant in (0, -5, 7):
        tree.parents[len(tree) :] = vacant
        shown = observed(
            "size", tree, torch.tensor([0]), torch.tensor([2], dtype=torch.int32), shape
        )
        expected = [-1, -1, -1.5, -4, -1.1, -3, -1.35, -1.75, -20, -20]
        assert shown[:10].tolist() == pytest.approx(expected)


def test_logged_trees_are_not_read_in_an_order_that_they_do_not_hold() -> None:
    with pytest.raises(InputError, match="best_first: logged trees hold candidates in the order"):
        laid(TokenTree.root(0, 1), replace(SMALL, best_first=True))


def laid(tree: TokenTree, shape: LtdShape) -> Tensor:
    tree = tree.trimmed()
    return laid_out(tree.path_log_probs[1:], tree.depths[1:], shape)


def test_candidates_stand_parent_by_parent() -> None:
    tree = TokenTree.root(0, 8)
    tree.add(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([-1.0, -2.0]))
    tree.add(
        torch.tensor([2, 2, 1, 1]),
        torch.tensor([5, 6, 5, 6]),
        torch.tensor([-0.5, -3.0, -0.1, -30.0]),
    )
    shape = LtdShape(width=2, expansions=2, sizes=(2,))
    assert laid(tree, shape).tolist() == pytest.approx([-1, -2, -2.5, -5, -1.1, -20, *[-20] * 4]), (
        "nothing is below the pad"
    )
    assert laid(tree, replace(shape, pad=0.0)).tolist() == pytest.approx(
        [-1, -2, -2.5, -5, -1.1, -31, *[0] * 4]
    )


def test_levels_that_the_draft_did_not_fill_keep_their_places() -> None:
    tree = TokenTree.root(0, 8)
    tree.add(torch.tensor([0]), torch.tensor([1]), torch.tensor([-1.0]))
    tree.add(torch.tensor([1, 1]), torch.tensor([5, 6]), torch.tensor([-0.5, -0.25]))
    tree.add(torch.tensor([2]), torch.tensor([7]), torch.tensor([-math.inf]))
    shape = LtdShape(width=2, expansions=2, sizes=(2,))
    assert laid(tree, shape).tolist() == [-1, -20, -1.5, -1.25, -20, -20, -20, -20, -20, -20]
    assert laid(tree, replace(shape, pad=0.0)).tolist() == [-1, 0, -1.5, -1.25, 0, 0, -1e4, 0, 0, 0]
    assert laid(TokenTree.root(0, 1), shape).tolist() == [-20.0] * 10


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    pad=st.sampled_from([-20.0, -3.0, 0.0]),
    part=st.sampled_from([0.3, 1]),
)
def test_a_running_beam_is_observed_as_a_logged_one(
    seed: int, width: int, pad: float, part: float
) -> None:
    """By every backend, also where the draft left places vacant, at every depth."""
    draw, shape = (
        torch.Generator().manual_seed(seed),
        LtdShape(width=width, expansions=3, sizes=(1,), least=0, pad=pad),
    )
    tree = TokenTree.root(0, 1 + shape.candidates)
    for expansions in range(shape.expansions + 1):
        parents = (
            (tree.depths[: len(tree)] == expansions).nonzero()[:width, 0].repeat_interleave(width)
        )
        parents = parents[torch.rand(len(parents), generator=draw) < part]
        edges = torch.randn(len(parents), generator=draw) * 9 - 9
        edges[torch.rand(len(parents), generator=draw) < 0.1] = -math.inf
        tree.add(parents, torch.arange(len(parents)), edges)
        for which, observe in (("depth", depth_observation), ("size", size_observation)):
            expected = observe(laid(tree, shape), 1234, expansions, shape)
            for backend in ops.backends()["beam_observation"].available:
                with pytest.MonkeyPatch.context() as patch:
                    choose(patch, backend)
                    context, done = (
                        torch.tensor([1234]),
                        torch.tensor([expansions], dtype=torch.int32),
                    )
                    assert torch.equal(observed(which, tree, context, done, shape), expected)


def test_observations_of_many_trees_are_those_of_each() -> None:
    laid, contexts = torch.randn(5, SMALL.candidates) - 5, torch.tensor([10.0, 20, 300, 4, 5])
    for expansions in range(SMALL.expansions + 1):
        for observe in (depth_observation, size_observation):
            together = observe(laid, contexts, expansions, SMALL)
            for row in range(5):
                assert torch.equal(
                    together[row], observe(laid[row], int(contexts[row]), expansions, SMALL)
                )
    first = depth_observation(laid, contexts, 0, SMALL)
    assert torch.equal(first[:, :3], laid[:, :3])
    assert (first[:, 3:9] == SMALL.pad).all(), (
        "before the first expansion a level has `width` candidates"
    )
    assert (
        size_observation(laid, contexts, 1, SMALL)[:, 3 + 9 : SMALL.candidates] == SMALL.pad
    ).all()


def test_the_context_is_the_prompts_and_what_was_committed() -> None:
    """Not 0.01 for ever, as in the released code; and from the first cycle on."""
    tables, decisions = Tables(12, 1), Constant(2, 1)
    engine = Engine(
        ToyTarget(tables),
        ToyDrafter(Tables(12, 2, like=tables, share=0.6)),
        steered_policy(SMALL, decisions),
        LetterTokenizer(),
    )
    for prompt in ([1, 2, 3, 4], [5, 6]):
        decisions.sized.clear()
        committed = len(prompt)
        for piece in engine.stream(prompt, max_new_tokens=12):
            assert float(decisions.sized[-1][-58]) == pytest.approx(committed / 1000)
            committed += len(piece.cycle.tokens)


def test_answers_are_those_of_plain_decoding() -> None:
    tables = Tables(12, 1)
    plain = Engine(ToyTarget(tables), None, None, LetterTokenizer())
    for seed in (None, 3):
        options: dict[str, Any] = {"max_new_tokens": 40}
        options |= {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
        expected = plain.generate([1, 2], **options).token_ids
        for name in ("ltd/a100", "ltd/cpu"):
            draft = ToyDrafter(Tables(12, 2, like=tables, share=0.6))
            engine = Engine(ToyTarget(tables), draft, policies.make(name), LetterTokenizer())
            assert engine.generate([1, 2], **options).token_ids == expected


# ---------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_networks_compute_what_torch_does(activation: str) -> None:
    networks = Networks(SMALL, HIDDEN, activation)
    for name in ("depth", "size"):
        seen = torch.randn(6, SMALL.inputs[name]) * 5
        expected = getattr(networks, name)(seen).argmax(-1)
        assert torch.equal(best_actions(networks, name, seen), expected)
        decide = networks.goes_on if name == "depth" else networks.choose_size
        for backend in ops.backends()["best_action"].available:
            with pytest.MonkeyPatch.context() as patch:
                choose(patch, backend)
                given = [1] if name == "depth" else []
                assert [int(decide(row, *given)) for row in seen] == expected.tolist()


def test_a_pair_comes_back_from_its_file(tmp_path: Path) -> None:
    file, networks = tmp_path / "pair.safetensors", Networks(SMALL, HIDDEN, "tanh")
    save(file, networks, {"note": [1, 2]})
    found = _ltd.load(str(file))
    assert found.networks.shape == SMALL
    assert found.networks.activation == "tanh"
    assert found.facts["note"] == [1, 2]
    for name, tensor in networks.state_dict().items():
        assert torch.equal(found.networks.state_dict()[name], tensor)
    assert not list(tmp_path.glob(".*")), "no partial file stays"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, facts: state.pop("size.2.bias"), "missing: size.2.bias"),
        (lambda state, facts: state.update(extra=torch.zeros(2)), "unused: extra"),
        (
            lambda state, facts: state.update({"depth.0.bias": torch.zeros(9)}),
            r"mis-shaped: depth.0.bias \[9\]",
        ),
        (lambda state, facts: state["depth.0.bias"].fill_(math.nan), "not finite: depth.0.bias"),
        (lambda state, facts: facts.update(kind="c2t"), "cannot be read"),
        (lambda state, facts: facts.pop("shape"), "cannot be read"),
        (lambda state, facts: facts["shape"].update(sizes=[3, 2]), "sizes: got"),
        (lambda state, facts: facts["shape"].update(depth=2), "cannot be read"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "pair.safetensors"
    save(file, Networks(SMALL, HIDDEN), {})
    state = load_file(file)
    facts = {
        "format": 1,
        "kind": "ltd",
        "shape": asdict(SMALL),
        "hidden": HIDDEN,
        "activation": "relu",
    }
    change(state, facts)
    save_file(state, file, metadata={"specengine": json.dumps(facts)})
    with pytest.raises(InputError, match=message):
        policies.make("ltd", networks=str(file))


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"networks": "/nowhere/pair"},
            "networks: /nowhere/pair is not a file, known are a100, cpu",
        ),
        ({"networks": "a100", "depth": 13}, "depth: got 13, accepted 0 to 12"),
        ({"size": 0}, "size: got 0, accepted 1 or more"),
        ({"check_every": 0}, "check_every: got 0"),
        ({"width": 4}, "unknown option 'width', known are networks, depth, size, check_every"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        policies.make("ltd", **options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 0}, "width: got 0"),
        ({"sizes": ()}, "sizes"),
        ({"sizes": (4, 4)}, "ascending"),
        ({"least": 4}, "a depth that is asked about"),
        ({"pad": 1.0}, "pad: got 1.0"),
        ({"sees": ("depth", "entropy")}, "sees: got .*, accepted length, depth"),
    ],
)
def test_shapes_out_of_range(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SMALL, **wrong)


def test_what_ships() -> None:
    assert _ltd.shipped() == ["a100", "cpu"]
    a100, cpu = (_ltd.load(name) for name in ("a100", "cpu"))
    assert a100.networks.shape == LtdShape()
    assert cpu.networks.shape.width == 4
    assert sum(file.stat().st_size for file in _ltd.FOLDER.glob("*")) < 4_000_000
    for trained in (a100, cpu):
        assert trained.facts["ground"]["costs"]["source"], (
            "it is said what machine they were trained for"
        )


@pytest.mark.parametrize(("cuda", "pair"), [(False, "cpu"), (True, "a100")])
def test_the_pair_is_the_machines(monkeypatch: pytest.MonkeyPatch, cuda: bool, pair: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert policies.make("ltd") == policies.make(f"ltd/{pair}")
    other = {"cpu": "a100", "a100": "cpu"}[pair]
    assert policies.make("ltd") != policies.make(f"ltd/{other}")
