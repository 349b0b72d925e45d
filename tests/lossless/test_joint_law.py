"""The tokens that come out have the target's joint law: many runs of the walk, and a chi-square test."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from specengine import ops
from specengine.cycle import walk
from specengine.request.sampling import History, Sampler
from tests.lossless.worlds import (
    LENGTH,
    PROMPT,
    VOCABULARY,
    WORLDS,
    World,
    holm_rejects,
    identifier,
    p_value,
)
from tests.toy import keyed_gumbel

RUNS = 60_000  # for each world; above 2e5 together


def simulate(
    world: World, runs: int, first_seed: int
) -> tuple[dict[tuple[int, ...], int], list[int]]:
    """Count each sequence of LENGTH tokens, and the accepted draft tokens of each run's first cycle.

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
        noise = [
            keyed_gumbel(seeds[members], len(context) + depth, VOCABULARY)
            for depth in range(depths.max() + 1)
        ]
        choices = np.stack(
            [(scores[node] + noise[depth]).argmax(1) for node, depth in enumerate(depths)], axis=1
        )
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


def test_the_noise_of_the_simulation_is_that_of_the_engine() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        seed, position = int(random.integers(1 << 62)), int(random.integers(1 << 40))
        scores = torch.from_numpy(random.normal(size=VOCABULARY)).float()
        scores[random.integers(VOCABULARY)] = -math.inf
        drawn = int(
            (
                scores.double().numpy()
                + keyed_gumbel(np.array([seed], np.uint64), position, VOCABULARY)
            ).argmax()
        )
        assert ops.keyed_gumbel_argmax(scores, seed, position) == drawn


@pytest.mark.parametrize("world", WORLDS, ids=identifier)
def test_the_scores_of_the_simulation_are_those_of_the_engine(world: World) -> None:
    random = np.random.default_rng(0)
    for seed, length in enumerate(
        [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300]
    ):
        context = (*PROMPT, *random.integers(VOCABULARY, size=length).tolist())
        history = History(context, len(context))
        noise = keyed_gumbel(np.array([seed], np.uint64), len(context), VOCABULARY)
        drawn = int((world.scores(context) + noise).argmax())
        assert (
            Sampler(world.processors, seed).choose(world.tables.logits(context), history) == drawn
        )


@pytest.mark.slow
def test_joint_law_and_accepted_length() -> None:
    """The first tokens have the target's joint law; the mean accepted length is the sum of path probabilities."""
    values = []
    for number, world in enumerate(WORLDS):
        counts, accepted = simulate(world, RUNS, first_seed=number << 40)
        values.append(p_value(counts, world.law()))

        tree, _ = world.cycle(PROMPT)
        paths = [tree.path_tokens(node) for node in range(1, len(tree))]
        law_of_path = [
            math.prod(
                world.probabilities((*PROMPT, *path[:i]))[token] for i, token in enumerate(path)
            )
            for path in paths
        ]
        deviation = np.mean(accepted) - sum(law_of_path)
        assert abs(deviation) <= 4 * np.std(accepted) / math.sqrt(len(accepted)) + 1e-9, identifier(
            world
        )
    assert not any(holm_rejects(values)), dict(zip(map(identifier, WORLDS), values, strict=True))
