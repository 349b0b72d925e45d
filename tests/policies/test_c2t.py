"""C2T: what stays in the tree, what the classifier reads, and which files are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from research.drafting import draft_tree
from specengine import ops, policies
from specengine.errors import InputError
from specengine.ops.tree import TokenTree
from specengine.policies import _classifier
from specengine.policies._classifier import AcceptanceHead, Mlp, c2t_features, disco_features
from specengine.policies.c2t import C2t
from specengine.records import Seconds
from tests.examples import examples
from tests.ops.test_token_tree import check_structure
from tests.toy import CPU, Tables, ToyDrafter, hidden_states

FACTS: dict[str, Any] = {"depth_base": 0, "top": 1000, "beta": 0.3}
SIZES = {"hidden_size": 8, "width": 16, "blocks": 2}


def net(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return _classifier.KINDS[kind].make(SIZES)


def written(folder: Path, kind: str = "c2t", seed: int = 0, **facts: Any) -> str:
    file = folder / f"{kind}.safetensors"
    _classifier.save(file, kind, net(kind, seed), {**FACTS, **SIZES, **facts})
    return str(file)


def with_net(policy: C2t, seed: int) -> C2t:
    """The policy with random weights, spread so that confidences cover 0 to 1."""
    made = net("c2t", seed).requires_grad_(False)
    made.output.weight.mul_(20)
    policy._learned = _classifier.Classifier(made, policy._learned.facts)
    return policy


def grown(policy: C2t, draft: ToyDrafter) -> TokenTree:
    return draft_tree(0, draft, policy, Seconds(), CPU).tree


def confidences(policy: C2t, tree: TokenTree, draft: ToyDrafter) -> np.ndarray:
    """float64 [n]: of every node, from the features' definitions; +inf at the root."""
    state = {
        name: tensor.double().numpy() for name, tensor in policy._learned.net.state_dict().items()
    }
    found = [math.inf]
    for node in range(1, len(tree)):
        path = tree.path_tokens(node)
        row = np.sort(draft.tables.probabilities([*draft.tokens, 0, *path[:-1]]))[::-1][
            : policy.top
        ]
        entropy = -sum(p * math.log(p) for p in row if p > 0)
        joint = math.prod(
            float(draft.tables.probabilities([*draft.tokens, 0, *path[:i]])[token])
            for i, token in enumerate(path)
        )
        features = np.array([joint, entropy, len(path) - 1 + policy._learned.facts["depth_base"]])
        hidden = np.maximum(state["hidden.weight"] @ features + state["hidden.bias"], 0)
        found.append(1 / (1 + np.exp(-(state["output.weight"] @ hidden + state["output.bias"])[0])))
    return np.array(found)


options_of_a_policy = st.fixed_dictionaries(
    {
        "beta": st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9]),
        "children": st.integers(1, 6),
        "layer": st.sampled_from([None, 1, 2, 5]),
        "max_depth": st.integers(1, 4),
        "min_level1": st.integers(0, 2),
        "hard_cap": st.sampled_from([1, 2, 7, 30]),
        "top": st.sampled_from([1, 3, 1000]),
    }
)
a_draft = st.tuples(
    st.sampled_from([2, 5, 12]), st.integers(0, 10_000), st.sampled_from([0.05, 0.5, 2.0])
)


def drafter(setting: tuple[int, int, float], exact: float = 0.0) -> ToyDrafter:
    vocabulary, seed, concentration = setting
    return ToyDrafter(Tables(vocabulary, seed, concentration=concentration, exact=exact))


