"""Keyed noise and the draws made with it: each backend against plain Python, and against the softmax."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import chi2

from specengine import ops
from specengine.errors import InputError
from tests.ops.inputs import INF, NAN, any_scores, quick, thorough
from tests.toy import keyed_gumbel

pytestmark = pytest.mark.usefixtures("backend")


def plain_philox(counter, key):
    """Philox4x32-10 in Python integers, written from the paper's definition."""
    counter, key, low = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & low,
            (first >> 32) ^ counter[3] ^ key[1],
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def plain_gumbel_sums(values, seed, position):
    sums = []
    for i, value in enumerate(values):
        counter = (i // 4, position & 0xFFFFFFFF, position >> 32, 0)
        uniform = (plain_philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[i % 4] + 0.5) / 2**32
        value = (
            -INF if math.isnan(value) else min(float(np.float32(value)), float(np.float32(3e38)))
        )
        sums.append(value - math.log(-math.log(uniform)))
    return sums


def noise_of(seed, position, size):
    return torch.from_numpy(keyed_gumbel(np.array([seed], dtype=np.uint64), position, size))[0]


words64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "words"),
        [  # known answers that come with Random123
            ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
            ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
            (
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                [0xA4093822, 0x299F31D0],
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            ),
        ],
    )
    def test_known_answers(self, counter, key, words):
        assert plain_philox(counter, key) == words
        got = ops.philox4x32(tuple(torch.tensor([word]) for word in counter), tuple(key))
        assert [int(word) for word in got] == words


class TestKeyedGumbelArgmax:
    @given(st.lists(any_scores, min_size=1, max_size=70), words64, words64)
    @thorough
    def test_against_plain_python(self, values, seed, position):
        sums = plain_gumbel_sums(values, seed, position)
        if max(sums) == -INF:
            with pytest.raises(InputError, match="none is finite"):
                ops.keyed_gumbel_argmax(torch.tensor(values), seed, position)
        else:
            assert ops.keyed_gumbel_argmax(torch.tensor(values), seed, position) == sums.index(
                max(sums)
            )

    @pytest.mark.parametrize("size", [255, 256, 257, 1023, 5003])
    @pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 40.0, 1e6])
    def test_long_rows(self, size, spread):
        generator = torch.Generator().manual_seed(size)
        for position in range(4):
            values = spread * torch.randn(size, generator=generator)
            values[::5] = -INF
            noise = noise_of(7, position, size)
            assert ops.keyed_gumbel_argmax(values, 7, position) == int(
                (values.double() + noise).argmax()
            )

    def test_the_largest_noise_wins_from_far_below(self):
        """The noise of token 510 is 22.87, the largest there is: no score bounds it at less."""
        seed, position, token, other = 7, 115_434, 510, 10
        noise = noise_of(seed, position, 768)
        assert noise[token] > 22.8
        values = torch.full((768,), -100.0)
        values[256:512] = -3.0
        for best in (14.0, 19.5, 20.5):  # with its noise, of a token in another block
            values[other] = best - float(noise[other])
            assert ops.keyed_gumbel_argmax(values, seed, position) == (
                token if best < 19.8 else other
            )

    def test_seed_and_position_are_taken_modulo_two_to_the_64(self):
        values = torch.zeros(500)
        draw = ops.keyed_gumbel_argmax(values, 5, 9)
        assert ops.keyed_gumbel_argmax(values, 5 - 2**64, 9 + 2**64) == draw
        others = {
            ops.keyed_gumbel_argmax(values, 5 + (1 << 32), 9),
            ops.keyed_gumbel_argmax(values, 5, 9 + (1 << 32)),
        }
        assert draw not in others

    def test_strided_scores(self):
        wide = torch.randn(300, 2, generator=torch.Generator().manual_seed(2))
        assert ops.keyed_gumbel_argmax(wide[:, 1], 1, 1) == ops.keyed_gumbel_argmax(
            wide[:, 1].contiguous(), 1, 1
        )

    def test_infinite_scores(self):
        assert ops.keyed_gumbel_argmax(torch.tensor([0.0, INF, NAN, INF]), 1, 1) == 1
        assert ops.keyed_gumbel_argmax(torch.tensor([-INF, NAN, -9e9, -INF]), 1, 1) == 2

    @pytest.mark.slow
    def test_draws_follow_the_softmax(self):
        values = torch.tensor([2.0, 1.0, 0.0, 1.0, -1.0, -INF, 0.5])
        assert chi_square_p_value(values, values) > 1e-3

    @pytest.mark.slow
    def test_the_check_above_sees_another_temperature(self):
        values = torch.tensor([2.0, 1.0, 0.0, 1.0, -1.0, -INF, 0.5])
        assert chi_square_p_value(values, values / 1.15) < 1e-6

    @pytest.mark.slow
    def test_neighbouring_positions_are_independent(self):
        values = torch.zeros(4)
        draws = [ops.keyed_gumbel_argmax(values, 3, position) for position in range(4001)]
        pairs = np.zeros((4, 4))
        np.add.at(pairs, (draws[:-1], draws[1:]), 1)
        statistic = ((pairs - 250) ** 2 / 250).sum()
        assert chi2.sf(statistic, 15) > 1e-3

    def test_refuses(self):
        with pytest.raises(InputError, match="float32"):
            ops.keyed_gumbel_argmax(torch.zeros(2, dtype=torch.float64), 1, 1)
        with pytest.raises(ValueError, match="none is finite"):
            ops.keyed_gumbel_argmax(torch.zeros(0), 1, 1)


