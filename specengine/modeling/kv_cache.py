"""KVCache: the keys and values of all layers in one slab."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine import ops
from specengine.ops import Nodes

GRANULE = 256  # capacities are rounded up to a multiple of this many slots


class KVCache:
    """Keys and values of one sequence: `slab` is [layers, 2, KV heads, capacity, head size].

    Slots below `length` hold the committed tokens in order. Slots from `length` on are scratch: a forward over
    tree nodes writes there and `keep` keeps the rows of the accepted path. `filled`, int32 [1], is the length where
    the cache is.
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
        self.filled = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def length(self) -> int:
        """Waits for a device."""
        return int(self.filled)

    @length.setter
    def length(self, slots: int) -> None:
        self.filled.fill_(slots)

    @property
    def capacity(self) -> int:
        return self.slab.shape[3]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots; committed slots are kept, scratch is dropped."""
        if capacity <= self.capacity:
            return
        layers, two, heads, _, head_size = self.slab.shape
        length, slab = self.length, self.slab.new_empty(layers, two, heads, _rounded(capacity), head_size)
        slab[:, :, :, :length] = self.slab[:, :, :, :length]
        self.slab = slab

    def crop(self, length: int) -> None:
        """Forget everything from slot `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length: got {length}, accepted 0 to {self.length}")
        self.length = length

    def keep(self, path: Nodes) -> None:
        """Commit scratch rows in place: row `length + path[j]` becomes slot `length + j`.

        path: ascending offsets into the scratch, starting with 0.
        """
        ops.compact_kv(self.slab, path.ids, path.live, self.filled)
        self.filled += path.live

    def commit(self, path: Sequence[int]) -> None:
        """As `keep`, of a path that the host knows."""
        if path[-1] >= len(path):
            self.keep(Nodes.of(torch.tensor(path, device=self.slab.device, dtype=torch.int64)))
        else:  # all of them stand right
            self.filled += len(path)


def _rounded(capacity: int) -> int:
    return -(-capacity // GRANULE) * GRANULE
