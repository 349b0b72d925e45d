"""strict_cached_attention: a row is computed as it would be alone, whatever stands beside it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specengine import ops
from specengine.errors import InputError
from specengine.ops import Paths
from tests import toy
from tests.examples import examples
from tests.ops.inputs import INF, NAN, count

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
UNREAD = 2**31 - 1  # of what no row sees
cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "shape": st.tuples(
            st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.sampled_from([4, 20, 64, 96])
        ),
        "nodes": st.one_of(st.integers(1, 9), st.integers(1, 70)),
        "prefix": st.sampled_from([0, 1, 5, 63, 64, 65, 130]),
        "padding": st.integers(0, 3),
        "behind": st.sampled_from([0, 1, 70]),
        "tree": st.booleans(),
        "dtype": st.sampled_from(DTYPES),
    }
)


class Case(NamedTuple):
    """Inputs of the op; NaN stands in the slots behind the nodes, and UNREAD behind each path."""

    query: Tensor
    key: Tensor
    value: Tensor
    paths: Paths
    prefix: Tensor
    live: Tensor

    def run(self, **changes: Tensor | Paths) -> Tensor:
        return ops.strict_cached_attention(**(self._asdict() | changes), scale=0.3)

    def slots(self, row: int) -> list[int]:
        """Return the slots that a row sees."""
        before = int(self.prefix)
        own = (
            self.paths.nodes[row, : int(self.paths.counts[row])].tolist()
            if row < int(self.live)
            else None
        )
        return [] if own is None else [*range(before), *(before + node for node in own)]

    def mask(self) -> Tensor:
        mask = torch.zeros(self.query.shape[1], self.key.shape[1], dtype=torch.bool)
        for row in range(len(mask)):
            mask[row, self.slots(row)] = True
        return mask


def drawn(
    *,
    seed: int = 0,
    shape: tuple[int, int, int] = (2, 2, 20),
    nodes: int = 5,
    prefix: int = 9,
    padding: int = 0,
    behind: int = 0,
    tree: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Rows of a tree, or rows of which each sees any of the nodes; at times none."""
    (heads, groups, size), rows = shape, nodes + padding
    draw = torch.Generator().manual_seed(seed)
    words = torch.zeros(rows, -(-rows // 64), dtype=torch.int64)
    if tree:
        ancestors = toy.random_tree(seed, nodes, 500).ancestors
        words[:nodes, : ancestors.shape[1]] = ancestors  # padding may need more words than the tree
    else:
        chosen = torch.rand(nodes, nodes, generator=draw) < torch.rand(nodes, 1, generator=draw)
        for row, node in chosen.nonzero().tolist():
            words[row, node // 64] |= torch.tensor(1) << node % 64
    paths = ops.order_paths(words)
    paths.nodes[torch.arange(paths.nodes.shape[1]) >= paths.counts[:, None]] = UNREAD
    paths.nodes[nodes:], paths.counts[nodes:] = UNREAD, UNREAD  # padding
    query = torch.randn(heads * groups, rows, size, generator=draw).to(dtype)
    keys, values = torch.randn(2, heads, prefix + rows + behind, size, generator=draw).to(dtype)
    keys[:, prefix + nodes :], values[:, prefix + nodes :] = NAN, NAN
    return Case(query, keys, values, paths, count(prefix), count(nodes))


def attention(case: Case) -> Tensor:
    """Compute attention in float64, under a mask."""
    query, key, value = (
        part.double() for part in (case.query, case.key.nan_to_num(), case.value.nan_to_num())
    )
    scores = (
        torch.einsum("hgnd,hld->hgnl", query.view(key.shape[0], -1, *query.shape[1:]), key) * 0.3
    )
    weights = scores.masked_fill(~case.mask(), -INF).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hgnl,hld->hgnd", weights, value).reshape(query.shape)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200))
def test_paths_are_the_ancestors_in_their_order(seed: int, nodes: int) -> None:
    tree = toy.random_tree(seed, nodes, 500)
    found = ops.order_paths(tree.ancestors)
    for node in range(nodes):
        path = [node]
        while path[-1]:
            path.append(int(tree.parents[path[-1]]))
        assert found.nodes[node, : int(found.counts[node])].tolist() == path[::-1]


@pytest.mark.usefixtures("backend")
@examples(150)
@given(drawing=cases, cut=st.floats(0, 1), room=st.sampled_from([0, 1, 99]))
def test_a_row_is_what_it_would_be_alone(drawing: dict, cut: float, room: int) -> None:
    """What it sees in a cache of another size, some of it committed and some a path, by itself or before padding."""
    case = drawn(**drawing)
    out, rows = case.run(), case.query.shape[1]
    for row in range(rows) if rows < 10 else (0, rows // 2, int(case.live) - 1):
        slots = case.slots(row)
        if not slots:
            assert not out[:, row].any()
            continue
        rest = case.key.new_full((case.key.shape[0], room, case.key.shape[2]), NAN)
        key, value = (torch.cat([cache[:, slots], rest], 1) for cache in (case.key, case.value))
        for padding, prefix in ((0, round(cut * len(slots))), (rows - 1, len(slots) - 1)):
            own = len(slots) - prefix
            nodes = torch.full((1 + padding, max(own, 64)), UNREAD, dtype=torch.int32)
            nodes[0, :own] = torch.arange(own)
            paths = Paths(nodes, torch.tensor([own, *[UNREAD] * padding], dtype=torch.int32))
            query = torch.cat([case.query[:, row : row + 1], case.query[:, :padding]], 1)
            alone = Case(query, key, value, paths, count(prefix), count(1)).run()
            assert torch.equal(alone[:, 0], out[:, row])


@pytest.mark.usefixtures("backend")
@examples(200)
@given(drawing=cases)
def test_it_is_attention(drawing: dict) -> None:
    case = drawn(**drawing)
    found, expected = case.run(), attention(case)
    assert found.dtype is case.query.dtype
    assert found.shape == case.query.shape
    assert not found[:, int(case.live) :].any()
    limit = TOLERANCE[found.dtype] * max(1.0, float(expected.abs().max()))
    assert float((found.double() - expected).abs().max()) <= limit


def test_the_limit_sees_one_wrong_slot(backend: str) -> None:
    case = drawn(nodes=9, prefix=60, shape=(1, 2, 64))
    wrong = case.paths.nodes.clone()
    wrong[8, 0] = 1 if wrong[8, 1] != 1 else 7
    found = case.run(paths=Paths(wrong, case.paths.counts))
    assert float((found.double() - attention(case)).abs().max()) > 1e-3


@examples(100)
@given(drawing=cases)
def test_it_gives_what_it_means(drawing: dict) -> None:
    case = drawn(**drawing)
    meant, exact = ops.by_meaning(case.run), attention(case)
    limit = TOLERANCE[meant.dtype] * max(1.0, float(exact.abs().max()))
    for found in (
        case.run(),
        meant,
    ):  # each against float64: their own sums stand in different orders
        assert found.dtype is meant.dtype
        assert float((found.double() - exact).abs().max()) <= limit


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "any nodes"])
@pytest.mark.parametrize("prefix", [0, 61, 70])
def test_what_a_row_does_not_see_cannot_reach_it(backend: str, prefix: int, tree: bool) -> None:
    case = drawn(seed=3, nodes=12, prefix=prefix, padding=2, behind=3, tree=tree, shape=(2, 2, 64))
    clean, mask = case.run(), case.mask()
    assert clean.isfinite().all()
    for slot in range(prefix, case.key.shape[1]):
        key, value = case.key.clone(), case.value.clone()
        key[:, slot], value[:, slot] = NAN, INF
        found, unseen = case.run(key=key, value=value), ~mask[:, slot]
        assert torch.equal(found[:, unseen], clean[:, unseen])
        assert not found[:, ~unseen].isfinite().any()


def test_a_row_that_sees_nothing_gives_zero(backend: str) -> None:
    case = drawn(nodes=3, prefix=0, padding=1)
    counts = case.paths.counts * torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    found = case.run(paths=Paths(case.paths.nodes, counts))
    assert not found[:, [1, 3]].any()
    assert torch.equal(found[:, [0, 2]], case.run()[:, [0, 2]])
    assert found[:, [0, 2]].any()
    assert not case.run(live=count(0)).any()
    assert not drawn(nodes=3, prefix=9).run(live=count(0)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(backend: str, dtype: torch.dtype) -> None:
    case = drawn(seed=4, shape=(3, 2, 20), behind=2, dtype=dtype)
    slots, expected = case.key.shape[1], case.run()
    # layers behind keys and values: another stride of heads
    slab = torch.full((2, 5, 3, 40, 20), NAN, dtype=dtype)
    slab[0, 2, :, :slots], slab[1, 2, :, :slots] = case.key, case.value
    for key, value in (
        (slab[0, 2], slab[1, 2]),  # a cache of more slots
        (slab[0, 2, :, :slots], slab[1, 2, :, :slots]),
        (case.key, slab[1, 2, :, :slots]),
        (case.key, case.value.transpose(1, 2).contiguous().transpose(1, 2)),  # strided channels
    ):
        assert torch.equal(case.run(key=key, value=value), expected)
    turned = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    nodes, counts = (
        torch.stack([part, torch.full_like(part, UNREAD)], -1)[..., 0] for part in case.paths
    )
    assert torch.equal(case.run(query=turned, paths=Paths(nodes, counts)), expected)


def test_wrong_inputs() -> None:
    case = drawn(nodes=3, prefix=5, shape=(2, 1, 4))
    nodes, counts = case.paths
    for wrong, message in (
        ({"key": case.key[:, 1:]}, r"^(query|key|value)\b"),
        ({"value": case.value[:, 1:]}, r"^(query|key|value)\b"),
        ({"key": case.key.double()}, r"^(query|key|value)\b"),
        ({"query": case.query.double()}, r"^(query|key|value)\b"),
        ({"query": torch.cat([case.query, case.query])[:3]}, r"^(query|key|value)\b"),
        ({"paths": Paths(nodes.long(), counts)}, r"^(nodes|counts): got"),
        ({"paths": Paths(nodes, counts.long())}, r"^(nodes|counts): got"),
        ({"paths": Paths(nodes[1:], counts)}, r"^(nodes|counts): got"),
        ({"paths": Paths(nodes, counts[1:])}, r"^(nodes|counts): got"),
        ({"paths": Paths(nodes[:, 0], counts)}, r"^(nodes|counts): got"),
        ({"live": case.live.long()}, r"^(prefix|live): got"),
        ({"prefix": torch.zeros(2, dtype=torch.int32)}, r"^(prefix|live): got"),
    ):
        with pytest.raises(InputError, match=message):
            case.run(**wrong)
    for words in (torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(InputError, match=r"^words: got"):
            ops.order_paths(words)
