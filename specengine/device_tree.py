"""DeviceTree: a draft tree of which the host knows nothing but the capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine import ops
from specengine.reference import WORD_BITS


class DeviceTree:
    """The arrays of a TokenTree at their full capacity, with the size on the device: int32 [1]. Entries behind it are
    undefined. Every function here can be captured in a graph."""

    __slots__ = ("ancestors", "depths", "log_probs", "parents", "path_log_probs", "size", "tokens")

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.tokens, self.parents, self.depths = (
            torch.zeros(capacity, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.log_probs, self.path_log_probs = torch.zeros(2, capacity, device=device)
        self.ancestors = torch.zeros(capacity, -(-capacity // WORD_BITS), dtype=torch.int64, device=device)
        self.parents[0], self.ancestors[0, 0] = -1, 1
        self.size = torch.ones(1, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        return self.tokens.shape[0]

    def start(self, root: Tensor) -> None:
        """A new tree of the root alone; root: int64 [1], its token."""
        self.size.fill_(1)
        self.tokens[:1].copy_(root)

    def add(self, parents: Tensor, tokens: Tensor, log_probs: Tensor, count: Tensor, expand: ops.Found) -> ops.Frontier:
        """Hang the first `count` entries under existing nodes; those that `expand` names are drafted from next."""
        arrays = self.tokens, self.parents, self.depths, self.log_probs, self.path_log_probs, self.ancestors
        return ops.hang_nodes(arrays, self.size, parents, tokens, log_probs, count, expand)

    def best(self, budget: int) -> ops.Found:
        """The nodes of the largest path log-probability, ascending; closed under parent."""
        return ops.select_nodes(self.path_log_probs, self.size, budget)
