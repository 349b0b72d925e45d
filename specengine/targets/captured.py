"""Any Hugging Face causal LM as the target, its verification captured in CUDA graphs."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine.graphs import Graphs, RowBuffer, bucket, buckets, room, words_for
from specengine.targets.huggingface import HuggingFaceTarget
from specengine.tree import TokenTree


class CapturedTarget(HuggingFaceTarget):
    """As HuggingFaceTarget, with trees that stand on the host and a forward that is one graph per padded size.

    Prompts are run eagerly. Without a CUDA device the same padded forward runs without a capture.
    UnsupportedModelError where the model's forward cannot be captured.
    """

    def __init__(self, model: PreTrainedModel, *, pack: bool | None = None, compile_blocks: bool = False) -> None:
        super().__init__(model, pack=pack, compile_blocks=compile_blocks)
        self.lm.require_capture()
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
        self.cache.reserve(room(tokens + bucket(scratch)))

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        self.graphs.require_same(self.lm.model)
        return super().prefill(tokens, keep)

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        length, size = self.cache.length, tree.size
        if length + bucket(size) > self.cache.capacity:
            self.reserve(length, size)
        rows = self._rows(size)
        rows.fill(tree.tokens, tree.depths + length, tree.ancestors, slot=length, prefix=length, seen=size)
        logits, features = self._run(rows)
        return logits[:size], None if features is None else features[:size].clone()  # the next tree overwrites them

    def warm_up(self, tokens: int, scratch: int) -> None:
        """Capture what verifies trees of up to `scratch` nodes behind up to `tokens` tokens."""
        self.reserve(tokens, scratch)
        self.graphs.require_same(self.lm.model)
        for size in buckets(scratch):
            rows = self._rows(size)
            rows.fill([], torch.zeros(0), torch.zeros(0, 1), slot=self.cache.length, prefix=self.cache.length, seen=0)
            self._run(rows)

    def _rows(self, size: int) -> RowBuffer:
        padded = bucket(size)
        if padded not in self._buffers:
            self._buffers[padded] = RowBuffer(padded, words_for(padded), self.device)
        return self._buffers[padded]

    def _run(self, rows: RowBuffer) -> tuple[Tensor, Tensor | None]:
        reads = *rows.tensors, self.cache.slab
        name = f"verification of {rows.rows} rows" + (f" with features {self._features}" if self._features else "")
        began = time.perf_counter()
        found = self.graphs.run(name, reads, lambda: self.lm.forward_padded(rows, self.cache, self._features))
        self.lm.seconds += time.perf_counter() - began
        return found

    # ---- for resident cycles (resident.py)

    @property
    def resident_reads(self) -> tuple[Tensor, ...]:
        return (self.cache.slab,)

    def padded(self, rows: RowBuffer) -> tuple[Tensor, Tensor | None]:
        """Logits and features of rows that stand on the device, padding included."""
        return self.lm.forward_padded(rows, self.cache, self._features)

    def resident_end(self, tokens: list[int]) -> None:
        """These tokens are committed."""
        self.cache.length, self.tokens = len(tokens), tokens
