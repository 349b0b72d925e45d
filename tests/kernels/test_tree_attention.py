"""tree_attention against a float64 computation, row by row, written apart from the kernel's own reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import tree_attention as kernel
from specengine_kernels.tree_attention import Tiles, tree_attention

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
INTERPRETED = not torch.cuda.is_available()
SMALL = Tiles(16, 16, 4, 2)
# relative Frobenius error against float64 on the same rounded inputs
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.float16, id="float16"),
    # in the interpreter only with `upcast`, and its stores truncate
    pytest.param(torch.bfloat16, id="bfloat16"),
]


def random_tree(nodes: int, seed: int) -> list[int]:
    chooser = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(0, node, (), generator=chooser)) for node in range(1, nodes))]


def ancestors(parents: list[int]) -> list[set[int]]:
    """Return each node's ancestors and itself."""
    found: list[set[int]] = []
    for node, parent in enumerate(parents):
        found.append((found[parent] if parent >= 0 else set()) | {node})
    return found


def pack(visible: list[set[int]], words: int | None = None) -> Tensor:
    """int64 [rows, words] of sets of node ids; Python's integers know no overflow."""
    words = (
        max(1, -(-(max((max(row, default=0) for row in visible), default=0) + 1) // 64))
        if words is None
        else words
    )
    rows = []
    for row in visible:
        bits = sum(1 << node for node in row)
        parts = [(bits >> (64 * word)) & (2**64 - 1) for word in range(words)]
        rows.append([part - 2**64 if part >= 2**63 else part for part in parts])
    return torch.tensor(rows, dtype=torch.int64)


class Case:
    """Inputs of one call, on the device, with NaN wherever nothing may be read."""

    def __init__(
        self,
        visible: list[list[set[int]]],
        prefix: list[int],
        *,
        heads: int = 2,
        groups: int = 2,
        size: int = 32,
        n_q: list[int] | None = None,
        n_tree: list[int] | None = None,
        spare: int = 5,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch, rows = len(visible), len(visible[0])
        self.visible, self.prefix = visible, prefix
        self.n_q = [rows] * batch if n_q is None else n_q
        self.n_tree = (
            [1 + max(itertools.chain([-1], *rows)) for rows in visible]
            if n_tree is None
            else n_tree
        )
        slots = (
            max(length + nodes for length, nodes in zip(prefix, self.n_tree, strict=True)) + spare
        )

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.q, self.k, self.v = (
            normal(batch, rows, heads * groups, size),
            normal(batch, heads, slots, size),
            normal(batch, heads, slots, size),
        )
        for sequence, (length, nodes) in enumerate(zip(prefix, self.n_tree, strict=True)):
            self.k[sequence, :, length + nodes :] = math.nan
            self.v[sequence, :, length + nodes :] = math.nan
        widest = max(1, *(-(-nodes // 64) for nodes in self.n_tree))
        self.words = torch.stack([pack(rows, widest) for rows in visible]).to(device)
        self.lengths = [
            torch.tensor(value, dtype=torch.int32, device=device)
            for value in (prefix, self.n_q, self.n_tree)
        ]

    def run(
        self, splits: int | None = None, tiles: Tiles | None = SMALL, **options: object
    ) -> tuple[Tensor, Tensor]:
        """out, lse, both poisoned before, with a poisoned workspace."""
        out = torch.full_like(self.q, math.nan)
        lse = torch.full(self.q.shape[:3], math.nan, dtype=torch.float32, device=self.q.device)
        workspace = kernel.workspace_for(self.q, splits or kernel.MAX_SPLITS).fill_(math.nan)
        upcast = INTERPRETED and self.q.dtype is torch.bfloat16
        result = tree_attention(
            self.q, self.k, self.v, self.words, *self.lengths,
            out=out, lse=lse, workspace=workspace, splits=splits, tiles=tiles, upcast=upcast, **options,
        )  # fmt: skip
        assert result is out
        return out, lse

    def expected(self, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """float64, one row at a time."""
        q, k, v = (tensor.double().cpu() for tensor in (self.q, self.k, self.v))
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
        groups = q.shape[2] // k.shape[1]
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        for b, row, head in itertools.product(*(range(size) for size in q.shape[:3])):
            if row >= self.n_q[b]:
                continue
            nodes = [node for node in sorted(self.visible[b][row]) if node < self.n_tree[b]]
            slots = [*range(self.prefix[b]), *(self.prefix[b] + node for node in nodes)]
            if slots:
                scores = k[b, head // groups, slots] @ q[b, row, head] * scale
                lse[b, row, head] = scores.logsumexp(0)
                out[b, row, head] = scores.softmax(0) @ v[b, head // groups, slots]
        return out, lse

    def check(self, splits: int | None = None, tiles: Tiles | None = SMALL) -> None:
        (out, lse), (wanted, wanted_lse) = self.run(splits, tiles), self.expected()
        out, lse = out.double().cpu(), lse.double().cpu()
        assert out.isfinite().all()
        slack = 3.4e-3 if INTERPRETED and self.q.dtype is torch.bfloat16 else 0.0
        assert (out - wanted).norm() <= (TOLERANCE[self.q.dtype] + slack) * wanted.norm()
        assert torch.equal(lse.isinf(), wanted_lse.isinf())
        seen = wanted_lse.isfinite()
        bits = 1e-5 if self.q.dtype is torch.float32 else 2e-3
        assert ((lse - wanted_lse)[seen].abs() <= bits).all()
        assert (out[~seen] == 0).all()


def case_of_tree(parents: list[int], prefix: int, **options: object) -> Case:
    return Case([ancestors(parents)], [prefix], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_random_tree(dtype: torch.dtype, splits: int, device: torch.device) -> None:
    case_of_tree(random_tree(9, 1), 77, dtype=dtype, device=device).check(splits)


@pytest.mark.parametrize(
    ("groups", "size"), [(1, 64), (3, 80), (4, 128), (7, 16), (8, 96), (2, 256)]
)
def test_groups_and_head_sizes(groups: int, size: int, device: torch.device) -> None:
    for splits in (1, 2):
        case_of_tree(random_tree(5, 2), 40, heads=1, groups=groups, size=size, device=device).check(
            splits
        )


@pytest.mark.parametrize("nodes", [1, 63, 64, 65, 128, 256])
def test_word_boundaries(nodes: int, device: torch.device) -> None:
    parents = random_tree(nodes, nodes)
    case = case_of_tree(parents, 21, heads=1, groups=1, size=16, dtype=torch.float16, device=device)
    case.check(2, Tiles(64, 64, 4, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_caches_that_lie_anywhere(dtype: torch.dtype, splits: int, device: torch.device) -> None:
    """A table finds them, of capacities of their own; the bits are those of caches that are one tensor."""
    trees = [[ancestors(random_tree(5, seed))] for seed in (1, 2, 3)]
    options = {"heads": 3, "size": 48, "dtype": dtype, "device": device}
    case = Case([tree for (tree,) in trees], [70, 3, 40], **options)  # type: ignore[arg-type]
    wanted = case.run(splits)
    slabs = []
    for sequence, capacity in enumerate((128, 16, 64)):
        slab = torch.full((2, 3, capacity, 48), math.nan, dtype=dtype, device=device)
        slots = min(capacity, case.k.shape[2])
        slab[0, :, :slots], slab[1, :, :slots] = (
            cache[sequence, :, :slots] for cache in (case.k, case.v)
        )
        slabs.append(slab)
    first = slabs[0].data_ptr()
    places = [[(slab.data_ptr() - first) // slab.element_size(), slab.stride(1)] for slab in slabs]
    case.k, case.v = (part[None].expand(3, -1, -1, -1) for part in slabs[0])
    table = torch.tensor(places, device=device)
    for found, means in zip(case.run(splits, table=table), wanted, strict=True):
        assert torch.equal(found, means)
    other = case.run(splits, table=table.roll(1, 0))[0]
    assert not torch.equal(other, wanted[0])
    with pytest.raises(ValueError, match=r"table: int64 \[3, 2\]"):
        case.run(splits, table=table[:2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_after_a_tile_of_rows_is_read(
    dtype: torch.dtype, splits: int, device: torch.device
) -> None:
    """Where no row sees a node after itself: the bits are the same, and NaN further on does no harm."""
    options = {"dtype": dtype, "device": device, "size": 16, "groups": 3}
    for count, more in ((40, 0), (33, 7)):  # of rows, and of nodes before them
        parents = random_tree(count + more, count)
        rows = ancestors(parents)[more:]
        case = Case([rows], [21], n_tree=[count + more], **options)  # type: ignore[arg-type]
        wanted = case.run(splits)
        assert all(map(torch.equal, case.run(splits, causal=True), wanted))
        first = SMALL.rows // 3  # that are in the first tile
        case.v[:, :, 21 + more + first + SMALL.slots :] = math.nan
        (out, _), (other, _) = (case.run(splits, causal=way) for way in (True, False))
        assert torch.equal(out[:, :first], wanted[0][:, :first])
        assert other[:, :first].isnan().any()


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 47, 48, 49])
def test_prefixes_that_fill_no_tile_one_and_several(prefix: int, device: torch.device) -> None:
    for splits in (1, 2, 4, 7):  # 7: more splits than tiles
        case_of_tree(random_tree(6, 3), prefix, size=16, heads=1, device=device).check(splits)


@pytest.mark.parametrize("shape", ["chain", "star", "root alone"])
def test_shapes_of_trees(shape: str, device: torch.device) -> None:
    parents = {"chain": [-1, *range(69)], "star": [-1] + [0] * 69, "root alone": [-1]}[shape]
    case = case_of_tree(parents, 30, heads=1, groups=1, size=16, dtype=torch.float16, device=device)
    case.check(2, Tiles(64, 64, 4, 2))


def test_single_columns_of_256(device: torch.device) -> None:
    """Each row sees one node only, whichever bit of whichever word that is, at an odd offset to the tiles."""
    rows = [{node} for node in (0, 1, 62, 63, 64, 65, 126, 127, 128, 191, 192, 254, 255)]
    for prefix in (0, 13):
        case = Case([rows], [prefix], n_tree=[256], heads=1, groups=1, size=16, device=device)
        if prefix:
            case.check(1, Tiles(16, 64, 4, 2))
            continue
        out, _ = case.run(1, Tiles(16, 64, 4, 2))
        for row, nodes in enumerate(rows):
            assert torch.equal(out[0, row, 0], case.v[0, 0, next(iter(nodes))])


def test_padding_rows_and_rows_that_see_nothing(device: torch.device) -> None:
    rows: list[set[int]] = [{0}, set(), {0, 2}, set(), {1}, {0}, {2}]
    for prefix, splits in itertools.product((0, 20), (1, 3)):
        case = Case([rows], [prefix], n_q=[5], groups=3, size=16, device=device)
        case.q[:, 5:] = math.nan  # padding is not read either
        case.check(splits)


def test_no_row_and_no_node(device: torch.device) -> None:
    for splits in (1, 2):
        Case([[{0}, {1}]], [9], n_q=[0], size=16, device=device).check(splits)
        Case([[set(), set()]], [0], n_tree=[0], size=16, device=device).check(splits)
        Case([[set(), set()]], [40], n_tree=[0], size=16, device=device).check(splits)


def test_bits_of_nodes_that_do_not_exist_are_ignored(device: torch.device) -> None:
    Case([[{0, 1, 2, 3, 40}, {0, 3}]], [18], n_tree=[3], size=16, spare=60, device=device).check(2)


def test_full_cache(device: torch.device) -> None:
    case_of_tree(random_tree(7, 4), 41, spare=0, size=16, device=device).check(2)


def test_batch_of_different_lengths(device: torch.device) -> None:
    trees = [ancestors(random_tree(6, seed)) for seed in range(3)]
    for splits in (1, 3):
        Case(trees, [0, 50, 17], n_q=[6, 2, 5], n_tree=[6, 3, 5], size=16, device=device).check(
            splits
        )


def test_draft_level_of_few_rows_over_many_nodes(device: torch.device) -> None:
    rows = ancestors(random_tree(70, 5))[66:]
    Case([rows], [33], n_tree=[70], heads=1, size=16, device=device).check(2, Tiles(16, 32, 4, 2))


def test_strided_inputs_and_outputs(device: torch.device) -> None:
    """Queries [Hq, n, D] and caches [S, Hkv, D] as they come out of a projection, and slices of larger buffers."""
    case = case_of_tree(random_tree(6, 6), 35, size=16, device=device)
    wanted = case.expected()[0]
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    case.k = case.k.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*case.v.shape[:3], 48), math.nan, device=device)
    wide[..., 16:32] = case.v
    case.v = wide[..., 16:32]
    words = torch.full((1, 6, 3), -1, dtype=torch.int64, device=device)
    words[..., 1:2] = case.words
    case.words = words[..., 1:2]
    for splits in (1, 2):
        assert torch.allclose(case.run(splits)[0].double().cpu(), wanted, atol=1e-5)


def test_scale(device: torch.device) -> None:
    case = case_of_tree(random_tree(6, 7), 35, size=16, device=device)
    out, lse = case.run(2, scale=1.7)
    wanted, wanted_lse = case.expected(1.7)
    assert torch.allclose(out.double().cpu(), wanted, atol=1e-5)
    assert torch.allclose(lse.double().cpu(), wanted_lse, atol=1e-4)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    case = case_of_tree(random_tree(6, 8), 35, size=16, device=device)
    case.q *= 300.0
    out, _ = case.run(2)
    assert torch.allclose(out.double().cpu(), case.expected()[0], atol=2e-3)


def test_equal_inputs_give_equal_bits_whatever_the_scratch_holds(device: torch.device) -> None:
    case = case_of_tree(random_tree(9, 9), 77, device=device)
    workspace = kernel.workspace_for(case.q, 3)
    results = []
    for dirt in (math.nan, 1e30):
        workspace.fill_(dirt)
        results.append(tree_attention(case.q, case.k, case.v, case.words, *case.lengths, workspace=workspace,
                                      splits=3, tiles=SMALL))  # fmt: skip
    results.append(
        tree_attention(case.q, case.k, case.v, case.words, *case.lengths, splits=3, tiles=SMALL)
    )
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_row_does_not_depend_on_the_tree_around_it(device: torch.device) -> None:
    parents = random_tree(20, 10)
    case = case_of_tree(parents, 77, heads=1, size=16, device=device)
    whole, _ = case.run(3)
    case.k[:, :, 77 + 12 : 77 + 20] = 7.0  # other nodes behind the first twelve
    case.v[:, :, 77 + 12 : 77 + 20] = -7.0
    fewer = tree_attention(case.q[:, :12], case.k, case.v, case.words[:, :12],
                           *(torch.full((1,), size, dtype=torch.int32, device=device) for size in (77, 12, 12)),
                           splits=3, tiles=SMALL)  # fmt: skip
    assert torch.equal(whole[:, :12], fewer)


def test_reference_agrees(device: torch.device) -> None:
    case = Case(
        [[{0}, set(), {0, 70}, {1, 63, 64}]],
        [11],
        n_q=[4],
        n_tree=[71],
        groups=3,
        size=16,
        device=device,
    )
    out, lse = kernel.reference(case.q.double(), case.k, case.v, case.words, *case.lengths)
    wanted, wanted_lse = case.expected()
    assert torch.allclose(out.cpu(), wanted, atol=1e-12)
    assert torch.allclose(lse.cpu(), wanted_lse, atol=1e-12)


@examples(25)
@given(data=st.data())
def test_any_words_lengths_and_cuts(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 6))
    nodes = data.draw(st.integers(1, 80))
    visible = [data.draw(st.sets(st.integers(0, nodes - 1), max_size=6)) for _ in range(rows)]
    case = Case(
        [visible],
        [data.draw(st.integers(0, 70))],
        heads=data.draw(st.integers(1, 2)),
        groups=data.draw(st.integers(1, 3)),
        size=data.draw(st.sampled_from([16, 24])),
        n_q=[data.draw(st.integers(0, rows))],
        n_tree=[nodes],
        device="cpu" if INTERPRETED else "cuda",
        seed=data.draw(st.integers(0, 99)),
    )
    case.check(
        data.draw(st.integers(1, 4)), Tiles(16, data.draw(st.sampled_from([16, 32, 64])), 4, 2)
    )


def test_more_splits_than_are_merged_at_once(device: torch.device) -> None:
    """Some have a tile and some none; what these would have written is NaN."""
    case = case_of_tree(random_tree(6, 3), 16 * 20 + 3, size=16, heads=1, device=device)
    for splits in (15, 16, 17, 33):
        case.check(splits)


@pytest.mark.parametrize(("prefix", "shares"), [(3, 0), (16, 1), (40, 1), (100, 3), (16 * 33, 11)])
def test_splits_follow_the_length(prefix: int, shares: int, device: torch.device) -> None:
    """Of 12, the last has the tree; what has no share, of two tiles or more, gives nothing and is not read."""
    case = case_of_tree(random_tree(6, 3), prefix, size=16, heads=1, device=device)
    workspace = kernel.workspace_for(case.q, 12).fill_(math.nan)
    tree_attention(
        case.q,
        case.k,
        case.v,
        case.words,
        *case.lengths,
        workspace=workspace,
        splits=12,
        tiles=SMALL,
    )
    rows = case.q.numel() // 16
    sums = workspace[12 * rows * 16 :].view(12, rows)
    written = [bool(part.isfinite().any()) for part in sums]
    assert written == [*[True] * shares, *[False] * (11 - shares), True]
    sums[shares:11] = math.nan
    case.check(12)


def test_shipped_tiles_and_splits(device: torch.device) -> None:
    case_of_tree(random_tree(4, 11), 150, size=64, dtype=torch.float16, device=device).check(
        None, None
    )
    assert kernel.splits_for(8, 4096, 64, torch.device("cpu")) == 16  # the tree's with them
    assert kernel.splits_for(16, 4096, 64, torch.device("cpu")) == 9
    assert kernel.splits_for(1, 10**6, 64, torch.device("cpu")) == kernel.MAX_SPLITS
    assert kernel.splits_for(1, 255, 64, torch.device("cpu")) == 1
    assert kernel.splits_for(70, 4096, 64, torch.device("cpu")) == 1
    assert kernel.splits_for(500, 4096, 64, torch.device("cpu")) == 1


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    case = case_of_tree([-1, 0], 3, size=16, device=device)
    good = {"q": case.q, "k_cache": case.k, "v_cache": case.v, "words": case.words}
    lengths = dict(zip(("prefix_len", "n_q", "n_tree"), case.lengths, strict=True))
    for wrong in (
        {"q": case.q[:, :, :3]},
        {"k_cache": case.k.half()},
        {"v_cache": case.v[:, :, 1:]},
        {"words": case.words.int()},
        {"words": case.words[:, :1]},
        {"n_q": case.lengths[1].long()},
        {"scale": 0.0},
        {"q": case.q.transpose(2, 3)},
    ):
        with pytest.raises(ValueError, match=r"need|got|multiple|contiguous"):
            tree_attention(**{**good, **lengths, **wrong})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("nodes", [1, 16, 64, 256])
@pytest.mark.parametrize(("groups", "size"), [(4, 128), (3, 64), (7, 128), (8, 80), (2, 256)])
def test_shipped_configurations_on_a_gpu(
    groups: int, size: int, nodes: int, dtype: torch.dtype
) -> None:
    for prefix in (0, 700, 4099):
        case = case_of_tree(
            random_tree(nodes, prefix), prefix, groups=groups, size=size, dtype=dtype, device="cuda"
        )
        out, _ = case.run(None, None)
        wanted, _ = kernel.reference(case.q.double(), case.k, case.v, case.words, *case.lengths)
        assert (out.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()


@pytest.mark.gpu
def test_captured_once_for_every_length() -> None:
    case = case_of_tree(
        random_tree(64, 12), 900, groups=4, size=128, dtype=torch.bfloat16, device="cuda"
    )
    case.k.nan_to_num_()
    case.v.nan_to_num_()
    out, workspace = torch.empty_like(case.q), kernel.workspace_for(case.q, 8)
    arguments = (case.q, case.k, case.v, case.words, *case.lengths)
    tree_attention(*arguments, out=out, workspace=workspace, splits=8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_attention(*arguments, out=out, workspace=workspace, splits=8)
    for prefix in (900, 0, 333, 64):
        case.lengths[0].fill_(prefix)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, tree_attention(*arguments, splits=8))
