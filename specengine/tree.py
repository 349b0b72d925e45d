"""TokenTree: the draft tree, as flat arrays of fixed capacity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specengine import ops
from specengine.errors import PolicyError
from specengine.ops import WORD_BITS, Nodes


class TokenTree:
    """Candidate continuations of the last committed token, which is node 0, the root.

    Nodes are numbered in the order of their creation, so `parents[i] < i`; the capacity is fixed, `size` grows.
    Budgets and sizes count the root. All arrays live on one device; entries behind the size are undefined:

    tokens, parents, depths    int64 [capacity]; the root has parent -1 and depth 0
    log_probs                  float32 [capacity]; draft log-probability of the edge to the node, natural log
    path_log_probs             float32 [capacity]; sum of `log_probs` from the root, 0 at the root
    ancestors                  int64 [capacity, ceil(capacity / 64)]; bit j of row i: node j is i or an ancestor of i
    size, passes, overflow     int32 [1]; nodes; draft passes spent; whether nodes were refused, as they had no room
    """

    __slots__ = (
        "ancestors",
        "depths",
        "log_probs",
        "overflow",
        "parents",
        "passes",
        "path_log_probs",
        "size",
        "tokens",
    )

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}, at least 1 node (the root) is needed")
        self.tokens, self.parents, self.depths = torch.zeros(3, capacity, dtype=torch.int64, device=device).unbind()
        self.log_probs, self.path_log_probs = torch.zeros(2, capacity, device=device, dtype=torch.float32).unbind()
        self.ancestors = torch.zeros(capacity, -(-capacity // WORD_BITS), dtype=torch.int64, device=device)
        self.parents[:1].fill_(-1)
        self.ancestors[:1, :1].fill_(1)
        self.size, self.passes, self.overflow = torch.zeros(3, 1, dtype=torch.int32, device=device).unbind()
        self.size.fill_(1)

    @classmethod
    def root(cls, token: int, capacity: int = 1, device: torch.device | str = "cpu") -> TokenTree:
        """A tree of the root alone, with room for `capacity` nodes."""
        tree = cls(capacity, device)
        tree.tokens[:1].fill_(token)
        return tree

    @classmethod
    def of(
        cls, tokens: Tensor, parents: Tensor, depths: Tensor, log_probs: Tensor, path_log_probs: Tensor, passes: int = 0
    ) -> TokenTree:
        """A tree of these nodes, which has no room for more; the arrays are as above, and kept."""
        tree = cls.__new__(cls)
        tree.tokens, tree.parents, tree.depths = tokens, parents, depths
        tree.log_probs, tree.path_log_probs = log_probs, path_log_probs
        tree.ancestors = ops.ancestor_words(parents)
        numbers = torch.tensor([[tokens.shape[0]], [passes], [0]], dtype=torch.int32, device=tokens.device)
        tree.size, tree.passes, tree.overflow = numbers
        return tree

    @property
    def capacity(self) -> int:
        return self.tokens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def __len__(self) -> int:
        return int(self.size)

    def restart(self) -> None:
        """Only the root is left, whose token stays."""
        self.size.fill_(1)
        self.passes.zero_()
        self.overflow.zero_()

    def root_alone(self) -> Nodes:
        return Nodes.of(torch.zeros(1, dtype=torch.int64, device=self.device))

    def add(self, parents: Tensor, tokens: Tensor, log_probs: Tensor, count: Tensor | None = None) -> Nodes:
        """Hang the first `count` entries, or all, under existing nodes; siblings must carry distinct tokens.

        parents, tokens: int64 [m]; log_probs: float32 [m], of the edges; count: int32 [1]. Returns the new nodes.
        PolicyError when the capacity is exceeded; on a device then nothing is added, and `overflow` says so.
        """
        if count is None:
            count = torch.full_like(self.size, parents.shape[0])
        ids = ops.append_nodes(self._arrays, self.size, parents, tokens, log_probs, count, self.overflow)
        return self._added(Nodes(ids, count))

    def add_children(
        self,
        frontier: Nodes,
        tokens: Tensor,
        log_probs: Tensor,
        chosen: Tensor | None = None,
        most: int | None = None,
        limit: Tensor | None = None,
    ) -> Nodes:
        """Hang children under each frontier node, all or those that are chosen; see ops.append_children.

        Returns the new nodes, in creation order; where the capacity is exceeded as `add`.
        """
        given = self._arrays, self.size, frontier, tokens, log_probs, self.overflow
        return self._added(ops.append_children(*given, chosen=chosen, most=most, limit=limit))

    def graft(self, parents: list[int], tokens: list[int], log_probs: list[float]) -> Nodes:
        """As `add`, of entries on the host whose parents may be earlier ones: entry i becomes node len(self) + i.

        PolicyError when the capacity is exceeded, also on a device, which this waits for.
        """
        size, end = len(self), len(self) + len(tokens)
        if end > self.capacity:
            raise overfull(self.capacity, size, len(tokens))
        depths, scores = self.depths[:size].tolist(), self.path_log_probs[:size].tolist()
        for parent, log_prob in zip(parents, log_probs, strict=True):
            depths.append(depths[parent] + 1)
            scores.append(scores[parent] + log_prob)
        whole = torch.tensor([tokens, parents, depths[size:]], dtype=torch.int64, device="cpu")
        real = torch.tensor([log_probs, scores[size:]], dtype=torch.float32, device="cpu")
        for array, values in zip(self._arrays[:5], (*whole, *real), strict=True):
            array[size:end] = values
        words = ops.ancestor_words(self.parents[:end])
        self.ancestors[size:end] = 0
        self.ancestors[size:end, : words.shape[1]] = words[size:]
        self.size.fill_(end)
        return Nodes.of(torch.arange(size, end, device=self.device, dtype=torch.int64))

    def add_likely(
        self,
        frontier: Nodes,
        tokens: Tensor,
        stated: Tensor,
        sources: Tensor | None,
        counts: ops.Counts,
        notes: ops.Notes,
        least: float,
        most: int,
    ) -> Nodes:
        """Hang the likeliest children under the frontier, by counted chances; see ops.hang_likely."""
        given = frontier, tokens, stated, sources, counts, notes, least, most
        return self._added(ops.hang_likely(self._arrays, self.size, self.overflow, *given))

    def count_outcomes(self, path: Nodes, chosen: Tensor, counts: ops.Counts, notes: ops.Notes) -> None:
        """Count what became of these nodes; see ops.count_outcomes."""
        ops.count_outcomes(self._arrays, self.size, path, chosen, counts, notes)

    @property
    def _arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.parents, self.depths, self.log_probs, self.path_log_probs, self.ancestors

    def _added(self, nodes: Nodes) -> Nodes:
        overflow = ops.number(self.overflow)
        if isinstance(overflow, Tensor):
            return Nodes(nodes.ids, nodes.live * (overflow == 0))
        if overflow:
            self.overflow.zero_()
            raise overfull(self.capacity, len(self), int(nodes.live))
        return nodes

    def scores(self, nodes: Nodes) -> Tensor:
        """float32 [width]: the nodes' path log-probabilities, -inf for padding."""
        return nodes.masked(self.path_log_probs.index_select(0, nodes.ids), -math.inf)

    def best(self, nodes: Nodes, most: int) -> Nodes:
        """The `most` of these nodes with the largest path log-probabilities, in the order in which they are given."""
        found = ops.select_best(self.path_log_probs.index_select(0, nodes.ids), nodes.live, most)
        return Nodes(nodes.ids.index_select(0, found.ids), found.live) if nodes.ids.shape[0] else found

    def best_of_all(self, most: int, limit: Tensor | None = None) -> Nodes:
        """The nodes of the largest path log-probabilities, ascending: a part that is closed under parent."""
        return ops.select_best(self.path_log_probs, self.size, most, limit)

    def subtree(self, nodes: Nodes) -> TokenTree:
        """The tree of these nodes alone, renumbered in their order, with room for no more than their padding.

        nodes: ascending, with the root first and closed under parent; ValueError otherwise.
        """
        tree = TokenTree.__new__(TokenTree)
        tree.parents, tree.ancestors = ops.subtree(self.parents, self.ancestors, *nodes)
        tree.tokens, tree.depths = self.tokens.index_select(0, nodes.ids), self.depths.index_select(0, nodes.ids)
        tree.log_probs = self.log_probs.index_select(0, nodes.ids)
        tree.path_log_probs = self.path_log_probs.index_select(0, nodes.ids)
        tree.size, tree.passes, tree.overflow = nodes.live, self.passes, self.overflow
        return tree

    def trimmed(self) -> TokenTree:
        """The same nodes without the room behind them, as views; waits for a device."""
        size = len(self)
        if size == self.capacity:
            return self
        tree = TokenTree.__new__(TokenTree)
        tree.tokens, tree.parents, tree.depths = self.tokens[:size], self.parents[:size], self.depths[:size]
        tree.log_probs, tree.path_log_probs = self.log_probs[:size], self.path_log_probs[:size]
        tree.ancestors = self.ancestors[:size]
        tree.size, tree.passes, tree.overflow = self.size, self.passes, self.overflow
        return tree

    def to(self, device: torch.device | str) -> TokenTree:
        """The same tree, in memory of its own, there."""
        tree = TokenTree.__new__(TokenTree)
        for name in TokenTree.__slots__:
            setattr(tree, name, getattr(self, name).to(device, copy=True))
        return tree

    def copy_(self, tree: TokenTree) -> None:
        """Become that tree, which has no more nodes than there is room for."""
        size, words = tree.capacity, tree.ancestors.shape[1]
        for name in ("tokens", "parents", "depths", "log_probs", "path_log_probs"):
            getattr(self, name)[:size].copy_(getattr(tree, name))
        self.ancestors[:size].zero_()
        self.ancestors[:size, :words].copy_(tree.ancestors)
        for name in ("size", "passes", "overflow"):
            getattr(self, name).copy_(getattr(tree, name))

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root (excluded) to `node` (included)."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]


CAPACITY = "capacity: "  # how the error of a full tree begins, before it is said whose


def overfull(capacity: int, size: int, more: int | None = None) -> PolicyError:
    """Return the error of a policy that grew a tree beyond the capacity that it states."""
    nodes = "more" if more is None else f"{more} more"
    return PolicyError(
        f"{CAPACITY}it states room for {capacity} nodes, the root included; the tree has {size} and cannot take {nodes}"
    )


def is_down(flag: ops.Flag) -> bool:
    """Whether a flag is known to be down without waiting, as it is on a CPU: then work may be left out."""
    return (not isinstance(flag, Tensor) or ops.is_free(flag)) and not flag
