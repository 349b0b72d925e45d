"""Ways to move the kept rows of a cache together; results are the moved slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.kernels.cases import Compaction
from bench.kernels.inputs import Slab
from bench.kernels.way import Way, kernel


def triton_compaction(_: Compaction, slab: Slab) -> Callable[[], Any]:
    module = kernel("kv_compaction")

    def call() -> Tensor:
        module.compact_kv(*slab)
        return slab.slab

    return call


def layers_compaction(case: Compaction, slab: Slab) -> Callable[[], Any]:
    """Compact by index_select and copy_ of each layer's keys and values: the operations of EAGLE's cache update."""
    moved = slab.path.long() + case.prefix

    def call() -> Tensor:
        for cache in slab.slab.flatten(0, 1):
            cache[:, case.prefix : case.prefix + case.kept].copy_(cache.index_select(1, moved))
        return slab.slab

    return call


def slab_compaction(case: Compaction, slab: Slab) -> Callable[[], Any]:
    """Compact by one gather of the whole slab, then one copy."""
    moved = slab.path.long() + case.prefix

    def call() -> Tensor:
        slab.slab[:, :, :, case.prefix : case.prefix + case.kept] = slab.slab.index_select(3, moved)
        return slab.slab

    return call


def moved_slots(case: Compaction, slab: Tensor) -> Tensor:
    return slab[:, :, :, case.prefix : case.prefix + case.kept]


WAYS = [
    Way("compaction", "specengine", triton_compaction, moved_slots, "triton"),
    Way("compaction", "torch, each layer", layers_compaction, moved_slots),
    Way("compaction", "torch, each layer, eager", layers_compaction, moved_slots, captured=False),
    Way("compaction", "torch, whole slab", slab_compaction, moved_slots),
]  # fmt: skip
