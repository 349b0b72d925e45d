"""TokenTree: the draft tree, as flat arrays of fixed capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine import ops

WORD_BITS = 64


class TokenTree:
    """Candidate continuations of the last committed token, which is node 0, the root.

    Nodes are numbered in the order of their creation, so `parents[i] < i`; the capacity is fixed, `size` grows.
    Budgets and sizes count the root. All arrays live on one device:

    tokens, parents, depths    int64 [size]; the root has parent -1 and depth 0
    log_probs                  float32 [size]; draft log-probability of the edge to the node, natural log
    path_log_probs             float32 [size]; sum of `log_probs` from the root, 0 at the root
    ancestors                  int64 [size, ceil(capacity / 64)]; bit j of row i: node j is i or an ancestor of i
    """

    __slots__ = ("_ancestors", "_depths", "_log_probs", "_parents", "_path_log_probs", "_tokens", "passes", "size")

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self._tokens = torch.empty(capacity, dtype=torch.int64, device=device)
        self._parents = torch.empty(capacity, dtype=torch.int64, device=device)
        self._depths = torch.empty(capacity, dtype=torch.int64, device=device)
        self._log_probs = torch.empty(capacity, dtype=torch.float32, device=device)
        self._path_log_probs = torch.empty(capacity, dtype=torch.float32, device=device)
        self._ancestors = torch.empty(capacity, -(-capacity // WORD_BITS), dtype=torch.int64, device=device)
        self.size = 0
        self.passes = 0  # draft passes spent on this tree

    @classmethod
    def root(cls, token: int, capacity: int = 1, device: torch.device | str = "cpu") -> TokenTree:
        """A tree of the root alone, with room for `capacity` nodes."""
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}, at least 1 node (the root) is needed")
        tree = cls(capacity, device)
        tree._tokens[0] = token
        tree._parents[0] = -1
        tree._depths[0] = 0
        tree._log_probs[0] = 0.0
        tree._path_log_probs[0] = 0.0
        tree._ancestors[0] = 0
        tree._ancestors[0, 0] = 1
        tree.size = 1
        return tree

    @classmethod
    def of(
        cls, tokens: Tensor, parents: Tensor, depths: Tensor, log_probs: Tensor, path_log_probs: Tensor
    ) -> TokenTree:
        """A tree of these nodes, which has no room for more; the arrays are as above, and kept."""
        tree = cls.__new__(cls)
        tree._tokens, tree._parents, tree._depths = tokens, parents, depths
        tree._log_probs, tree._path_log_probs = log_probs, path_log_probs
        tree._ancestors = ops.ancestor_words(parents)
        tree.size, tree.passes = tokens.shape[0], 0
        return tree

    @property
    def capacity(self) -> int:
        return self._tokens.shape[0]

    @property
    def device(self) -> torch.device:
        return self._tokens.device

    @property
    def tokens(self) -> Tensor:
        return self._tokens[: self.size]

    @property
    def parents(self) -> Tensor:
        return self._parents[: self.size]

    @property
    def depths(self) -> Tensor:
        return self._depths[: self.size]

    @property
    def log_probs(self) -> Tensor:
        return self._log_probs[: self.size]

    @property
    def path_log_probs(self) -> Tensor:
        return self._path_log_probs[: self.size]

    @property
    def ancestors(self) -> Tensor:
        return self._ancestors[: self.size]

    def __len__(self) -> int:
        return self.size

    def add(self, parents: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Hang one node per entry under existing nodes; siblings must carry distinct tokens.

        parents, tokens: int64 [m]; log_probs: float32 [m], of the edges. Returns the new node ids, int64 [m].
        Raises ValueError when the capacity is exceeded.
        """
        start, stop = self.size, self.size + parents.shape[0]
        if stop > self.capacity:
            raise ValueError(f"tree of capacity {self.capacity} cannot take {stop - start} nodes more than {start}")
        arrays = self._tokens, self._parents, self._depths, self._log_probs, self._path_log_probs, self._ancestors
        ops.append_nodes(arrays, start, parents, tokens, log_probs)
        self.size = stop
        return torch.arange(start, stop, device=self.device)

    def subtree(self, nodes: Tensor) -> TokenTree:
        """The tree of `nodes` alone, renumbered in their order.

        nodes: int64 [m], ascending, with the root first and closed under parent; ValueError otherwise.
        """
        tree = TokenTree.__new__(TokenTree)
        tree._parents, tree._ancestors = ops.subtree(self.parents, nodes)
        tree._tokens, tree._depths = self._tokens[nodes], self._depths[nodes]
        tree._log_probs, tree._path_log_probs = self._log_probs[nodes], self._path_log_probs[nodes]
        tree.size, tree.passes = nodes.shape[0], self.passes
        return tree

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root (excluded) to `node` (included)."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(int(self._tokens[node]))
            node = int(self._parents[node])
        return tokens[::-1]
