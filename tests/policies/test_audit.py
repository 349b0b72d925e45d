"""The five papers' rules, each written out from its text alone, against the policies as they ship.

Over 2,000 random drafts each, whose rows have ties, zeros and certain tokens among them, and whose budgets go down to
one node. A reference that is wrong in one line must differ, which is what says that these would see a wrong policy.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from research.ltd.steered import steered_policy
from specengine import policies
from specengine.engine import Engine
from specengine.policies import TreePolicy, _classifier
from specengine.policies._ltd import GO_ON, REPEATS, LtdShape, Networks
from specengine.policies.c2t import C2t
from specengine.policies.dynatree import DynaTree
from specengine.policies.ltd import Ltd
from specengine.policies.salf import Salf
from specengine.policies.talon import Talon
from tests.policies import slow
from tests.toy import Tables, ToyDrafter, ToyTarget

Path = tuple[int, ...]
# path log-probabilities by the tokens below the root, in order of creation
Scores = dict[Path, np.float32]
NOTHING = np.float32(-math.inf)
DRAFTS, PART = 2000, 200
CLOSE = 1e-5  # of two numbers whose order rounding may decide


class UndecidedError(Exception):
    """The draft's decisions hang on rounding."""


class World:
    """A draft as the papers see one: a probability for each token after each path, in float32 as it reaches a rule."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng([57, seed])
        tables = Tables(
            int(random.choice([2, 3, 5, 8])),
            seed,
            concentration=float(random.choice([0.05, 0.3, 2.0])),
            exact=float(random.choice([0.0, 0.5, 1.0])),
        )
        self.draft = ToyDrafter(tables, normalized=True)
        self.draft.begin([seed % tables.vocabulary])
        self.tables, self.random = tables, random
        self._rows: dict[Path, np.ndarray] = {}

    def row(self, path: Path) -> np.ndarray:
        """The log-probabilities after a path, float32 [vocabulary]."""
        if path not in self._rows:
            self._rows[path] = self.tables.logits([*self.draft.tokens, 0, *path]).numpy()
        return self._rows[path]

    def children(self, path: Path, score: np.float32) -> Iterator[tuple[Path, np.float32]]:
        """Yield the tokens after a path that have a probability, likeliest first, of equals the smaller id."""
        row = self.row(path)
        for token in np.argsort(-row, kind="stable"):
            if row[token] > -math.inf:
                yield (*path, int(token)), np.float32(score + row[token])

    @property
    def kinds(self) -> Counter[str]:
        """How many of the rows that a rule read have ties, zeros, and one certain token."""
        rows = [row[row > -math.inf] for row in self._rows.values()]
        zeros = sum(bool((row == -math.inf).any()) for row in self._rows.values())
        ties = sum(len(np.unique(row)) < len(row) for row in rows)
        return Counter(ties=ties, zeros=zeros, certain=sum(len(row) == 1 for row in rows))


def best(nodes: Iterable[tuple[Path, np.float32]], count: int) -> list[tuple[Path, np.float32]]:
    """The likeliest of them, best first, of equals the earlier ones."""
    return sorted(nodes, key=lambda node: -node[1])[:count]


# ---- TALON, Algorithm 2


def talon_options(random: np.random.Generator) -> dict[str, Any]:
    return {
        "budget": int(random.choice([1, 2, 7, 20])),
        "width": int(random.choice([1, 2, 4, 10])),
        "mu": float(random.choice([0.01, 0.03, 0.3, 1.0])),
    }


def talon(world: World, policy: Talon, wrong: str = "") -> Scores:
    tree, layer, depth = {(): np.float32(0)}, {(): np.float32(0)}, 0
    while len(tree) < policy.budget and layer:
        pool = [child for path, score in layer.items() for child in world.children(path, score)]
        if depth == 0 and wrong != "gates the first layer":
            taken = best(pool, policy.width)
        else:
            anchor = max((score for _, score in pool), default=NOTHING)
            least = anchor + np.float32(math.log(policy.mu))
            if wrong == "gates by the parents' best":
                least = max(layer.values()) + np.float32(math.log(policy.mu))
            taken = best([node for node in pool if node[1] >= least], len(pool))
            if wrong == "drops what is level with the gate":
                taken = [node for node in taken if node[1] > least]
        layer = dict(taken[: policy.budget - len(tree)])
        tree |= layer
        depth += 1
    return tree


# ---- SALF, Algorithm 2


def salf_options(random: np.random.Generator) -> dict[str, Any]:
    return {
        "budget": int(random.choice([1, 2, 6, 18])),
        "batch": int(random.choice([1, 2, 5, 20])),
        "threshold": float(random.choice([0.0, 0.2, 0.6, 0.9])),
        "fill": bool(random.integers(2)),
    }


def salf(world: World, policy: Salf, wrong: str = "") -> Scores:
    tree: list[tuple[Path, np.float32]] = []
    queue: list[tuple[Path, np.float32]] = [((), np.float32(0))]
    while True:
        drawn, queue = queue[: policy.batch], queue[policy.batch :]
        before, tree = tree, best([*tree, *drawn], policy.budget)
        lowest = tree[-1][1] if len(tree) == policy.budget else NOTHING
        mass = math.fsum(math.exp(score) for _, score in drawn)
        drawn = [node for node in drawn if node[1] > lowest]
        if wrong != "weighs what cannot enter":
            mass = math.fsum(math.exp(score) for _, score in drawn)
        if wrong == "stops by the best alone":
            mass = math.exp(drawn[0][1]) if drawn else 0.0
        if abs(mass - policy.threshold) < CLOSE and policy.threshold:
            raise UndecidedError
        if not drawn or mass < policy.threshold:
            if wrong == "leaves the last batch out":
                tree = before
            break
        for path, score in drawn:
            queue = best([*queue, *world.children(path, score)], policy.budget)
    if policy.fill:  # ours: places that are left go to the best of the queue
        tree += queue[: policy.budget - len(tree)]
    return dict(tree)


# ---- C2T, Algorithm 1


def c2t_options(random: np.random.Generator) -> dict[str, Any]:
    layer = [None, 1, 2, 5][int(random.integers(4))]
    return {
        "beta": float(random.choice([0.2, 0.4, 0.5, 0.65])),
        "children": int(random.choice([1, 2, 4, 10])),
        "layer": layer,
        "max_depth": int(random.choice([1, 2])) if layer is None else 4,
        "top": [None, 1, 2, 1000][int(random.integers(4))],
        "min_level1": 0,
        "hard_cap": int(random.choice([1, 256, 256, 256])),
    }


def c2t(world: World, policy: C2t, wrong: str = "") -> Scores:
    state = {name: tensor.numpy() for name, tensor in policy._learned.net.state_dict().items()}
    tree, layer, depth = {(): np.float32(0)}, [((), np.float32(0))], 0
    while depth < policy.max_depth and layer and len(tree) < policy.hard_cap:
        sure: list[tuple[float, Path, np.float32]] = []
        for path, score in layer:
            likeliest = np.sort(np.exp(world.row(path).astype(np.float64)))[::-1]
            likeliest = likeliest[: policy.top or 1000]
            entropy = -sum(p * math.log(p) for p in likeliest if p > 0)
            children = [*world.children(path, score)][: policy.children]
            if wrong == "keeps tokens of probability 0":
                zeros = np.flatnonzero(world.row(path) == -math.inf)
                children += [((*path, int(token)), NOTHING) for token in zeros]
                children = children[: policy.children]
            for child, joint in children:
                seen = [math.exp(joint), entropy, depth + (wrong == "counts depths from 1")]
                if wrong == "classifies by the last step alone":
                    seen[0] = math.exp(world.row(path)[child[-1]])
                hidden = np.maximum(state["hidden.weight"] @ seen + state["hidden.bias"], 0)
                logit = float(state["output.weight"][0] @ hidden + state["output.bias"][0])
                confidence = 1 / (1 + math.exp(-logit))
                if abs(confidence - policy.threshold) < CLOSE:
                    raise UndecidedError
                if confidence >= policy.threshold:
                    sure.append((confidence, child, joint))
        order = sorted(range(len(sure)), key=lambda place: -sure[place][0])
        count = len(order) if policy.layer is None else policy.layer
        if count < len(order) and sure[order[count - 1]][0] - sure[order[count]][0] < CLOSE:
            raise UndecidedError
        layer = [sure[place][1:] for place in sorted(order[:count])]
        tree |= dict(layer)
        depth += 1
    return tree


# ---- DynaTree, Algorithm 1


def dynatree_options(random: np.random.Generator) -> dict[str, Any]:
    return {
        "base_depth": int(random.choice([1, 2, 3])),
        "max_depth": int(random.choice([4, 5])),
        "branch_max": int(random.choice([2, 3])),
        "high": float(random.choice([0.6, 0.9])),
        "low": float(random.choice([0.2, 0.4])),
        "stop": float(random.choice([0.05, 0.1])),
        "deep": float(random.choice([0.2, 0.5])),
        "least": float(random.choice([0.03, 0.08, 0.15])),
        "nodes": int(random.choice([1, 2, 8, 20])),
        "root": "paper",
        "prune": str(random.choice(["expand", "leaf"])),
    }


def dynatree(world: World, policy: DynaTree, wrong: str = "") -> Scores:
    """Line 15 lets an improbable node stay as a leaf (`expand`), section 3.3 prunes it (`leaf`)."""
    first = next(world.children((), np.float32(0)))
    tree = {(): np.float32(0), first[0]: first[1]}
    active = deque([first])
    while active and len(tree) - 1 < policy.nodes:
        path, score = active.pop() if wrong == "takes the newest first" else active.popleft()
        depth = len(path) - (wrong != "counts depths from 1")
        if policy.prune == "expand" and score < np.float32(math.log(policy.least)):
            continue
        if depth >= policy.max_depth or score < np.float32(math.log(policy.stop)):
            continue
        if depth >= policy.base_depth and score < np.float32(math.log(policy.deep)):
            continue
        surest = world.row(path).max()
        count = policy.branch_mid
        if surest >= np.float32(math.log(policy.high)):
            count = policy.branch_min
        elif surest < np.float32(math.log(policy.low)):
            count = policy.branch_max
        if wrong == "branches by the path's probability" and score < math.log(policy.low):
            count = policy.branch_max
        for child in [*world.children(path, score)][:count]:
            pruned = policy.prune == "leaf" and child[1] < np.float32(math.log(policy.least))
            if len(tree) - 1 < policy.nodes and not pruned:
                tree[child[0]] = child[1]
                active.append(child)
    return tree


# ---- Learning to Draft, sections 3 and 4, appendix A.2


def ltd_options(random: np.random.Generator) -> dict[str, Any]:
    return {
        "width": int(random.choice([2, 3])),
        "expansions": int(random.choice([2, 4])),
        "sizes": [(1,), (2, 5, 9), (1, 3, 30)][int(random.integers(3))],
        "pad": float(random.choice([0.0, -20.0])),
        "best_first": True,
        "sees": [(), ("length",), ("depth",), ("length", "depth")][int(random.integers(4))],
    }


def ltd_policy(options: dict[str, Any], random: np.random.Generator) -> Ltd:
    """The policy with networks of random weights, large enough to decide one way and the other."""
    torch.manual_seed(int(random.integers(1 << 30)))
    networks = Networks(LtdShape(**options), {"depth": [8], "size": [8, 6]}, "tanh")
    for parameter in networks.requires_grad_(False).parameters():
        parameter.normal_(0, 0.4)
    policy = steered_policy(networks.shape, networks)
    policy.begin(int(random.integers(1, 3000)))
    policy.audited = networks  # type: ignore[attr-defined]
    return policy


def decided(networks: Networks, which: str, seen: list[float]) -> int:
    values = np.array(seen)
    layers = [layer for layer in getattr(networks, which) if isinstance(layer, torch.nn.Linear)]
    for place, layer in enumerate(layers):
        values = np.tanh(values) if place else values
        values = layer.weight.double().numpy() @ values + layer.bias.double().numpy()
    ranked = np.sort(values)[::-1]
    if len(ranked) > 1 and ranked[0] - ranked[1] < CLOSE:
        raise UndecidedError
    return int(values.argmax())


def ltd(world: World, policy: Ltd, wrong: str = "") -> Scores:
    """The beam as EAGLE's code lays it out: a row of scores per node of the beam, and the beam best first."""
    networks: Networks = policy.audited  # type: ignore[attr-defined]
    shape, width = networks.shape, networks.shape.width

    def observed(which: str, levels: list[Scores]) -> list[float]:
        """Each level from its own place on, then length and depth."""
        laid = [shape.pad] * shape.candidates
        start = 0
        for number, level in enumerate(levels):
            floor = shape.pad if shape.pad < 0 else -1e4
            shown = [max(float(score), floor) for score in level.values()]
            laid[start : start + len(shown)] = shown
            last, start = start, shape.grown(number)
        if which == "depth":
            laid = (laid + [shape.pad] * width**2)[last : last + width**2]
            if len(levels) == 1:
                laid[width:] = [shape.pad] * (width**2 - width)
        facts = {"length": policy._tokens / 1000, "depth": (len(levels) - 1) / 10}
        if wrong == "shows all that it knows":
            return laid + [fact for fact in facts.values() for _ in range(REPEATS[which])]
        told = [facts[name] * (name in shape.sees) for name in ("length", "depth")]
        return laid + [fact for fact in told for _ in range(REPEATS[which])]

    levels: list[Scores] = [dict([*world.children((), np.float32(0))][:width])]
    while len(levels) <= shape.expansions:
        asked = len(levels) - 1 >= shape.least
        if asked and decided(networks, "depth", observed("depth", levels)) != GO_ON:
            break
        beam = best(levels[-1].items(), width)
        if wrong == "parents in the order of creation":
            beam = [node for node in levels[-1].items() if node in beam]
        levels.append(dict(child for node in beam for child in [*world.children(*node)][:width]))
        if not levels[-1]:
            raise UndecidedError  # the papers' drafts always propose something
    size = shape.sizes[decided(networks, "size", observed("size", levels))]
    if wrong == "counts the root":
        size -= 1
    return {(): np.float32(0)} | dict(best([n for level in levels for n in level.items()], size))


