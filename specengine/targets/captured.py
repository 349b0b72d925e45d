"""Any Hugging Face causal LM as the target, its verification captured in CUDA graphs."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine.cuda_graphs import Graphs, RowBuffer, bucket, buckets, room, words_for
from specengine.errors import UnsupportedModelError
from specengine.modeling.causal_lm import CausalLM
from specengine.modeling.kv_cache import KVCache
from specengine.ops import own_bits
from specengine.targets.huggingface import TRIED, HuggingFaceTarget
from specengine.tree import TokenTree

STRICT_ROWS = 64  # of every strict forward, plain decoding's too: products of one shape give a row the same bits


class CapturedTarget(HuggingFaceTarget):
    """As HuggingFaceTarget, with trees that stand on the host and a forward that is one graph per padded size.

    Prompts are run eagerly. Without a CUDA device the same padded forward runs without a capture.
    strict: every forward has STRICT_ROWS rows, larger trees take several, and attention is summed by position.
    UnsupportedModelError where the model's forward cannot be captured, or cannot keep what `strict` promises.
    """

    def __init__(
        self, model: PreTrainedModel, *, pack: bool | None = None, strict: bool = False, compile_blocks: bool = False
    ) -> None:
        super().__init__(model, pack=pack, compile_blocks=compile_blocks)
        self.lm.require_capture()
        self.strict = strict
        if strict:
            require_strict(self.lm)
        self.graphs = Graphs(self.device)
        self._buffers: dict[int, RowBuffer] = {}

    @property
    def notes(self) -> list[str]:
        captured = self.device.type == "cuda"
        return [] if captured else ["graphs: without a CUDA device the padded forwards run uncaptured"]

    @property
    def tree_device(self) -> torch.device:
        return torch.device("cpu")

    def reserve(self, tokens: int, scratch: int) -> None:
        self.cache.reserve(room(tokens + self.padded_rows(scratch)))

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        self.graphs.require_same(self.lm.model)
        return super().prefill(tokens, keep)

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        tree = tree.trimmed()
        length, size = self.cache.length, len(tree)
        if length + self.padded_rows(size) > self.cache.capacity:
            self.reserve(length, size)
        rows = self._rows(size)
        rows.fill(tree.tokens, tree.depths + length, tree.ancestors, slot=length, prefix=length, seen=size)
        logits, features = self._run(rows)
        return logits[:size], None if features is None else features[:size].clone()  # the next tree overwrites them

    def warm_up(self, tokens: int, scratch: int) -> None:
        """Capture what verifies trees of up to `scratch` nodes behind up to `tokens` tokens."""
        self.reserve(tokens, scratch)
        self.graphs.require_same(self.lm.model)
        sizes = range(self.padded_rows(scratch), 0, -STRICT_ROWS) if self.strict else buckets(scratch)
        for size in sizes:
            rows = self._rows(size)
            rows.fill([], torch.zeros(0), torch.zeros(0, 1), slot=self.cache.length, prefix=self.cache.length, seen=0)
            self._run(rows)

    def _rows(self, size: int) -> RowBuffer:
        padded = self.padded_rows(size)
        if padded not in self._buffers:
            self._buffers[padded] = RowBuffer(padded, words_for(padded), self.device)
        return self._buffers[padded]

    def _run(self, rows: RowBuffer) -> tuple[Tensor, Tensor | None]:
        reads = *rows.tensors, self.cache.slab
        name = f"verification of {rows.rows} rows" + (f" with features {self._features}" if self._features else "")
        began = time.perf_counter()
        found = self.graphs.run(name, reads, lambda: self.padded(rows))
        self.lm.seconds += time.perf_counter() - began
        return found

    def padded_rows(self, size: int) -> int:
        """How many rows a tree of so many nodes is padded to."""
        return -(-size // STRICT_ROWS) * STRICT_ROWS if self.strict else bucket(size)

    # ---- for cycles on the device (captured_cycle.py)

    @property
    def captured_reads(self) -> tuple[Tensor, ...]:
        return (self.cache.slab,)

    def padded(self, rows: RowBuffer) -> tuple[Tensor, Tensor | None]:
        """Logits and features of rows that stand on the device, padding included."""
        if not self.strict:
            return self.lm.forward_padded(rows, self.cache, self._features)
        pieces = rows.strict_pieces(STRICT_ROWS)
        logits, features = zip(*(self.lm.forward_padded(p, self.cache, self._features) for p in pieces), strict=True)
        return torch.cat(logits), torch.cat(features) if self._features else None

    def captured_end(self, tokens: list[int]) -> None:
        """These tokens are committed."""
        self.cache.length, self.tokens = len(tokens), tokens


@torch.inference_mode()
def require_strict(lm: CausalLM) -> None:
    """UnsupportedModelError where padded forwards of `lm` give a row other bits among other rows, or elsewhere in them.

    Tried on siblings: alone in a forward, then among others at another place.
    """
    cache, draw = lm.new_cache(room(STRICT_ROWS)), torch.Generator().manual_seed(0)
    lm.extend(cache, [token % lm.vocab_size for token in (1, 2, 3, 5, 7)])
    tokens = torch.arange(11, 11 + TRIED) * 13 % lm.vocab_size
    alone = torch.cat([_siblings(lm, cache, token[None]) for token in tokens])
    for count in (2, 17, STRICT_ROWS):
        places = torch.randint(TRIED, (count,), generator=draw)
        if not torch.equal(_siblings(lm, cache, tokens[places]), alone[places.to(alone.device)]):
            raise UnsupportedModelError(
                f"strict: on this {lm.device.type} a row of a {lm.model.dtype} matrix product changes with its place "
                f"among {STRICT_ROWS} rows, so no tree can have the bits of plain decoding"
            )


def _siblings(lm: CausalLM, cache: KVCache, tokens: Tensor) -> Tensor:
    """Logits of `tokens`, each of them the next one behind what `cache` holds, in one strict forward."""
    rows, count, length = RowBuffer(STRICT_ROWS, 1, lm.device), len(tokens), cache.length
    own = own_bits(count, torch.device("cpu"))
    rows.fill(tokens, torch.full((count,), length), own, slot=length, prefix=length, seen=count)
    (piece,) = rows.strict_pieces(STRICT_ROWS)
    return lm.forward_padded(piece, cache)[0][:count]
