"""Lossless, shown: exact identities, chi-square tests with power checks, and equality with plain decoding."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from specengine import ops, policies
from specengine.cycle import Seconds
from specengine.drafting import draft_tree
from specengine.engine import Engine
from specengine.options import GenerationOptions
from specengine.sampling import History, Sampler
from specengine.tree import TokenTree
from specengine.verification import walk
from tests.toy import (
    CPU,
    POLICIES,
    LetterTokenizer,
    RecordingStreamer,
    Tables,
    ToyDrafter,
    ToyTarget,
    keyed_gumbel,
    policy_for,
)

VOCABULARY, LENGTH, ALPHA = 6, 3, 1e-4
PROMPT = (2, 5)
RUNS = 60_000  # for each world; above 2e5 together
Law = dict[tuple[int, ...], float]

# ---------------------------------------------------------------------------------------------------- toy worlds


@dataclass
class World:
    """A toy target under a sampler's options, and the verification tree that a policy gives after each context."""

    policy: str
    options: dict[str, Any] = field(default_factory=lambda: {"do_sample": True})
    exact: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.tables = Tables(VOCABULARY, self.seed, concentration=0.8, exact=self.exact)
        self.draft = Tables(VOCABULARY, self.seed + 1, concentration=0.5, like=self.tables, share=0.6)
        chosen = GenerationOptions.of({"seed": 0, **self.options}, None, len(PROMPT), 1000)
        self.processors = chosen.sampler(len(PROMPT), CPU).processors
        self._cycles: dict[tuple[int, ...], tuple[TokenTree, np.ndarray]] = {}
        self._scores: dict[tuple[int, ...], np.ndarray] = {}

    def scores(self, context: tuple[int, ...]) -> np.ndarray:
        """What the target draws from after `context`: its logits through all processors, float32 [vocabulary]."""
        if context not in self._scores:
            seen: list[Tensor] = []
            spy = Sampler([*self.processors, lambda ids, rows: seen.append(rows) or rows], seed=0)
            spy.choose(self.tables.logits(context), History(context, len(context)))
            self._scores[context] = seen[0][0].numpy()
        return self._scores[context]

    def probabilities(self, context: tuple[int, ...]) -> np.ndarray:
        scores = self.scores(context).astype(np.float64)
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    def cycle(self, context: tuple[int, ...]) -> tuple[TokenTree, np.ndarray]:
        """The tree after `context`, and the scores of its nodes, [nodes, vocabulary]."""
        if context not in self._cycles:
            draft = ToyDrafter(self.draft)
            draft.begin(list(context[:-1]))
            policy = policy_for(self.policy, hash(context) % 1000)
            tree = draft_tree(context[-1], draft, policy, Seconds(), CPU).tree
            rows = [self.scores((*context, *tree.path_tokens(node))) for node in range(tree.size)]
            self._cycles[context] = tree, np.stack(rows)
        return self._cycles[context]

    def law(self) -> Law:
        """The probability of each sequence of LENGTH tokens after the prompt."""
        law: Law = {(): 1.0}
        for _ in range(LENGTH):
            law = {
                (*tokens, token): mass * float(p)
                for tokens, mass in law.items()
                for token, p in enumerate(self.probabilities((*PROMPT, *tokens)))
            }
        return law


WORLDS = [
    World("chain"),
    World("eagle", exact=0.5, seed=10),
    World("fixed", {"temperature": 0.7, "top_p": 0.9}, seed=20),
    World("random", {"temperature": 1.4, "top_k": 4}, seed=30),
    World("eagle", {"do_sample": True, "repetition_penalty": 1.4, "min_p": 0.05}, seed=40),
    World("random", {"do_sample": True, "presence_penalty": 0.6, "frequency_penalty": 0.3}, exact=0.3, seed=50),
    *(World(name, seed=60 + i) for i, name in enumerate(POLICIES) if name not in {"chain", "eagle", "fixed", "random"}),
]


def identifier(world: World) -> str:
    return f"{world.policy}-{'-'.join(world.options)}"


