"""beam_observation against laying out a beam place by place, best_action against float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.errors import InputError
from tests.ops.inputs import HUGE, INF, NAN, count, poisoned, some, thorough

pytestmark = pytest.mark.usefixtures("backend", "one_thread")

LOWEST = -1e4


@st.composite
def beams(draw):
    """Width, complete expansions, and scores and depths of the nodes, the root first; levels may be short or end."""
    width, expansions = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    full = draw(st.booleans())
    scores, depths = [0.0], [0]
    for depth in range(1, expansions + 2):
        most = width if depth == 1 else min(width, depths.count(depth - 1)) * width
        size = most if full else int(random.integers(0, most + 1))
        scores += random.choice([-INF, -3e4, -9999.0, -20.0, -7.5, -0.0, 0.0], size).tolist()
        depths += [depth] * size
    return width, expansions, np.array(scores, np.float32), depths


def laid_out(width, expansions, scores, depths, pad):
    """Return every place of the beam, level by level."""
    lowest, places = pad if pad < 0 else LOWEST, []
    for depth in range(1, expansions + 2):
        level = [
            max(float(score), lowest)
            for score, own in zip(scores, depths, strict=True)
            if own == depth
        ]
        places += level + [pad] * ((width if depth == 1 else width**2) - len(level))
    return places


def window_of(width, last, room, pad, repeats):
    return ops.Window(width, last, room, pad, repeats, (1000.0, 10.0))


@given(
    beams(),
    st.booleans(),
    st.sampled_from([-20.0, -3.0, 0.0]),
    st.integers(0, 3),
    st.integers(0, 60),
    st.integers(1, 10**6),
    st.integers(0, 9),
)
@thorough
def test_a_beam_is_observed_place_by_place(beam, last, pad, repeats, room, context, padding):
    """Of the last level alone, or of all: vacant places, and those beyond the beam, hold the pad."""
    width, expansions, scores, depths = beam
    places = laid_out(*beam, pad)
    if last:
        places = places[-(width**2) if expansions else -width :]
    expected = (places + [pad] * room)[:room]
    facts = [np.float32(context / 1000), np.float32(expansions / 10)]
    seen = ops.beam_observation(
        poisoned(torch.from_numpy(scores), padding),
        poisoned(torch.tensor(depths), padding),
        count(len(scores)),
        count(expansions),
        torch.tensor([context]),
        window_of(width, last, room, pad, repeats),
    )
    assert seen.dtype is torch.float32
    assert seen.tolist() == [*expected, *[facts[0]] * repeats, *[facts[1]] * repeats]


@given(st.integers(1, 5), st.integers(0, 3), st.sampled_from([-20.0, 0.0]))
@some
def test_the_root_alone_is_an_empty_beam(width, expansions, pad):
    given = torch.zeros(9), torch.full((9,), HUGE), count(1), count(expansions), torch.tensor([5])
    given[1][0] = 0
    for last in (False, True):
        seen = ops.beam_observation(*given, window_of(width, last, 12, pad, 1))
        assert seen[:12].tolist() == [pad] * 12


def test_a_level_that_is_not_full_leaves_its_last_places_vacant():
    scores, depths = (
        torch.tensor([0.0, -1.0, -2.0, -3.0, -9.0, NAN]),
        torch.tensor([0, 1, 2, 2, 3, 3]),
    )
    given = scores, depths, count(5), count(2), torch.tensor([250])
    everything = ops.beam_observation(*given, window_of(2, False, 10, -8.0, 1)).tolist()
    assert everything == pytest.approx([-1, -8, -2, -3, -8, -8, -8, -8, -8, -8, 0.25, 0.2])
    assert ops.beam_observation(*given, window_of(2, True, 4, -9.5, 0)).tolist() == [
        -9,
        -9.5,
        -9.5,
        -9.5,
    ]


def test_strided_beams() -> None:
    wide, depths = (
        torch.tensor([[0.0, NAN], [-1.0, NAN], [-2.0, NAN]]),
        torch.tensor([[0, 9], [1, 9], [1, 9]]),
    )
    given = wide[:, 0], depths[:, 0], count(3), count(0), torch.tensor([5])
    assert ops.beam_observation(*given, window_of(2, False, 2, -9.0, 0)).tolist() == [-1, -2]


def test_a_context_beyond_float32_is_divided_first():
    given = torch.zeros(1), torch.zeros(1, dtype=torch.int64), count(1), count(0)
    seen = ops.beam_observation(*given, torch.tensor([2**53 - 1]), window_of(1, False, 0, -1.0, 1))
    assert float(seen[0]) == float(np.float32((2**53 - 1) / 1000))


SCORES, DEPTHS, CONTEXT = (
    torch.tensor([0.0, -1.0, -2.0]),
    torch.tensor([0, 1, 1]),
    torch.tensor([7]),
)
GIVEN = {
    "scores": SCORES,
    "depths": DEPTHS,
    "live": count(3),
    "expansions": count(0),
    "context": CONTEXT,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": SCORES.double()}, "^(scores|depths): got"),
        ({"depths": DEPTHS[1:]}, "^(scores|depths): got"),
        ({"depths": DEPTHS.int()}, "^(scores|depths): got"),
        ({"live": count(3).long()}, "^(live|expansions|context): got"),
        ({"expansions": torch.zeros(2, dtype=torch.int32)}, "^(live|expansions|context): got"),
        ({"context": count(7)}, "^(live|expansions|context): got"),
        ({"context": CONTEXT[:0]}, "^(live|expansions|context): got"),
        ({"window": window_of(2, False, 4, 1.0, 1)}, "0 or less"),
    ],
)
def test_wrong_observations_are_refused(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.beam_observation(**{"window": window_of(2, False, 4, -1.0, 1), **GIVEN, **change})


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.sampled_from(["relu", "tanh"]),
    st.integers(0, 10**6),
)
@thorough
def test_the_best_action_is_that_of_float64(sizes, activation, seed):
    random = torch.Generator().manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [
            torch.randn(outputs, inputs, generator=random),
            torch.randn(outputs, generator=random),
        ]
    observation = torch.randn(2 * sizes[0], generator=random)[::2] * 5
    values = observation.double()
    for place in range(0, len(layers), 2):
        if place:
            values = values.tanh() if activation == "tanh" else values.relu()
        values = layers[place].double() @ values + layers[place + 1].double()
    found = ops.best_action(observation, layers, activation)
    assert (found.dtype, found.shape) == (torch.int64, (1,))
    assert float(values[found]) >= float(values.max()) - 1e-4 * (1 + float(values.abs().max()))


def test_the_first_of_equal_outputs_is_taken() -> None:
    layers = [torch.zeros(3, 2), torch.tensor([1.0, 2.0, 2.0])]
    assert ops.best_action(torch.zeros(2), layers, "relu").tolist() == [1]


def test_wrong_networks_are_refused() -> None:
    layers = [torch.zeros(3, 2), torch.zeros(3)]
    with pytest.raises(InputError, match="activation: got 'gelu', accepted relu, tanh"):
        ops.best_action(torch.zeros(2), layers, "gelu")
    for wrong in (torch.zeros(3), torch.zeros(2).double(), torch.zeros(1, 2)):
        with pytest.raises(InputError, match=r"^observation: got"):
            ops.best_action(wrong, layers, "relu")