@examples(500)
@given(options_of_a_policy, a_draft, st.integers(0, 50))
def test_what_stays_is_confident_and_within_the_caps(
    options: dict[str, Any], setting: tuple[int, int, float], seed: int
) -> None:
    policy, draft = with_net(C2t(**options), seed), drafter(setting)
    tree = grown(policy, draft)
    check_structure(tree)
    assert len(tree) <= policy.budget == policy.capacity <= policy.hard_cap
    confidence = confidences(policy, tree, draft)
    sizes = np.bincount(tree.depths.numpy(), minlength=2)
    assert len(sizes) - 1 <= policy.max_depth
    assert max(np.bincount(tree.parents[1:].numpy(), minlength=1)) <= policy.children
    if policy.layer is not None:
        assert max(sizes) <= policy.layer
    below = confidence < policy.threshold - 1e-5
    if below[tree.depths.numpy() > 1].any():
        raise AssertionError("a node below level 1 is not confident")
    if below.any():  # only to have something at level 1, and no more than that
        assert sizes[1] <= policy.min_level1
    if policy.hard_cap > 1 and policy.children >= policy.min_level1:
        wanted = min(
            policy.min_level1, policy.hard_cap - 1, policy.layer or policy.hard_cap, setting[0]
        )
        assert sizes[1] >= wanted


@examples(500)
@given(
    st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([None, 1, 3, 10]), st.integers(0, 3)
)
def test_a_higher_beta_never_adds_nodes_to_a_layer(
    seed: int, size: int, layer: int | None, least: int
) -> None:
    """Given the same candidates, whatever the caps; the most confident stay, the earlier ones among equals."""
    random = np.random.default_rng(seed)
    values = random.choice([0.1, 0.4, 0.5, 0.75, -math.inf, random.random()], size)
    confidence = torch.tensor(values, dtype=torch.float32)
    room = int(random.integers(0, 12))
    level = int(random.integers(1, 3))
    kept_before: set[int] | None = None
    for beta in (0.0, 0.1, 0.4, 0.5, 0.6, 1.0):
        policy = C2t(beta=beta, layer=layer, min_level1=least)
        numbers = torch.tensor([[size], [level], [room]], dtype=torch.int32)
        kept = policy.select(confidence, *numbers).alive().tolist()
        order = sorted(range(size), key=lambda i: (-confidence[i], i))
        proposed = [i for i in order if confidence[i] > -math.inf]
        sure = [i for i in proposed if confidence[i] >= torch.tensor(beta, dtype=torch.float32)]
        count = min(room, layer or room)
        expected = sure[:count]
        if level == 1 and len(expected) < least:
            expected = proposed[: min(least, count)]
        assert kept == sorted(expected)
        assert kept_before is None or set(kept) <= kept_before
        kept_before = set(kept)


@examples(100)
@given(st.integers(0, 10_000), st.integers(1, 120))
def test_one_by_one_gives_what_all_at_once_gives(seed: int, size: int) -> None:
    net = with_net(C2t(), seed)._learned.net
    random = torch.Generator().manual_seed(seed)
    paths, entropies = (
        -5 * torch.rand(size, 1, generator=random),
        8 * torch.rand(size, generator=random),
    )
    depth = torch.randint(0, 10, (1,), generator=random, dtype=torch.int32)
    together = ops.classify_paths(paths, entropies, depth, net.parts)
    single = [
        ops.classify_paths(paths[i : i + 1], entropies[i : i + 1], depth, net.parts)
        for i in range(size)
    ]
    features = c2t_features(paths.double()[:, 0], entropies.double(), depth.double(), 1)
    exact = net.double().logits(features.double()).sigmoid()
    for found in (together, torch.cat(single)):
        assert torch.allclose(found[:, 0].double(), exact, atol=1e-5)


def test_the_classifier_has_241_parameters() -> None:
    assert sum(parameter.numel() for parameter in C2t()._learned.net.parameters()) == 241
    assert (
        sum(parameter.numel() for parameter in Mlp(12, 128).parameters())
        == 12 * 128 + 128 + 128 + 1
    )


def test_features_are_as_defined() -> None:
    rows = c2t_features(torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.5]]), torch.tensor([[3]]), 0)
    assert rows.shape == (1, 2, 3)
    assert torch.allclose(
        rows[0], torch.tensor([[math.exp(-1), 1.5, 2.0], [math.exp(-2), 1.5, 2.0]])
    )
    assert c2t_features(torch.zeros(1), torch.zeros(1), torch.tensor([1]), 1)[0, 2] == 1
    rows = disco_features(torch.tensor([[0.7, 0.3]]), torch.tensor([0.6]), torch.tensor([2]), 0)
    assert torch.allclose(rows, torch.tensor([[0.7, 0.3, 0, 0, 0, 0, 0, 0, 0, 0, 0.6, 1.0]]))


