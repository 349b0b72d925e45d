"""strict_attention against float64, row by row, and its bits: in a tree, alone, in caches of other sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import strict_attention as kernel
from specengine_kernels.tree_attention import Tiles

from tests.kernels.test_tree_attention import DTYPES, INTERPRETED, TOLERANCE, ancestors, random_tree

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Spans of two tiles of 16 slots, so that short prefixes have several."""
    if "shipped" not in request.node.name:
        monkeypatch.setattr(kernel, "SPAN", 32)
        monkeypatch.setattr(kernel, "tiles_for", lambda *_: Tiles(16, 16, 4, 2))


class Case:
    """The rows of trees, of which every node is a row; NaN stands wherever nothing may be read."""

    def __init__(
        self,
        trees: list[list[int]],
        prefix: list[int],
        *,
        heads: int = 2,
        groups: int = 2,
        size: int = 32,
        live: list[int] | None = None,
        rows: int | None = None,
        spare: int = 5,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        nodes = max(map(len, trees))
        rows = nodes if rows is None else rows
        self.paths = [[sorted(path) for path in ancestors(tree)] for tree in trees]
        self.prefix, self.live = prefix, [len(tree) for tree in trees] if live is None else live
        slots = max(prefix) + nodes + spare
        shapes = (len(trees), rows, heads * groups, size), *[(len(trees), heads, slots, size)] * 2
        self.q, self.k, self.v = (
            torch.randn(*shape, generator=draw).to(device, dtype) for shape in shapes
        )
        for number, (tree, length) in enumerate(zip(trees, prefix, strict=True)):
            self.k[number, :, length + len(tree) :], self.v[number, :, length + len(tree) :] = (
                math.nan,
                math.nan,
            )
            self.q[number, self.live[number] :] = math.nan
        longest = max(len(path) for paths in self.paths for path in paths)
        self.nodes = torch.full(
            (len(trees), rows, longest + 1), 10**6, dtype=torch.int32, device=device
        )
        self.counts = torch.full((len(trees), rows), -(10**6), dtype=torch.int32, device=device)
        for number, paths in enumerate(self.paths):
            for row, path in enumerate(paths[: self.live[number]]):
                self.nodes[number, row, : len(path)] = torch.tensor(path)
                self.counts[number, row] = len(path)
        self.lengths = [
            torch.tensor(n, dtype=torch.int32, device=device) for n in (prefix, self.live)
        ]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v, self.nodes, self.counts, *self.lengths)

    def run(self, dirt: float = math.nan, **options: object) -> Tensor:
        """With output and workspace poisoned before."""
        out = torch.full_like(self.q, math.nan)
        workspace = kernel.workspace_for(self.q, self.k.shape[2]).fill_(dirt)
        upcast = INTERPRETED and self.q.dtype is torch.bfloat16
        assert (
            kernel.strict_attention(
                *self.inputs, out=out, workspace=workspace, upcast=upcast, **options
            )
            is out
        )
        return out

    def expected(self, scale: float | None = None) -> Tensor:
        q, k, v = (tensor.double().cpu() for tensor in (self.q, self.k, self.v))
        out, groups = torch.zeros_like(q), q.shape[2] // k.shape[1]
        for number, paths in enumerate(self.paths):
            length = self.prefix[number]
            for row, path in enumerate(paths[: self.live[number]]):
                slots = [*range(length), *(length + node for node in path)]
                for head in range(q.shape[2]):
                    keys, values = (
                        k[number, head // groups, slots],
                        v[number, head // groups, slots],
                    )
                    scores = (
                        keys
                        @ q[number, row, head]
                        * (q.shape[3] ** -0.5 if scale is None else scale)
                    )
                    out[number, row, head] = scores.softmax(0) @ values
        return out

    def check(self) -> None:
        out, wanted = self.run().double().cpu(), self.expected()
        assert out.isfinite().all()
        slack = 3.4e-3 if INTERPRETED and self.q.dtype is torch.bfloat16 else 0.0
        assert (out - wanted).norm() <= (TOLERANCE[self.q.dtype] + slack) * wanted.norm()

    def alone(self, row: int) -> Tensor:
        """The row decoded plainly: its path committed before it, in a cache and a forward of other sizes."""
        path, length = self.paths[0][row], self.prefix[0]
        before = length + len(path) - 1
        slots = [*range(length), *(length + node for node in path)]
        plain = Case([[-1]], [before], heads=self.k.shape[1], groups=self.q.shape[2] // self.k.shape[1],
                     size=self.q.shape[3], rows=self.q.shape[1], spare=41, dtype=self.q.dtype,
                     device=self.q.device)  # fmt: skip
        plain.q[0, 0] = self.q[0, row]
        plain.k[0, :, : before + 1], plain.v[0, :, : before + 1] = (
            self.k[0, :, slots],
            self.v[0, :, slots],
        )
        return plain.run()[0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_tree(dtype: torch.dtype, device: torch.device) -> None:
    case = Case([random_tree(9, 1)], [77], dtype=dtype, device=device)
    case.check()
    for row in range(9):
        assert torch.equal(case.run()[0, row], case.alone(row))


@pytest.mark.sliced(3)
@pytest.mark.parametrize(
    ("groups", "size"), [(1, 64), (3, 80), (4, 128), (7, 16), (8, 96), (2, 256), (20, 16)]
)
def test_groups_and_head_sizes(groups: int, size: int, device: torch.device) -> None:
    """20 heads of a group do not fit into a tile of 16 rows."""
    case = Case([random_tree(5, 2)], [40], heads=1, groups=groups, size=size, device=device)
    case.check()
    assert torch.equal(case.run()[0, 4], case.alone(4))


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [0, 15, 16, 31, 32, 33, 64, 100])
def test_prefixes_around_tiles_and_spans(prefix: int, device: torch.device) -> None:
    """The chain reaches over two more spans."""
    case = Case([[-1, *range(39), 0, 0, 5]], [prefix], size=16, heads=1, groups=1, device=device)
    case.check()
    out = case.run()
    for row in (0, 15, 16, 31, 32, 39, 42):
        assert torch.equal(out[0, row], case.alone(row)), row


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 64, 65, 130])
def test_word_boundaries_and_stars(nodes: int, device: torch.device) -> None:
    star = [-1] + [0] * (nodes - 1)
    for tree in (random_tree(nodes, nodes), star):
        Case([tree], [21], heads=1, groups=1, size=16, dtype=torch.float16, device=device).check()