ROWS = {
    "rows": st.integers(0, 5),
    "columns": st.integers(1, 300),
    "coarse": st.booleans(),
    "special": st.booleans(),
    "noise": st.integers(0, 10**6),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
}


def rows_of(rows, columns, coarse, special, noise, dtype):
    """Random logits: with ties, what is not finite, a row of nothing but that."""
    random = np.random.default_rng(noise)
    values = random.normal(0, 3, (rows, columns))
    values = values.round() if coarse else values
    if special:
        places = random.random(values.shape) < 0.3
        values[places] = random.choice([NAN, INF, -INF], int(places.sum()))
        values[:1] = random.choice([NAN, INF, -INF], values[:1].shape)
    return torch.from_numpy(values.astype(np.float32)).to(dtype)


def finite(row):
    return [value if math.isfinite(value) else -INF for value in row.float().tolist()]


def first_best(values):
    return values.index(max(values)) if max(values) > -INF else -1


@given(**ROWS, strided=st.booleans())
@thorough
def test_the_argmax_of_each_row(strided, **shape):
    """What is not finite is never chosen, of ties the first, -1 where there is none."""
    logits = rows_of(**shape)
    given = torch.stack([logits, logits], 2)[..., 0] if strided else logits
    expected = [first_best(finite(row)) for row in logits]
    for chosen in (
        ops.choose_tokens(given),
        ops.choose_tokens(given, torch.arange(len(logits)), None, torch.ones(1)),
    ):
        assert chosen.dtype is torch.int64
        assert chosen.tolist() == expected


@given(**ROWS, seed=words64, positions=st.lists(st.integers(0, 2**63 - 1), min_size=5, max_size=5))
@quick
def test_the_draw_of_each_row(seed, positions, **shape):
    """By its own position, and by all 64 bits of the seed and of the position."""
    logits, temperature = rows_of(**shape), torch.tensor([0.7])
    positions = positions[: len(logits)]
    expected = []
    for row, position in zip(logits, positions, strict=True):
        scores = (torch.tensor(finite(row), dtype=torch.float32) / temperature).tolist()
        expected.append(first_best(plain_gumbel_sums(scores, seed, position)))
    signed = torch.tensor([(seed + 2**63) % 2**64 - 2**63])
    drawn = ops.choose_tokens(
        logits, torch.tensor(positions, dtype=torch.int64), signed, temperature
    )
    assert drawn.dtype is torch.int64
    assert drawn.tolist() == expected


def test_rows_that_are_refused():
    logits, positions, seed, one = (
        torch.zeros(2, 3),
        torch.arange(2),
        torch.tensor([1]),
        torch.ones(1),
    )
    for wrong in (torch.zeros(3), logits.double(), logits[:, :0]):
        with pytest.raises(InputError, match="logits"):
            ops.choose_tokens(wrong)
    for places in (None, positions[:1], positions.int()):
        with pytest.raises(InputError, match="positions"):
            ops.choose_tokens(logits, places, seed, one)
    for key in (one, seed.int(), positions):
        with pytest.raises(InputError, match="seed"):
            ops.choose_tokens(logits, positions, key, one)
    for temperature in (None, one.double(), torch.ones(2)):
        with pytest.raises(InputError, match="temperature"):
            ops.choose_tokens(logits, positions, seed, temperature)


def chi_square_p_value(values, expected_values, draws=4000):
    counts = np.bincount(
        [ops.keyed_gumbel_argmax(values, 11, position) for position in range(draws)],
        minlength=len(values),
    )
    expected = draws * torch.softmax(expected_values.double(), 0).numpy()
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return chi2.sf(statistic, possible.sum() - 1)