def test_siblings_share_their_parents_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    policy, draft = (
        with_net(C2t(beta=0.0, children=3, layer=4, max_depth=3), 1),
        drafter((12, 3, 0.5)),
    )
    inner = ops.classify_paths
    monkeypatch.setattr(
        ops, "classify_paths", lambda p, h, d, net: (seen.append(h), inner(p, h, d, net))[1]
    )
    tree = grown(policy, draft)
    assert [len(entropies) for entropies in seen] == [1, 3, 4]
    for node in range(3):
        row = draft.tables.probabilities([0, *tree.path_tokens(node + 1)])
        assert float(seen[1][node]) == pytest.approx(-(row * np.log(row)).sum(), abs=1e-4)


def test_candidates_have_the_probability_of_their_whole_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.Tensor] = []
    policy, draft = (
        with_net(C2t(beta=0.0, children=2, layer=None, max_depth=4), 1),
        drafter((12, 3, 0.5)),
    )
    inner = ops.classify_paths
    monkeypatch.setattr(
        ops, "classify_paths", lambda p, h, d, net: (seen.append(p), inner(p, h, d, net))[1]
    )
    tree = grown(policy, draft)
    assert len(tree) == 31
    assert torch.equal(torch.cat([paths.reshape(-1) for paths in seen]), tree.path_log_probs[1:])


def test_a_chain_ends_before_the_first_token_of_low_confidence() -> None:
    policy, draft = (
        with_net(C2t(beta=0.6, children=1, layer=None, max_depth=8, min_level1=0), 2),
        drafter((12, 7, 0.1)),
    )
    tree = grown(policy, draft)
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    longer = grown(with_net(replace(policy, beta=0.0), 2), draft)
    confidence = confidences(policy, longer, draft)
    assert len(tree) == next((i for i, c in enumerate(confidence) if c < 0.6), len(longer))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("least", [0, 3])
def test_no_token_of_probability_0_stays(normalized: bool, least: int) -> None:
    """However confident the classifier is, and although something must stay at level 1."""
    policy = C2t(beta=0.0, children=4, layer=None, max_depth=2, min_level1=least)
    for seed in range(20):
        draft = ToyDrafter(Tables(6, seed, exact=1.0), normalized=normalized)
        tree = grown(policy, draft)
        assert bool(tree.log_probs.isfinite().all())


def test_presets_of_the_papers_tables_keep_nothing_that_is_not_confident() -> None:
    for name in ("paper", "beta-0.65", "beta-0.85", "chain"):
        assert C2t.presets[name]["min_level1"] == 0


def test_the_calibrated_beta_is_the_files(tmp_path: Path) -> None:
    file = written(tmp_path, beta=0.37)
    assert C2t(classifier=file).threshold == 0.37
    assert C2t(classifier=file, beta=0.5).threshold == 0.5
    assert C2t().threshold == C2t()._learned.facts["beta"]


@pytest.mark.parametrize(
    "name",
    [name for name in policies.presets() if name.split("/")[0] in ("c2t", "disco", "specdecpp")],
)
def test_presets_grow(name: str) -> None:
    tree = draft_tree(0, drafter((30, 1, 0.3)), policies.make(name), Seconds(), CPU).tree
    check_structure(tree)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.5}, r"policy c2t\.beta: got 1.5, accepted 0 to 1, or none"),
        ({"layer": 0}, r"policy c2t\.layer: got 0, accepted 1 or more, or none"),
        ({"children": 0}, r"policy c2t\.children: got 0"),
        ({"hard_cap": 0}, r"policy c2t\.hard_cap: got 0"),
        ({"min_level1": -1}, r"policy c2t\.min_level1: got -1"),
        (
            {"classifier": "/no/such/file"},
            r"policy c2t\.classifier: /no/such/file is not a file; train one with: specengine",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        policies.make("c2t", **options)


# ---------------------------------------------------------------------------------------------------- files

KINDS = ("c2t", "disco", "specdecpp")


def metadata_of(file: str) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata())