def simulate(world: World, runs: int, first_seed: int) -> tuple[dict[tuple[int, ...], int], list[int]]:
    """How often each sequence of LENGTH tokens came out, and the accepted draft tokens of each run's first cycle.

    Runs `verification.walk` on the world's trees with the noise of ops.keyed_gumbel_argmax. Runs that stand at the
    same context with the same choices at all nodes share one walk.
    """
    seeds = np.arange(first_seed, first_seed + runs, dtype=np.uint64)
    counts: dict[tuple[int, ...], int] = {}
    accepted: list[int] = []
    at: dict[tuple[int, ...], np.ndarray] = {PROMPT: np.arange(runs)}
    while at:
        context, members = at.popitem()
        if len(context) >= len(PROMPT) + LENGTH:
            tokens = context[len(PROMPT) : len(PROMPT) + LENGTH]
            counts[tokens] = counts.get(tokens, 0) + len(members)
            continue
        tree, scores = world.cycle(context)
        depths = tree.depths.numpy()
        noise = [keyed_gumbel(seeds[members], len(context) + depth, VOCABULARY) for depth in range(depths.max() + 1)]
        choices = np.stack([(scores[node] + noise[depth]).argmax(1) for node, depth in enumerate(depths)], axis=1)
        for row, group in _groups(choices, members):
            path, tokens = walk(tree, row.__getitem__, lambda token: False)
            if context == PROMPT:
                accepted += [len(path) - 1] * len(group)
            context_then = (*context, *tokens)
            at[context_then] = np.concatenate([at.get(context_then, group[:0]), group])
    return counts, accepted


def _groups(choices: np.ndarray, members: np.ndarray) -> Iterator[tuple[list[int], np.ndarray]]:
    rows, group_of = np.unique(choices, axis=0, return_inverse=True)
    order = np.argsort(group_of.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(group_of.reshape(-1)))
    for row, group in zip(rows, np.split(members[order], ends[:-1]), strict=True):
        yield row.tolist(), group


# ---------------------------------------------------------------------------------------------------- tests of fit


def p_value(counts: dict[tuple[int, ...], int], law: Law) -> float:
    """Pearson's chi-square of counts against a law; cells that expect fewer than 5 are merged."""
    total = sum(counts.values())
    cells = sorted(law, key=law.__getitem__)
    expected = np.array([law[cell] * total for cell in cells])
    observed = np.array([counts.get(cell, 0) for cell in cells], dtype=float)
    if observed[expected == 0].any():
        return 0.0
    merged = int(np.searchsorted(np.cumsum(expected), 5.0)) + 1
    merged = max(merged, int(np.searchsorted(expected, 5.0)))
    fold = [np.concatenate([[values[:merged].sum()], values[merged:]]) for values in (observed, expected)]
    return float(stats.chisquare(*fold).pvalue)


