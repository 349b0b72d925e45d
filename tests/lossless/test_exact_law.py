"""Exact identities: no sample, every sequence of choices."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from specengine.cycle import walk
from tests.lossless.worlds import LENGTH, PROMPT, VOCABULARY, WORLDS, World, identifier
from tests.toy import Tables


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
        p = Tables(
            VOCABULARY, seed, concentration=float(random.choice([0.05, 0.5, 2.0])), exact=0.6
        ).probabilities([0])
        children = random.permutation(VOCABULARY)[: random.integers(VOCABULARY + 1)]
        assert np.abs(eagle_rule_law(p, children) - p).max() < 1e-12


@pytest.mark.sliced(9)
@pytest.mark.parametrize("world", WORLDS, ids=identifier)
def test_every_sequence_of_choices_comes_out_unchanged(world: World) -> None:
    """All 6^3 sequences of the target's choices, so the law of what is emitted is the law of what is chosen, exactly.

    And the walk accepts the longest prefix of the choices that the tree holds: no rule could accept more.
    """
    for choices in itertools.product(range(VOCABULARY), repeat=LENGTH):
        context = PROMPT
        while (done := len(context) - len(PROMPT)) < LENGTH:
            tree, _ = world.cycle(context)
            coming = [*choices[done:], *[0] * len(tree)]
            depths = tree.depths.tolist()
            path, tokens = walk(tree, lambda node: coming[depths[node]], lambda token: False)  # noqa: B023
            held = {tuple(tree.path_tokens(node)) for node in range(len(tree))}
            longest = max(length for length in range(len(tree)) if tuple(coming[:length]) in held)
            assert (len(path) - 1, tokens) == (longest, coming[: longest + 1])
            context = (*context, *tokens)
        assert context[len(PROMPT) :][:LENGTH] == choices