def damaged(file: str, **facts: Any) -> str:
    """The file with other facts; None drops one."""
    stored = json.loads(metadata_of(file)[_classifier.METADATA]) | facts
    kept = {name: value for name, value in stored.items() if value is not None}
    save_file(load_file(file), file, {_classifier.METADATA: json.dumps(kept)})
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_comes_back_as_it_was_written(kind: str, tmp_path: Path) -> None:
    file = written(tmp_path, kind, 3)
    found = _classifier.load(kind, file)
    for name, tensor in net(kind, 3).state_dict().items():
        assert torch.equal(found.net.state_dict()[name], tensor)
    assert not any(parameter.requires_grad for parameter in found.net.parameters())
    assert {name: found.facts[name] for name in FACTS} == FACTS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"kind": "other"}, "records kind: got 'other'"),
        ({"format": 2}, "records format: got 2, accepted 1"),
        ({"features": ["depth", "entropy"]}, r"records features: got \['depth', 'entropy'\]"),
        ({"log_base": "2"}, "records log_base: got '2', accepted e"),
        ({"depth_base": -1}, "records depth_base: got -1"),
        ({"depth_base": None}, "records depth_base: got None"),
        ({"beta": 2}, "records beta: got 2, accepted 0 to 1"),
        ({"top": 0.5}, "records top: got 0.5"),
    ],
)
def test_files_that_say_something_else_are_refused(
    kind: str, facts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"policy {kind}\.classifier: .*{message}"):
        policies.make(kind, classifier=damaged(written(tmp_path, kind), **facts))


