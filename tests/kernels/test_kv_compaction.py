"""compact_kv against moving each row by hand, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import kv_compaction as kernel
from specengine_kernels.kv_compaction import compact_kv

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_slab(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Any bit patterns, NaN and denormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).to(DEVICE)


def check(
    slab: Tensor, prefix: int, path: list[int], index: torch.dtype = torch.int32, unused: int = 3
) -> None:
    wanted = slab.clone()
    for place, node in enumerate(path):
        wanted[:, :, :, prefix + place] = slab[:, :, :, prefix + node]
    # what follows the path is not read
    padded = torch.tensor([*path, *[2**30] * unused], dtype=index, device=DEVICE)
    sizes = (
        torch.tensor([value], dtype=torch.int32, device=DEVICE) for value in (len(path), prefix)
    )
    compact_kv(slab, padded, *sizes)
    bits = BITS[slab.element_size()]
    assert torch.equal(slab.view(bits), wanted.view(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [64, 80, 16, 256])
def test_sizes_and_types(size: int, dtype: torch.dtype) -> None:
    check(random_slab(2, 2, 3, 24, size, dtype=dtype), 7, [0, 2, 3, 9, 12])


@pytest.mark.parametrize(
    "path",
    [
        [0],
        [0, 1, 2, 3],
        [0, 1, 2, 9],
        [0, 5],
        [0, *range(2, 40)],  # each row goes where the next one is read
        [0, *range(1, 64, 3)],
        [*range(15), 16],
        [*range(16), 20],  # one more than is moved at a time
        [*range(16), 17, 18],
        [0, *range(30, 63)],
        [],
        [1, 2],
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", [0, 5])
def test_paths(path: list[int], prefix: int) -> None:
    check(random_slab(1, 2, 2, 70, 16), prefix, path)
    check(random_slab(1, 2, 1, 70, 16), prefix, path, index=torch.int64)


def test_last_slot_of_the_slab() -> None:
    check(random_slab(1, 2, 1, 20, 16), 10, [0, 9], unused=0)


def test_slab_of_a_larger_buffer() -> None:
    buffer = random_slab(3, 2, 4, 30, 40)
    before = buffer.clone()
    view = buffer[1:, :, 1:3, 4:25, 8:24]
    wanted = kernel.reference(view, *(torch.tensor(value) for value in ([0, 3, 7], [3], [6])))
    compact_kv(
        view,
        *(torch.tensor(value, dtype=torch.int32, device=DEVICE) for value in ([0, 3, 7], [3], [6])),
    )
    assert torch.equal(view.view(torch.int32), wanted.view(torch.int32))
    before[1:, :, 1:3, 4:25, 8:24] = wanted
    assert torch.equal(buffer.view(torch.int32), before.view(torch.int32))


@examples(40)
@given(data=st.data())
def test_any_path(data: st.DataObject) -> None:
    path = [0, *sorted(data.draw(st.sets(st.integers(1, 60), max_size=40)))]
    heads, prefix = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 4))
    check(random_slab(1, 2, heads, 66, 8, seed=len(path)), prefix, path)


def test_wrong_arguments_are_refused() -> None:
    slab, path = random_slab(1, 2, 1, 8, 16), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    for wrong in (slab[0], slab[:, :1], slab.transpose(3, 4)):
        with pytest.raises(ValueError, match=r"slab: .* is needed"):
            compact_kv(wrong, path, one, one)
    for wrong in (path.float(), path[None]):
        with pytest.raises(ValueError, match=r"path: .* is needed"):
            compact_kv(slab, wrong, one, one)


@pytest.mark.gpu
def test_capture_and_repeat() -> None:
    slab = random_slab(32, 2, 8, 600, 128, dtype=torch.bfloat16)
    path = torch.tensor([0, *range(2, 50)], dtype=torch.int32, device="cuda")
    count, prefix = (torch.tensor([value], dtype=torch.int32, device="cuda") for value in (49, 500))
    compact_kv(slab.clone(), path, count, prefix)
    graph = torch.cuda.CUDAGraph()
    captured = slab.clone()
    with torch.cuda.graph(graph):
        compact_kv(captured, path, count, prefix)
    for _ in range(50):  # a race between the threads of a program would show sooner or later
        captured.copy_(slab)
        graph.replay()
        wanted = kernel.reference(slab, path, count, prefix)
        assert torch.equal(captured.view(torch.int16), wanted.view(torch.int16))
