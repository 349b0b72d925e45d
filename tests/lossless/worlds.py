"""Toy worlds whose law is known exactly, and the test of fit that counts are put to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from research.drafting import draft_tree
from specengine.ops.tree import TokenTree
from specengine.records import Seconds
from specengine.request.options import GenerationOptions
from specengine.request.sampling import History, Sampler
from tests.toy import CPU, POLICIES, Tables, ToyDrafter, policy_for

VOCABULARY, LENGTH, ALPHA = 6, 3, 1e-4
PROMPT = (2, 5)
Law = dict[tuple[int, ...], float]


@dataclass
class World:
    """A toy target under a sampler's options, and the verification tree that a policy gives after each context."""

    policy: str
    options: dict[str, Any] = field(default_factory=lambda: {"do_sample": True})
    exact: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.tables = Tables(VOCABULARY, self.seed, concentration=0.8, exact=self.exact)
        self.draft = Tables(
            VOCABULARY, self.seed + 1, concentration=0.5, like=self.tables, share=0.6
        )
        chosen = GenerationOptions.of({"seed": 0, **self.options}, None, len(PROMPT), 1000)
        self.processors = chosen.sampler(len(PROMPT), CPU).processors
        self._cycles: dict[tuple[int, ...], tuple[TokenTree, np.ndarray]] = {}
        self._scores: dict[tuple[int, ...], np.ndarray] = {}

    def scores(self, context: tuple[int, ...]) -> np.ndarray:
        """Return the scores that the target draws from after `context`: processed logits, float32 [vocabulary]."""
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
            rows = [self.scores((*context, *tree.path_tokens(node))) for node in range(len(tree))]
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
    World(
        "random",
        {"do_sample": True, "presence_penalty": 0.6, "frequency_penalty": 0.3},
        exact=0.3,
        seed=50,
    ),
    *(
        World(name, seed=60 + i)
        for i, name in enumerate(POLICIES)
        if name not in {"chain", "eagle", "fixed", "random"}
    ),
]


def identifier(world: World) -> str:
    return f"{world.policy}-{'-'.join(world.options)}"


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
    fold = [
        np.concatenate([[values[:merged].sum()], values[merged:]])
        for values in (observed, expected)
    ]
    return float(stats.chisquare(*fold).pvalue)


def holm_rejects(p_values: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Holm's step-down procedure: which hypotheses fall, at a family-wise error of `alpha`."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values)):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