@pytest.mark.parametrize(
    ("facts", "message"),
    [({"units": 0}, "records units: got 0"), ({"entropy": 0}, "records entropy: got 0, accepted")],
)
def test_facts_of_c2t_alone_are_checked(
    facts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        policies.make("c2t", classifier=written(tmp_path, **facts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fault",
    [
        "unused",
        "missing",
        "mis-shaped",
        "not finite",
        "not float32",
        "cannot be read",
        "no metadata",
    ],
)
def test_damaged_files_are_refused(kind: str, fault: str, tmp_path: Path) -> None:
    file = written(tmp_path, kind)
    if fault == "cannot be read":
        Path(file).write_bytes(Path(file).read_bytes()[:-40])
    else:
        state = load_file(file)
        metadata = metadata_of(file)
        name = "output.weight"
        changed = {
            "unused": {**state, "extra": torch.zeros(2)},
            "missing": {key: tensor for key, tensor in state.items() if key != name},
            "mis-shaped": {**state, name: torch.zeros(1, 5)},
            "not finite": {**state, name: state[name].fill_(math.nan)},
            "not float32": {**state, name: state[name].long()},
            "no metadata": state,
        }
        save_file(changed[fault], file, {} if fault == "no metadata" else metadata)
    reason = "cannot be read" if fault == "no metadata" else fault
    with pytest.raises(InputError, match=rf"policy {kind}\.classifier: .*{reason}"):
        policies.make(kind, classifier=file)


@pytest.mark.parametrize("kind", KINDS)
def test_what_ships_is_small_and_documented(kind: str) -> None:
    file = _classifier.FOLDER / f"{kind}.safetensors"
    assert file.stat().st_size < 1.5e6
    facts = _classifier.load(kind, "auto").facts
    assert facts["target"] == "smollm2-135m-instruct"
    assert facts["counts"]["learnt trees"] > 100
    card = (_classifier.FOLDER / "README.md").read_text()
    assert "Apache-2.0" in card
    assert file.name in card


# ---------------------------------------------------------------------------------------------------- depth rules


def test_disco_follows_its_classifier(tmp_path: Path) -> None:
    always, never = net("disco"), net("disco")
    torch.nn.init.constant_(always.output.bias, 100.0)
    torch.nn.init.constant_(never.output.bias, -100.0)
    for made, passes in ((always, 5), (never, 1)):
        _classifier.save(tmp_path / "f.safetensors", "disco", made, FACTS)
        policy = policies.make(
            "disco", classifier=str(tmp_path / "f.safetensors"), width=3, expansions=4
        )
        tree = draft_tree(0, drafter((12, 1, 0.5)), policy, Seconds(), CPU).tree
        assert int(tree.passes) == passes


def test_specdecpp_stops_when_a_rejection_is_likely(tmp_path: Path) -> None:
    """With every acceptance at a, the i-th product is a**i; the bounds hold whatever it is."""
    made = net("specdecpp")
    made.requires_grad_(False)
    for parameter in made.parameters():
        parameter.zero_()
    made.output.bias.fill_(math.log(0.8 / 0.2))
    file = tmp_path / "f.safetensors"
    _classifier.save(file, "specdecpp", made, {**FACTS, **SIZES})

    def passes(**options: Any) -> int:
        policy = policies.make("specdecpp", classifier=str(file), width=2, expansions=6, **options)
        draft = drafter((12, 1, 0.5))
        step = draft.step
        draft.step = lambda tree, nodes: replace(
            step(tree, nodes), hidden=torch.ones(len(nodes), 8)
        )  # type: ignore[method-assign]
        return draft_tree(0, draft, policy, Seconds(), CPU).tree.passes

    # the product after expansion i is 0.8**i: 0.8, 0.64, 0.512, ...
    assert [passes(threshold=h) for h in (0.1, 0.3, 0.4, 0.6, 1.0)] == [2, 3, 4, 6, 7]
    assert passes(threshold=0.1, minimum=4) == 5
    assert passes(threshold=0.0, minimum=0) == 2


@pytest.mark.parametrize(
    ("acceptances", "goes_on"), [((0.9, 0.1), True), ((0.1, 0.9), True), ((0.1, 0.1), False)]
)
def test_the_surest_path_decides_whether_specdecpp_goes_on(
    acceptances: tuple[float, float], goes_on: bool
) -> None:
    policy = policies.make("specdecpp", width=2, expansions=6, threshold=0.3)
    policy._learned = SimpleNamespace(
        facts={"hidden_size": 1}, on={CPU: lambda states: states[:, 0]}
    )  # type: ignore[attr-defined]
    draft = drafter((12, 1, 0.5))
    step, states = draft.step, torch.tensor(acceptances)[:, None]
    draft.step = lambda tree, nodes: replace(step(tree, nodes), hidden=states)  # type: ignore[method-assign]
    assert (int(draft_tree(0, draft, policy, Seconds(), CPU).tree.passes) > 2) is goes_on


def test_specdecpp_says_which_drafts_it_can_read() -> None:
    policy, draft = policies.make("specdecpp"), drafter((12, 1, 0.5))
    step = draft.step
    for hidden, message in (
        (None, "only EAGLE heads give"),
        (torch.zeros(1, 7), "width 576, this draft's have 7"),
    ):
        draft.step = lambda tree, nodes, hidden=hidden: replace(step(tree, nodes), hidden=hidden)  # type: ignore[method-assign]
        with pytest.raises(InputError, match=message):
            draft_tree(0, draft, policy, Seconds(), CPU)


def test_the_acceptance_head_is_residual() -> None:
    head = AcceptanceHead(4, 6, 2).requires_grad_(False)
    for block in head.blocks:
        block.weight.zero_()
        block.bias.fill_(-1e4)  # SiLU of it is 0
    head.output.weight.fill_(1.0)
    head.output.bias.zero_()
    states = torch.tensor([[2.0, 2.0, 2.0, 2.0]])
    assert float(head.logits(states)) == pytest.approx(4.0, abs=1e-3)
    assert head(hidden_states(torch.zeros(3, 5))[:, :4]).shape == (3,)
    assert len({id(block) for block in head.blocks}) == 2
