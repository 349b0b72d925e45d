"""Captured cycles on the pretended CUDA device, where each op that a kernel serves runs it: Triton's in its
interpreter, SALF's queue compiled for the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import tree_attention

from specengine.ops import _registry, cuda_graphs as graphs
from tests.cuda import host
from tests.graphs.replays import DRAFTS, POLICIES, Way, check

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
WAYS: list[Way] = [{"max_new_tokens": 6}, {"max_new_tokens": 3, "temperature": 1.0, "seed": 5}]
SLOTS = 64


@pytest.fixture(scope="module", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register a few kernels of both backends: an interpreted program's cost hardly depends on its work."""
    with pytest.MonkeyPatch.context() as patch:
        host.take(host.built(tmp_path_factory.mktemp("host")), patch)
        patch.setattr(graphs, "MIN_SLOTS", SLOTS)
        patch.setattr(graphs, "WARM_UPS", 1)
        patch.setattr(
            tree_attention, "tiles_for", lambda *_: tree_attention.Tiles(128, SLOTS, 4, 2)
        )
        patch.setattr(tree_attention, "MULTIPROCESSORS", 1)  # the prefix is not cut
        _registry._load.cache_clear()
        yield
    _registry._load.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_replays_equal_the_eager_engine(policy: str) -> None:
    """Each policy meets the draft that it does not meet under the ops' meanings."""
    captured = check(
        DRAFTS[1 - POLICIES.index(policy) % 2], policy, WAYS, backends="triton,cuda", least=True
    )
    assert {"finish greedy", "finish sampled"} <= set(captured.captures)


@pytest.mark.slow
def test_where_the_host_walks() -> None:
    ways: list[Way] = [{"max_new_tokens": 3, "temperature": 1.0, "seed": 5, "top_k": 9}]
    check("eagle3", "talon", ways, backends="triton,cuda", least=True)