def holm_rejects(p_values: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Holm's step-down procedure: which hypotheses fall, at a family-wise error of `alpha`."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values)):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def test_the_noise_of_the_simulation_is_that_of_the_engine() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        seed, position = int(random.integers(1 << 62)), int(random.integers(1 << 40))
        scores = torch.from_numpy(random.normal(size=VOCABULARY)).float()
        scores[random.integers(VOCABULARY)] = -math.inf
        drawn = int(
            (scores.double().numpy() + keyed_gumbel(np.array([seed], np.uint64), position, VOCABULARY)).argmax()
        )
        assert ops.keyed_gumbel_argmax(scores, seed, position) == drawn


@pytest.mark.parametrize("world", WORLDS, ids=identifier)
def test_the_scores_of_the_simulation_are_those_of_the_engine(world: World) -> None:
    random = np.random.default_rng(0)
    for seed, length in enumerate([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300]):
        context = (*PROMPT, *random.integers(VOCABULARY, size=length).tolist())
        history = History(context, len(context))
        noise = keyed_gumbel(np.array([seed], np.uint64), len(context), VOCABULARY)
        drawn = int((world.scores(context) + noise).argmax())
        assert Sampler(world.processors, seed).choose(world.tables.logits(context), history) == drawn


def test_joint_law_and_accepted_length() -> None:
    """The first tokens have the target's joint law; the mean accepted length is the sum of path probabilities."""
    values = []
    for number, world in enumerate(WORLDS):
        counts, accepted = simulate(world, RUNS, first_seed=number << 40)
        values.append(p_value(counts, world.law()))

        tree, _ = world.cycle(PROMPT)
        paths = [tree.path_tokens(node) for node in range(1, tree.size)]
        law_of_path = [
            math.prod(world.probabilities((*PROMPT, *path[:i]))[token] for i, token in enumerate(path))
            for path in paths
        ]
        deviation = np.mean(accepted) - sum(law_of_path)
        assert abs(deviation) <= 4 * np.std(accepted) / math.sqrt(len(accepted)) + 1e-9, identifier(world)
    assert not any(holm_rejects(values)), dict(zip(map(identifier, WORLDS), values, strict=True))


# ---------------------------------------------------------------------------------------------------- other rules

Rule = Callable[[np.random.Generator, TokenTree, list[np.ndarray]], list[int]]


def children_of(tree: TokenTree) -> list[list[tuple[int, int]]]:
    """For each node its children as (node, token), in creation order."""
    children: list[list[tuple[int, int]]] = [[] for _ in range(tree.size)]
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if node:
            children[parent].append((node, token))
    return children


def eagle_rule(random: np.random.Generator, tree: TokenTree, rows: list[np.ndarray]) -> list[int]:
    """What EAGLE does: a child is accepted with p of what the rejected ones left; lossless."""
    children, tokens, node = children_of(tree), [], 0
    while True:
        left, moved = rows[node].copy(), False
        for child, token in children[node]:
            if random.random() < left[token]:
                tokens.append(token)
                node, moved = child, True
                break
            left[token] = 0.0
            left /= left.sum()
        if not moved:
            return [*tokens, int(random.choice(len(left), p=left))]


def biased_rule(random: np.random.Generator, tree: TokenTree, rows: list[np.ndarray]) -> list[int]:
    """The common mistake: min(1, p / q) with the draft's q, for children that were not drawn from q."""
    children, tokens, node = children_of(tree), [], 0
    edges = tree.log_probs.exp().tolist()
    while True:
        left, moved = rows[node].copy(), False
        for child, token in children[node]:
            if random.random() < left[token] / edges[child]:
                tokens.append(token)
                node, moved = child, True
                break
            left[token] = max(0.0, left[token] - edges[child])
            left /= left.sum()
        if not moved:
            return [*tokens, int(random.choice(len(left), p=left))]


def typical_rule(random: np.random.Generator, tree: TokenTree, rows: list[np.ndarray]) -> list[int]:
    """Medusa's typical acceptance (epsilon 0.09, delta 0.3): whatever is likely enough passes."""
    children, tokens, node = children_of(tree), [], 0
    while True:
        row = rows[node]
        entropy = -sum(p * math.log(p) for p in row if p > 0)
        passing = [
            (child, token) for child, token in children[node] if row[token] > min(0.09, 0.3 * math.exp(-entropy))
        ]
        if not passing:
            return [*tokens, int(random.choice(len(row), p=row))]
        node, token = passing[0]
        tokens.append(token)


def simulate_rule(rule: Rule, world: World, runs: int) -> dict[tuple[int, ...], int]:
    random = np.random.default_rng(7)
    counts: dict[tuple[int, ...], int] = {}
    rows: dict[tuple[int, ...], list[np.ndarray]] = {}
    for _ in range(runs):
        context = PROMPT
        while len(context) < len(PROMPT) + LENGTH:
            tree, _ = world.cycle(context)
            if context not in rows:
                paths = [tree.path_tokens(node) for node in range(tree.size)]
                rows[context] = [world.probabilities((*context, *path)) for path in paths]
            context = (*context, *rule(random, tree, rows[context]))
        tokens = context[len(PROMPT) : len(PROMPT) + LENGTH]
        counts[tokens] = counts.get(tokens, 0) + 1
    return counts


@pytest.mark.parametrize("world", WORLDS[:4], ids=identifier)
def test_the_same_test_rejects_wrong_rules_and_passes_a_right_one(world: World) -> None:
    values = [
        p_value(simulate_rule(rule, world, 6000), world.law()) for rule in (eagle_rule, biased_rule, typical_rule)
    ]
    assert holm_rejects(values) == [False, True, True], values


def test_holm_is_no_stricter_than_bonferroni_and_no_laxer_than_alpha() -> None:
    assert holm_rejects([0.02, 0.03, 0.5], alpha=0.05) == [False, False, False]
    assert holm_rejects([0.01, 0.025, 0.04], alpha=0.05) == [True, True, True]
    assert holm_rejects([0.04, 0.01, 0.06], alpha=0.05) == [False, True, False]


# ---------------------------------------------------------------------------------------------------- exact


def eagle_rule_law(p: np.ndarray, children: Sequence[int]) -> np.ndarray:
    """The law of the token that EAGLE's rule emits, by enumerating its acceptances."""
    law, alive, left = np.zeros_like(p), 1.0, p.copy()
    for token in children:
        accepted = left[token]
        law[token] += alive * accepted
        alive *= 1.0 - accepted
        left[token] = 0.0
        if left.sum() > 0:
            left /= left.sum()
    return law + alive * left


def test_eagles_rule_is_exact() -> None:
    """A reference fact: with children chosen by rank, q = 1 is the right proposal probability."""
    random = np.random.default_rng(3)
    for seed in range(300):
        p = Tables(VOCABULARY, seed, concentration=float(random.choice([0.05, 0.5, 2.0])), exact=0.6).probabilities([0])
        children = random.permutation(VOCABULARY)[: random.integers(VOCABULARY + 1)]
        assert np.abs(eagle_rule_law(p, children) - p).max() < 1e-12


@pytest.mark.parametrize("world", WORLDS, ids=identifier)
def test_every_sequence_of_choices_comes_out_unchanged(world: World) -> None:
    """All 6^3 sequences of the target's choices, so the law of what is emitted is the law of what is chosen, exactly.

    And the walk accepts the longest prefix of the choices that the tree holds: no rule could accept more.
    """
    for choices in itertools.product(range(VOCABULARY), repeat=LENGTH):
        context = PROMPT
        while (done := len(context) - len(PROMPT)) < LENGTH:
            tree, _ = world.cycle(context)
            coming = [*choices[done:], *[0] * tree.size]
            depths = tree.depths.tolist()
            path, tokens = walk(tree, lambda node: coming[depths[node]], lambda token: False)  # noqa: B023
            held = {tuple(tree.path_tokens(node)) for node in range(tree.size)}
            longest = max(length for length in range(tree.size) if tuple(coming[:length]) in held)
            assert (len(path) - 1, tokens) == (longest, coming[: longest + 1])
            context = (*context, *tokens)
        assert context[len(PROMPT) :][:LENGTH] == choices


# ---------------------------------------------------------------------------------------------------- equality

worlds = st.fixed_dictionaries(
    {
        "vocabulary": st.sampled_from([2, 6, 17]),
        "concentration": st.sampled_from([0.05, 0.5, 2.0]),
        "exact": st.sampled_from([0.0, 0.5]),
        "share": st.sampled_from([0.0, 0.6, 0.95, 1.0]),
        "seed": st.integers(0, 10_000),
    }
)
sampling = st.sampled_from(
    [
        {"do_sample": True},
        {"temperature": 0.6, "top_p": 0.8},
        {"temperature": 1.7, "top_k": 3},
        {"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.3},
        {"do_sample": True, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.2, "typical_p": 0.9},
    ]
)


def engines(world: dict[str, Any], policy: str, draft: str = "toy") -> tuple[Engine, Engine]:
    """A speculative engine and a plain one over the same toy target."""
    vocabulary, seed = world["vocabulary"], world["seed"]
    shape = {"concentration": world["concentration"], "exact": world["exact"]}
    tables = Tables(vocabulary, seed, **shape)
    like = Tables(vocabulary, seed + 1, like=tables, share=world["share"], **shape)
    columns = np.random.default_rng(seed).permutation(vocabulary)[: max(1, vocabulary - 2)].tolist()
    drafter = {
        "toy": ToyDrafter(like),
        "normalized": ToyDrafter(like, normalized=True),
        "columns": ToyDrafter(like, columns=columns),
    }[draft]
    speculative = Engine(ToyTarget(tables), drafter, policy_for(policy, seed), LetterTokenizer())
    return speculative, Engine(ToyTarget(tables), None, None, LetterTokenizer())


def prompt_of(world: dict[str, Any]) -> list[int]:
    return np.random.default_rng(world["seed"]).integers(0, world["vocabulary"], 3).tolist()


def by_hand(target: ToyTarget, prompt: list[int], options: dict[str, Any], count: int) -> list[int]:
    """Plain decoding without the engine: one choice after another."""
    sampler = GenerationOptions.of(dict(options), None, len(prompt), 1000).sampler(len(prompt), CPU)
    history = History(prompt, len(prompt) + count)
    for _ in range(count):
        token = sampler.choose(target.tables.logits(history.ids[0].tolist()), history)
        assert token is not None
        history.append(token)
    return history.ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("draft", ["toy", "normalized", "columns"])
@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=8)
@given(world=worlds, options=sampling, noise=st.integers(0, 2**64 - 1))
def test_sampled_output_equals_plain_sampling(
    policy: str, draft: str, world: dict[str, Any], options: dict[str, Any], noise: int
) -> None:
    """The main regression test: the same seed gives the same tokens, whatever tree was drafted."""
    speculative, plain = engines(world, policy, draft)
    prompt, options = prompt_of(world), {**options, "seed": noise}
    expected = by_hand(plain.target, prompt, options, 14)
    for engine in (speculative, plain):
        result = engine.generate(prompt, max_new_tokens=14, **options)
        assert result.token_ids == expected
        assert engine.target.tokens == [*prompt, *expected[:-1]]
    assert speculative.drafter.tokens == [*prompt, *expected[:-1]]


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=12)
@given(world=worlds, penalty=st.sampled_from([None, 1.5]))
def test_greedy_output_equals_plain_greedy(policy: str, world: dict[str, Any], penalty: float | None) -> None:
    speculative, plain = engines(world, policy)
    prompt, options = prompt_of(world), {"repetition_penalty": penalty}
    expected = by_hand(plain.target, prompt, options, 24)
    for engine in (speculative, plain):
        assert engine.generate(prompt, max_new_tokens=24, **options).token_ids == expected


