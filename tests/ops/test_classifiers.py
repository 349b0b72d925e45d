"""Networks of one hidden layer: every backend against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specengine import ops
from specengine.errors import InputError
from specengine.policies._classifier import Mlp, c2t_features, disco_features
from tests.examples import examples
from tests.ops.inputs import count

pytestmark = pytest.mark.usefixtures("backend", "one_thread")


def network(seed: int, inputs: int, hidden: int) -> Mlp:
    torch.manual_seed(seed)
    return Mlp(inputs, hidden).requires_grad_(False)


def exact(net: Mlp, features: Tensor) -> Tensor:
    weights = [part.double() for part in net.parts]
    return (
        (features.double() @ weights[0].T + weights[1]).relu() @ weights[2][0] + weights[3][0]
    ).sigmoid()


@examples(50)
@given(
    seed=st.integers(0, 999),
    shape=st.lists(st.integers(0, 5), max_size=2),
    inputs=st.integers(1, 13),
    hidden=st.integers(1, 50),
)
def test_mlp(seed: int, shape: list[int], inputs: int, hidden: int) -> None:
    net, features = network(seed, inputs, hidden), torch.randn(*shape, inputs) * 3
    found = net(features)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact(net, features), rtol=1e-5, atol=1e-6)


@examples(50)
@given(
    seed=st.integers(0, 999),
    rows=st.integers(1, 9),
    children=st.integers(1, 11),
    depth=st.integers(0, 12),
)
def test_classify_paths(seed: int, rows: int, children: int, depth: int) -> None:
    net = network(seed, 3, 48)
    paths = torch.randn(rows, 2 * children)[:, ::2] * 3 - 4  # rows are not dense
    entropies = torch.rand(rows) * 4
    paths[0, 0] = -math.inf
    found = ops.classify_paths(paths, entropies, count(depth), net.parts)
    features = c2t_features(
        paths, entropies[:, None], torch.full_like(paths, depth, dtype=torch.int64), 1
    )
    torch.testing.assert_close(found.double(), exact(net, features), rtol=1e-5, atol=1e-6)


@examples(80)
@given(
    seed=st.integers(0, 999),
    columns=st.integers(1, 400),
    top=st.integers(1, 120),
    depth=st.integers(0, 12),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    normalized=st.booleans(),
)
def test_classify_row(
    seed: int, columns: int, top: int, depth: int, kind: torch.dtype, normalized: bool
) -> None:
    net = network(seed, 12, 128)
    logits = (torch.randn(columns) * 4).to(kind)
    if normalized:
        logits = logits.float().log_softmax(0).to(kind)
    found = ops.classify_row(logits[None], top, count(depth), net.parts, normalized)
    log_probs = logits.double() if normalized else logits.double().log_softmax(0)
    best = log_probs.sort(descending=True).values
    entropy = -(best[:top].exp() * best[:top]).sum()[None]
    features = disco_features(best[:10].exp()[None], entropy, torch.tensor([depth]), 1)[0]
    assert (found.dtype, found.shape) == (torch.float32, (1,))
    assert float(found) == pytest.approx(float(exact(net, features)), abs=2e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_strided_logits(kind: torch.dtype) -> None:
    net, wide = (
        network(0, 12, 128),
        torch.randn(3, 800, generator=torch.Generator().manual_seed(0)).to(kind),
    )
    for view in (wide[1:2, ::2], wide[:1, 5:], wide[::3].T[:1]):
        found = ops.classify_row(view, 50, count(3), net.parts)
        torch.testing.assert_close(
            found, ops.classify_row(view.contiguous(), 50, count(3), net.parts)
        )


@pytest.mark.parametrize("special", [math.nan, -math.inf])
def test_columns_of_nothing_change_nothing(special: float) -> None:
    net, logits = (
        network(0, 12, 128),
        torch.randn(1, 300, generator=torch.Generator().manual_seed(0)),
    )
    padded = torch.full((1, 400), special)
    padded[:, :300] = logits
    found = ops.classify_row(padded, 350, count(3), net.parts)
    torch.testing.assert_close(found, ops.classify_row(logits, 300, count(3), net.parts))


def test_gradients_flow_where_the_network_learns() -> None:
    net, features = Mlp(3, 8), torch.randn(5, 3)
    net(features).sum().backward()
    assert net.hidden.weight.grad is not None
    assert bool(net.hidden.weight.grad.abs().sum() > 0)


def test_other_shapes_and_dtypes_are_refused() -> None:
    net, features = network(0, 3, 8), torch.randn(5, 3)
    for wrong in (features[:, :2], features.double(), features.to(torch.bfloat16)):
        with pytest.raises(InputError, match=r"^(features|hidden weight): got"):
            ops.mlp(wrong, net.parts)
    with pytest.raises(InputError, match=r"^output bias: got"):
        ops.mlp(features, [*net.parts[:3], torch.zeros(2)])
    with pytest.raises(InputError, match=r"^logits: got"):
        ops.classify_row(features.double()[:1], 5, count(1), net.parts)
    for wrong, depth in (
        (features, count(1)),
        (features[:1, :0], count(1)),
        (features[:1], count(1).long()),
    ):
        with pytest.raises(InputError, match=r"^(logits|depth|top|top, columns, inputs): got"):
            ops.classify_row(wrong, 5, depth, net.parts)
    with pytest.raises(InputError, match=r"^(path_log_probs|entropies): got"):
        ops.classify_paths(features, torch.zeros(4), count(1), net.parts)
    for depth in (count(1).long(), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(InputError, match=r"^depth: got"):
            ops.classify_paths(features, torch.zeros(5), depth, net.parts)
