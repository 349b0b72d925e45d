"""MTP heads on the native forward."""

import torch
from torch import Tensor, nn

from specengine.models.attention import Prompt
from specengine.models.configs import family_of, of_few_layers
from specengine.models.kv_cache import KVCache, Rows
from specengine.models.mtp import Blocks, MtpHead, MtpLayer, of_head
from specengine.models.native.lm import NativeLM
from specengine.models.native.weights import TINY_VOCABULARY, Source


class BlockSource(Source):
    """The blocks of a head as a model of few layers, whose final norm is the head's; its vocabulary does not count."""

    def __init__(self, net: MtpLayer, target: NativeLM) -> None:
        self.name, self.dtype = f"the MTP head of {target.name}", target.dtype
        blocks = net.block if isinstance(net.block, Blocks) else [net.block]
        self.tried = len(blocks)
        self.config = of_few_layers(
            of_head(target.config), TINY_VOCABULARY, tuple(range(self.tried))
        )
        family = family_of(self.config)
        some = target.embed(
            torch.arange(TINY_VOCABULARY, dtype=torch.int64, device="cpu") % target.vocab_size
        )
        above = {f"{family.layers.transformers}.{i}": block for i, block in enumerate(blocks)}
        self._tensors: dict[str, Tensor] = {
            f"{prefix}.{name}": tensor
            for prefix, module in (above | {family.norm.transformers: net.norm}).items()
            for name, tensor in module.state_dict().items()
        }
        self._tensors[f"{family.embedding.transformers}.weight"] = some.to(self.dtype)
        self._tensors[f"{family.head.transformers}.weight"] = torch.zeros_like(
            some, dtype=self.dtype
        )

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def forget(self) -> None:
        """Let go of all weights."""
        self._tensors.clear()


class NativeMtpHead(MtpHead):
    """Run an MTP head's blocks on the C++ forward, over a cache of their own; the rest is a product and three norms.

    UnsupportedModelError where csrc/cpu has no such blocks.
    """

    _target: NativeLM

    def _take_blocks(self) -> KVCache:
        source = BlockSource(self.module, self._target)
        self._lm = NativeLM(source, quantize=self._target.quantize)
        source.forget()
        self.module.block = nn.Identity()  # its weights are packed
        return self._lm.new_cache(1)

    def _run(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, tree: Rows | Prompt
    ) -> Tensor:
        inputs = self._inputs(hidden, tokens).float().contiguous()
        at = (positions + 1).clamp(max=self._last)
        visible: tuple[int, int, Tensor | None] = self.cache.length, self.cache.length, None
        if isinstance(tree, Rows):
            visible = int(tree.slot), int(tree.prefix), tree.words
        return self._lm.run_from(inputs, at, self.cache, visible).to(self.dtype)
