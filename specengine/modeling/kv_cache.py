"""KVCache: the keys and values of all layers in one slab."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine import ops

GRANULE = 256  # capacities are rounded up to a multiple of this many slots


class KVCache:
    """Keys and values of one sequence: `slab` is [layers, 2, KV heads, capacity, head size].

    Slots below `length` hold the committed tokens in order. Slots from `length` on are scratch: a forward over
    tree nodes writes there and `compact` keeps the rows of the accepted path.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_size: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, 2, heads, _rounded(capacity), head_size)
        self.slab = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.slab.shape[3]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots; committed slots are kept, scratch is dropped."""
        if capacity <= self.capacity:
            return
        layers, two, heads, _, head_size = self.slab.shape
        slab = self.slab.new_empty(layers, two, heads, _rounded(capacity), head_size)
        slab[:, :, :, : self.length] = self.slab[:, :, :, : self.length]
        self.slab = slab

    def crop(self, length: int) -> None:
        """Forget everything from slot `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length: got {length}, accepted 0 to {self.length}")
        self.length = length

    def compact(self, path: Sequence[int]) -> None:
        """Commit scratch rows in place: row `length + path[j]` becomes slot `length + j`.

        path: ascending offsets into the scratch, starting with 0.
        """
        if path[-1] >= len(path):  # else all of them stand right
            numbers = torch.tensor([[len(path)], [self.length]], dtype=torch.int32, device=self.slab.device)
            ops.compact_kv(self.slab, torch.tensor(path, device=self.slab.device), *numbers)
        self.length += len(path)


def _rounded(capacity: int) -> int:
    return -(-capacity // GRANULE) * GRANULE