# ---- the audit


class Rule(NamedTuple):
    """A paper's rule. options: drawn for a draft; make: the shipped policy; wrong: lines that a reference may break;
    ordered: whether the order of the nodes follows from the rule."""

    options: Callable[[np.random.Generator], dict[str, Any]]
    make: Callable[[dict[str, Any], np.random.Generator], TreePolicy]
    reference: Callable[..., Scores]
    wrong: tuple[str, ...]
    ordered: bool


def c2t_policy(options: dict[str, Any], random: np.random.Generator) -> C2t:
    """The policy with random weights, large enough that confidences lie on both sides of beta."""
    torch.manual_seed(int(random.integers(1 << 30)))
    net = _classifier.Mlp(3, int(random.choice([2, 12, 48]))).requires_grad_(False)
    net.output.weight.mul_(6)
    policy = C2t(**options)
    policy._learned = _classifier.Classifier(net, policy._learned.facts)
    return policy


RULES = {
    "talon": Rule(
        talon_options,
        lambda options, random: policies.make("talon", **options),
        talon,
        (
            "gates the first layer",
            "gates by the parents' best",
            "drops what is level with the gate",
        ),
        True,
    ),
    "salf": Rule(
        salf_options,
        lambda options, random: policies.make("salf", **options),
        salf,
        ("weighs what cannot enter", "stops by the best alone", "leaves the last batch out"),
        False,
    ),
    "c2t": Rule(
        c2t_options,
        c2t_policy,
        c2t,
        (
            "keeps tokens of probability 0",
            "counts depths from 1",
            "classifies by the last step alone",
        ),
        True,
    ),
    "dynatree": Rule(
        dynatree_options,
        lambda options, random: policies.make("dynatree", **options),
        dynatree,
        (
            "takes the newest first",
            "counts depths from 1",
            "branches by the path's probability",
        ),
        True,
    ),
    "ltd": Rule(
        ltd_options,
        ltd_policy,
        ltd,
        ("parents in the order of creation", "shows all that it knows", "counts the root"),
        False,
    ),
}