def test_a_perfect_draft_is_accepted_whole_and_a_hopeless_one_not_at_all() -> None:
    tables = Tables(6, 0)
    for wrong, steps in ((False, 4), (True, 20)):
        source = Tables(6, 0)
        if wrong:
            source.logits = lambda context: -tables.logits(context)  # type: ignore[method-assign]
        engine = Engine(ToyTarget(tables), ToyDrafter(source), policies.make("chain", length=4))
        result = engine.generate([1], max_new_tokens=20)
        assert result.stats.num_spec_steps == steps
        assert result.stats.mean_acceptance_length == 20 / steps


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 5}], ids=["greedy", "sampled"])
def test_a_budget_of_one_is_plain_decoding(options: dict[str, Any]) -> None:
    world = {"vocabulary": 6, "concentration": 0.5, "exact": 0.0, "share": 0.6, "seed": 1}
    speculative, plain = engines(world, "eagle")
    speculative.policy = policies.make("eagle", budget=1)
    result = speculative.generate([0, 1], max_new_tokens=12, **options)
    assert result.token_ids == plain.generate([0, 1], max_new_tokens=12, **options).token_ids
    assert speculative.target.sizes == plain.target.sizes == [1] * 12
    assert result.stats.num_draft_tokens == 0


# ---------------------------------------------------------------------------------------------------- where it ends