def test_padding_batches_and_full_caches(device: torch.device) -> None:
    trees = [random_tree(6, seed) for seed in range(3)]
    Case(
        trees, [0, 50, 17], live=[6, 2, 0], rows=9, groups=3, size=16, spare=0, device=device
    ).check()


def test_strided_inputs_and_outputs(device: torch.device) -> None:
    case = Case([random_tree(6, 6)], [35], size=16, device=device)
    wanted = case.run()
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    case.k = case.k.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*case.v.shape[:3], 48), math.nan, device=device)
    wide[..., 16:32] = case.v
    case.v = wide[..., 16:32]
    assert torch.equal(case.run(), wanted)


def test_scales_and_large_scores(device: torch.device) -> None:
    case = Case([random_tree(6, 7)], [35], size=16, device=device)
    assert torch.allclose(case.run(scale=1.7).double().cpu(), case.expected(1.7), atol=1e-5)
    case.q *= 300.0
    assert torch.allclose(case.run().double().cpu(), case.expected(), atol=2e-3)


def test_dirty_scratch_and_other_nodes_change_nothing(device: torch.device) -> None:
    case = Case([random_tree(20, 10)], [77], heads=1, size=16, device=device)
    whole = case.run()
    assert torch.equal(case.run(1e30), whole)
    case.k[:, :, 77 + 12 :], case.v[:, :, 77 + 12 :] = 7.0, -7.0  # behind the first twelve
    assert torch.equal(case.run()[:, :12], whole[:, :12])
    assert not torch.equal(case.run(), whole)


def test_reference_agrees(device: torch.device) -> None:
    case = Case(
        [random_tree(70, 3), random_tree(4, 3)], [11, 0], groups=3, size=16, rows=80, device=device
    )
    q, *rest = case.inputs
    live = torch.arange(80, device=device)[:, None, None] < case.lengths[1].view(-1, 1, 1, 1)
    found = kernel.reference(q.double().where(live, 0.0), *rest).cpu()
    assert torch.allclose(found, case.expected(), atol=1e-12)


@pytest.mark.slow
@examples(12)
@given(data=st.data())
def test_any_tree_and_length(data: st.DataObject) -> None:
    nodes, prefix = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 80))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, nodes))]
    shape = {
        "heads": data.draw(st.integers(1, 2)),
        "groups": data.draw(st.integers(1, 3)),
        "size": 16,
    }
    case = Case(
        [parents],
        [prefix],
        **shape,
        device="cpu" if INTERPRETED else "cuda",
        seed=data.draw(st.integers(0, 99)),
    )
    case.check()
    row = data.draw(st.integers(0, nodes - 1))
    assert torch.equal(case.run()[0, row], case.alone(row))


def test_shipped_tiles(device: torch.device) -> None:
    case = Case([random_tree(7, 11)], [530], size=64, heads=1, dtype=torch.float16, device=device)
    case.check()
    assert torch.equal(case.run()[0, 6], case.alone(6))


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    case = Case([[-1, 0]], [3], size=16, device=device)
    names = ("q", "k_cache", "v_cache", "nodes", "counts", "prefix_len", "n_q")
    good = dict(zip(names, case.inputs, strict=True))
    for wrong in (
        {"q": case.q[:, :, :3]},
        {"k_cache": case.k.half()},
        {"nodes": case.nodes.long()},
        {"nodes": case.nodes[:, :1]},
        {"nodes": case.nodes[:, :, :1]},
        {"counts": case.counts[:, :1]},
        {"n_q": case.lengths[1].long()},
        {"scale": 0.0},
    ):
        with pytest.raises(ValueError, match=r"need|got|multiple|contiguous"):
            kernel.strict_attention(**{**good, **wrong})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("groups", "size"), [(4, 128), (3, 64), (7, 128), (8, 80), (2, 256)])
def test_shipped_configurations_on_a_gpu(groups: int, size: int, dtype: torch.dtype) -> None:
    for prefix in (0, 700, 4099):
        case = Case(
            [random_tree(64, prefix)],
            [prefix],
            groups=groups,
            size=size,
            dtype=dtype,
            device="cuda",
        )
        out, wanted = case.run(), kernel.reference(case.q.double(), *case.inputs[1:])
        assert (out.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
        for row in range(0, 64, 7):
            assert torch.equal(out[0, row], case.alone(row))


@pytest.mark.gpu
def test_captured_once_for_every_length_shipped() -> None:
    case = Case(
        [random_tree(64, 12)], [900], groups=4, size=128, dtype=torch.bfloat16, device="cuda"
    )
    case.k.nan_to_num_()
    case.v.nan_to_num_()
    out, workspace = torch.empty_like(case.q), kernel.workspace_for(case.q, case.k.shape[2])
    kernel.strict_attention(*case.inputs, out=out, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.strict_attention(*case.inputs, out=out, workspace=workspace)
    for prefix in (900, 0, 333, 64):
        case.lengths[0].fill_(prefix)
        graph.replay()
        assert torch.equal(out.clone(), kernel.strict_attention(*case.inputs))
