"""Random trees, scores and rows of logits, with ties and special values, and the settings to draw them with."""

import math

import numpy as np
import torch
from hypothesis import strategies as st

from specengine import ops
from tests.examples import examples

NAN, INF = math.nan, math.inf
LARGEST = np.float32(ops.LARGEST)

quick = examples(60, derandomize=True)
thorough = examples(150, derandomize=True)
many = examples(500, derandomize=True)
some = examples(100, derandomize=True)


HUGE = 2**62  # of what must not be read


def count(value, device="cpu"):
    return torch.tensor([value], dtype=torch.int32, device=device)


def real(value, device="cpu"):
    return torch.tensor([value], dtype=torch.float32, device=device)


def poisoned(values, size):
    """Filled up with NaN, or the huge."""
    return torch.cat(
        [
            values,
            values.new_full((size, *values.shape[1:]), NAN if values.is_floating_point() else HUGE),
        ]
    )


def alive(parts):
    """The fields of a padded result up to its count, as lists."""
    return [part[: int(parts.live)].tolist() for part in parts if part is not parts.live]


# ---------------------------------------------------------------------------------------------------- trees


@st.composite
def trees(draw, max_size=140):
    size = draw(st.one_of(st.integers(1, 12), st.integers(60, 70), st.integers(1, max_size)))
    kind = draw(st.sampled_from(["random", "chain", "star"]))
    if kind == "chain":
        return list(range(-1, size - 1))
    if kind == "star":
        return [-1] + [0] * (size - 1)
    seed = draw(st.integers(0, 10**6))
    return random_parents(size, seed)


def random_parents(size, seed):
    generator = np.random.default_rng(seed)
    return [-1] + [int(generator.integers(0, node)) for node in range(1, size)]


def ancestors_or_self(parents, node):
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


# ---------------------------------------------------------------------------------------------------- values

# Values that tie often, and the special ones.
scores = st.one_of(
    st.sampled_from([0.0, -0.0, -1.0, -1.5, -2.0, -INF]), st.floats(-30, 0, width=32)
)
any_scores = st.one_of(
    scores, st.sampled_from([NAN, INF, -INF, 3.4e38, -3.4e38]), st.floats(-60, 60, width=32)
)

COLUMNS = st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 300, 512, 1000]))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SPECIAL = np.array([NAN, INF, -INF, 3.4e38, -3.4e38, 0.0, -0.0], np.float32)


@st.composite
def matrices(draw, rows, columns=COLUMNS, highest=INF):
    """Random rows: fine or coarse (which ties), of several spreads, with or without special values."""
    width = draw(columns)
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = generator.normal(0, draw(st.sampled_from([0.0, 0.5, 4.0, 30.0])), (draw(rows), width))
    if draw(st.booleans()):
        values = values.round()
    values = values.astype(np.float32)
    if draw(st.booleans()):
        places = generator.random(values.shape) < draw(st.sampled_from([0.05, 0.5, 1.0]))
        values[places] = generator.choice(SPECIAL, int(places.sum()))
    return torch.from_numpy(np.fmin(values, np.float32(highest))).to(draw(DTYPES))


@st.composite
def path_scores(draw, rows):
    """Rows' path log-probabilities: with ties, paddings of -inf, and what must not occur but may."""
    value = st.one_of(st.sampled_from([0.0, -0.0, -1.0, -2.0, -INF]), st.floats(-40, 0, width=32))
    if draw(st.integers(0, 9)) == 0:
        value = st.one_of(value, st.sampled_from([NAN, INF, 3.4e38]))
    return torch.tensor(draw(st.lists(value, min_size=rows, max_size=rows)), dtype=torch.float32)


def defined(tensor):
    values = tensor.float().numpy()
    return np.minimum(np.where(np.isnan(values), np.float32(-INF), values), LARGEST)


def exact_log_probs(logits, normalized):
    """float64 [rows, V]."""
    values = defined(logits).astype(np.float64)
    if normalized:
        return values
    peaks = values.max(1, initial=-INF, keepdims=True)
    peaks[peaks == -INF] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            values > -INF,
            values - peaks - np.log(np.exp(values - peaks).sum(1, keepdims=True)),
            -INF,
        )
