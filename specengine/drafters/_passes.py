"""What captured drafts share: a module of drafts, none itself.

The padded frontier: a pass of n nodes runs as one of `bucket(n)` rows, of which only the n are looked at. Policies see
what they see without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from specengine.cuda_graphs import Graphs, RowBuffer, SlotWords, bucket, words_for
from specengine.errors import InputError

MOST_ROWS = 64  # of one pass; more nodes are run in pieces, as none sees another of its own pass

HOST = torch.device("cpu")


class Passes:
    """The padded passes of one draft: buffers by size, and whom each node sees in the scratch."""

    def __init__(self, device: torch.device) -> None:
        self.graphs = Graphs(device)
        self.slots = SlotWords()
        self._buffers: dict[tuple[int, int], RowBuffer] = {}

    def rows(self, count: int, nodes: int) -> RowBuffer:
        """The buffer for `count` rows of a tree of up to `nodes` nodes."""
        key = bucket(count), words_for(nodes)
        if key not in self._buffers:
            self._buffers[key] = RowBuffer(*key, self.graphs.device)
        return self._buffers[key]


def in_pieces(nodes: Tensor, run: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `run` gives of all nodes, at most MOST_ROWS of them at a time."""
    if len(nodes) <= MOST_ROWS:
        return run(nodes)
    pieces = [[found.clone() for found in run(piece)] for piece in nodes.split(MOST_ROWS)]  # the next overwrites them
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


class CapturedDraft(Protocol):
    """What captured cycles (captured_cycle.py) need of a draft; the host knows no length meanwhile.

    What stands here suits a draft that keeps nothing of a tree and has no cache: it adds `captured_pass`.
    """

    @property
    def ahead(self) -> int:
        """Of a sequence of n tokens and a root, n + ahead are in the cache once the root has been drafted from."""
        return 0

    @property
    def spare(self) -> int:
        """The source and target of padding; behind it stand what accepted tokens are run from."""
        return 0

    @property
    def drafted(self) -> int:
        """Committed tokens that the draft has run, as `captured_end` takes them."""
        return 0

    @property
    def captured_ids(self) -> Tensor | None:
        """The target's ids of the draft's columns, on the device; None where they are the columns."""
        return None

    @property
    def captured_reads(self) -> tuple[Tensor, ...]:
        """Tensors that a capture reads and `reserve` may replace."""
        return ()

    @property
    def captured_weights(self) -> tuple[torch.nn.Module, ...]:
        """Modules that a capture reads."""
        return ()

    @property
    def captured_states(self) -> Callable[[Tensor], Tensor] | None:
        """The hidden states, [n, hidden size], of nodes (int64 [n]) that passes were run from; None without any."""
        return None

    def reserve(self, tokens: int, nodes: int) -> None:
        """Expect up to `tokens` committed tokens and trees of up to `nodes` nodes; for drafts with fixed buffers."""
        del tokens, nodes  # a draft may make room as it goes

    def captured_pass(self, rows: RowBuffer, tokens: Tensor, positions: Tensor, words: Tensor, **where: Any) -> Tensor:
        """Logits of rows that stand on the device, given as RowBuffer.write takes them."""
        raise InputError(f"{type(self).__name__}: its passes are not captured")

    def captured_accept(self, features: Tensor | None, path: Tensor) -> None:
        """Take the features of accepted nodes, [nodes, features * hidden size]; path: int64 [n], padded."""
        del features, path  # nothing is kept of a tree

    def captured_start(self, root: int) -> list[int]:
        """Make ready; the tokens that the draft has not run, the root last."""
        return [root]

    def captured_end(self, tokens: list[int], drafted: int) -> None:
        """These tokens are committed, of which the draft has run `drafted`."""
        del tokens, drafted