class StopAt:
    """A StoppingCriteria that ends at a total length and notes the lengths it was asked at."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        self.asked.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


def cut_by_hand(tokens: list[int], stop: dict[str, Any], prompt: list[int]) -> tuple[list[int], str]:
    """What is left of an endless answer under the stop rules, and the reason, one token at a time."""
    letters = LetterTokenizer()
    for count in range(1, len(tokens) + 1):
        kept = tokens[:count]
        text = letters.decode(kept)
        if kept[-1] in stop.get("eos_token_id", []) or any(string in text for string in stop.get("stop_strings", [])):
            return kept, "stop"
        if len(prompt) + count >= stop.get("criteria", 10**9):
            return kept, "criteria"
        if count >= stop["max_new_tokens"]:
            return kept, "length"
    raise AssertionError("max_new_tokens is always met")


stops = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 16)},
    optional={
        "eos_token_id": st.lists(st.integers(0, 5), min_size=0, max_size=2),
        "stop_strings": st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=2),
        "criteria": st.integers(1, 18),
    },
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), stop=stops, sampled=st.booleans())
def test_nothing_after_the_end_is_returned_streamed_cached_or_counted(
    policy: str, seed: int, stop: dict[str, Any], sampled: bool
) -> None:
    world = {"vocabulary": 6, "concentration": 0.3, "exact": 0.0, "share": 0.95, "seed": seed}
    speculative, plain = engines(world, policy)
    prompt = prompt_of(world)
    how = {"do_sample": True, "seed": seed} if sampled else {}
    expected, reason = cut_by_hand(by_hand(plain.target, prompt, how, 16), stop, prompt)
    for engine in (speculative, plain):
        streamer, criterion = RecordingStreamer(), StopAt(stop.get("criteria", 10**9))
        options = {name: value for name, value in stop.items() if name != "criteria"}
        stream = engine.stream(prompt, **options, **how, streamer=streamer, stopping_criteria=[criterion])
        pieces = list(stream)
        result = stream.result
        assert result is not None
        assert (result.token_ids, result.finish_reason) == (expected, reason)
        text = LetterTokenizer().decode(expected)
        assert result.text == "".join(piece.text for piece in pieces) == text
        assert [token for piece in pieces for token in piece.cycle.tokens] == expected
        assert streamer.puts[0] == prompt
        assert [token for tokens in streamer.puts[1:] for token in tokens] == expected
        assert streamer.ended == 1
        lengths = range(len(prompt) + 1, len(prompt) + len(expected) + 1)
        stopped_before = reason == "stop"
        assert criterion.asked == list(lengths)[: len(expected) - stopped_before]
        assert engine.target.tokens == [*prompt, *expected[:-1]]
        assert result.stats.num_generated_tokens == result.stats.num_emitted_in_steps == len(expected)
        assert all(cycle.accepted <= len(cycle.tokens) for _, cycle in pieces)
    assert speculative.drafter.tokens == plain.target.tokens


def test_a_stop_string_in_the_middle_of_a_token_cuts_the_text_there() -> None:
    class Syllables(LetterTokenizer):
        def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
            return "".join(("ka", "to", "mi")[token] for token in tokens)

    tables = Tables(3, 2)
    engine = Engine(ToyTarget(tables), ToyDrafter(tables), policies.make("chain", length=6), Syllables())
    whole = engine.generate([0], max_new_tokens=12).text
    stop = whole[4:7]  # ends inside the fourth syllable
    stream = engine.stream([0], max_new_tokens=12, stop_strings=stop)
    pieces = [piece.text for piece in stream]
    cut = whole[: whole.index(stop) + 3]
    assert stream.result is not None
    assert "".join(pieces) == stream.result.text == cut
    assert len(stream.result.token_ids) == -(-len(cut) // 2)