class Audit(NamedTuple):
    """differing: drafts whose trees are not the reference's; decided: how many could be compared; kinds: of rows."""

    differing: list[int]
    decided: int
    kinds: Counter[str]


def audited(name: str, seeds: Iterable[int], wrong: str = "") -> Audit:
    rule, differing, compared, kinds = RULES[name], [], 0, Counter[str]()
    for seed in seeds:
        world = World(seed)
        policy = rule.make(rule.options(world.random), world.random)
        try:
            expected = rule.reference(world, policy, wrong)
        except UndecidedError:
            continue
        found = slow.paths(slow.grow(policy, world.draft))
        compared += 1
        kinds += world.kinds
        if found != expected or (rule.ordered and list(found) != list(expected)):
            differing.append(seed)
    return Audit(differing, compared, kinds)


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(PART, DRAFTS, PART)),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_the_policy_is_its_papers_rule(name: str, first: int) -> None:
    audit = audited(name, range(first, first + PART))
    assert audit.differing == []
    assert audit.decided > 0.8 * PART
    assert all(audit.kinds[kind] > PART // 10 for kind in ("ties", "zeros", "certain"))


@pytest.mark.sliced(2)
@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name, rule in RULES.items() for wrong in rule.wrong]
)
def test_a_wrong_reference_differs(name: str, wrong: str) -> None:
    assert audited(name, range(PART), wrong).differing


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("talon", {"budget": 1}),
        ("salf", {"budget": 1}),
        ("eagle", {"budget": 1}),
        ("c2t", {"hard_cap": 1}),
    ],
)
def test_a_budget_of_the_root_alone_drafts_nothing(name: str, options: dict[str, Any]) -> None:
    """As in Algorithm 2 of TALON and of SALF, whose loops end before the first pass."""
    tables = Tables(6, 3)
    draft = ToyDrafter(tables)
    engine = Engine(ToyTarget(tables), draft, policies.make(name, **options))
    answer = engine.generate([1, 2], max_new_tokens=8, temperature=0.0)
    plain = Engine(ToyTarget(tables), None, None).generate(
        [1, 2], max_new_tokens=8, temperature=0.0
    )
    assert answer.token_ids == plain.token_ids
    assert draft.stepped == []
    wider = {key: value + 2 for key, value in options.items()}
    Engine(ToyTarget(tables), draft, policies.make(name, **wider)).generate(
        [1, 2], max_new_tokens=8
    )
    assert draft.stepped
