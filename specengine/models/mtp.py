"""Heads for multi-token prediction (MTP) that checkpoints bring along: one decoder layer of the model's own kind.

Of Nemotron-H, whose layers have one block each, several. Sources: DeepSeek-V3 (section 2.2), Qwen3-Next; transformers'
MtpModel computes the same; for Nemotron-H vLLM's NemotronHMTP.
"""

import re
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specengine.errors import UnsupportedModelError
from specengine.models.attention import ATTENTION, Prompt, additive, seen_by
from specengine.models.configs import NO_MEMORY, empty_model, family_of, of_few_layers, with_buffers
from specengine.models.eagle import DraftHead
from specengine.models.huggingface import _ShapeRecorder, slab_view
from specengine.models.kv_cache import CacheLayout, KVCache, LanguageModel, Rows
from specengine.models.native import NativeLM
from specengine.models.weights import TINY_VOCABULARY, Source

_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(.+)")
_OWN = re.compile(r"mtp\.(?:layers\.(\d+)\.)?(.+)")
_NAMES = {  # outside of the blocks: Qwen's, after `mtp.`
    "fc": "fc",
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "norm": "norm",
}
_NAMES_IN_LAYERS = {  # DeepSeek's, after the number of a layer beyond the last; Nemotron's, after `mtp.layers.0.`
    "eh_proj": "fc",
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "shared_head.norm": "norm",
    "final_layernorm": "norm",
}
_MARKS = (".eh_proj.", ".enorm.", ".hnorm.")  # of a layer that is a head
_SHARED = ("shared_head.head", "embed_tokens")  # copies of the model's own


def parts_in(names: Collection[str], layers: int) -> set[str]:
    """Return the names of a checkpoint's tensors that belong to MTP heads; layers: of the model itself.

    A layer beyond the last one is a head if it joins a state with an embedding; else it is one that the config lacks.
    """
    head_names, inside = {name for name in names if name.startswith("mtp.")}, dict[int, list[str]]()
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is not None and int(match[1]) >= layers:
            inside.setdefault(int(match[1]), []).append(name)
    return head_names.union(
        *(
            layer_names
            for layer_names in inside.values()
            if any(mark in name for name in layer_names for mark in _MARKS)
        )
    )


def names_in_head(names: Collection[str], layers: int, blocks: int = 1) -> dict[str, str]:
    """Map the tensors of the first MTP head to their names in MtpLayer. Deeper heads are left out.

    blocks: of the head; of several, each has its number in the names.
    """
    names_in_layer = {}
    for name in parts_in(names, layers):
        with_prefix = _OWN.fullmatch(name)
        if (match := with_prefix or _LAYER.fullmatch(name)) is None:
            continue
        number, inside = match.groups()
        block = 0 if number is None else int(number) - (0 if with_prefix else layers)
        module, _, kind = inside.rpartition(".")
        if block >= blocks or module in _SHARED:
            continue
        outside = (_NAMES if number is None else _NAMES_IN_LAYERS).get(module)
        above = "block" if blocks == 1 else f"block.{block}"
        names_in_layer[name] = f"{above}.{inside}" if outside is None else f"{outside}.{kind}"
    return names_in_layer


def blocks_of(config: PretrainedConfig) -> list[str]:
    """Return the kinds of a head's blocks: several of models whose layers have one block each, else one."""
    return list(
        getattr(config.get_text_config(decoder=True), "mtp_layers_block_type", None)
        or ["full_attention"]
    )


class Blocks(nn.ModuleList):
    """Several blocks of a head, run in sequence."""

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        for block in self:
            hidden = block(hidden, **arguments)
        return hidden


class MtpLayer(nn.Module):
    """The network of a head, on the meta device until its weights are loaded."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        decoder: Any = with_buffers(empty_model(of_head(config), dtype)).get_decoder()
        size, norm = (
            decoder.config.hidden_size,
            type(getattr(decoder, "norm", None) or decoder.norm_f),
        )
        eps = getattr(decoder.config, "rms_norm_eps", None) or decoder.config.layer_norm_epsilon
        with torch.device("meta"):
            self.fc = nn.Linear(2 * size, size, bias=False, dtype=dtype)
            self.embedding_norm, self.hidden_norm, self.norm = (
                norm(size, eps=eps).to(dtype) for _ in range(3)
            )
        self.block = decoder.layers[0] if len(decoder.layers) == 1 else Blocks(decoder.layers)
        self.rotary_emb, self.block_config = getattr(decoder, "rotary_emb", None), decoder.config


def of_head(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of a model whose one layer is the head's: full attention, experts if the model has any.

    Of a model whose layers have one block each, one whose layers are the head's blocks.
    """
    fields: dict[str, Any] = {"num_hidden_layers": 1}
    if hasattr(config, "mtp_layers_block_type"):
        fields = {"layers_block_type": blocks_of(config)}
    elif getattr(config, "layer_types", None):
        fields["layer_types"] = list(
            getattr(config, "mtp_layer_types", None) or ["full_attention"]
        )[:1]
    if getattr(config, "mlp_layer_types", None):
        fields["mlp_layer_types"] = list(
            getattr(config, "mtp_mlp_layer_types", None) or ["sparse"]
        )[:1]
    if hasattr(config, "first_k_dense_replace"):
        fields["first_k_dense_replace"] = 0
    if hasattr(config, "mlp_only_layers"):
        fields["mlp_only_layers"] = []
    return type(config).from_dict(config.to_dict() | fields)


class MtpHead(DraftHead):
    """Run an MTP head over a cache of its own.

    Row i pairs the target's state after its final norm at position i with token i + 1, at that token's position. Its
    state, after the head's norm, is read by the target's vocabulary head, and by the rows of its children.

    net: with its weights; target: the model that it was stored with. UnsupportedModelError where the layer does not
    run over a cache of keys and values.
    """

    def __init__(self, net: MtpLayer, target: LanguageModel) -> None:
        self.module, self.weights = net.eval().requires_grad_(False), (net,)
        self._target, self.dtype = target, target.dtype
        self._last = target.max_context - 1
        super().__init__(net.fc.out_features, (target.layers,), net.fc.out_features)
        self.cache = self._take_blocks()

    def _take_blocks(self) -> KVCache:
        """Prepare the blocks to be run; return a cache for them."""
        self._dummy = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._target.device)
        layout = self._layout()
        self._dense_mask = layout.shapes is not None
        self.module.block_config._attn_implementation = "eager" if self._dense_mask else ATTENTION
        return KVCache(layout, 1)

    def _prefill(self, features: Tensor, tokens: Tensor, positions: Tensor) -> None:
        self._run(features, tokens, positions, Prompt(self.cache.length))

    def forward(
        self,
        states: Tensor,
        sources: Tensor,
        rows: Rows,
        one: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden = (states if features is None else features).index_select(0, sources)
        states_out = self._run(hidden, rows.tokens, rows.positions, rows)
        states_out = states_out if one is None else states_out.index_select(0, one)
        return self._target.head(states_out), states_out

    def _inputs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return what the block reads of states and tokens, [rows, hidden size]."""
        net, embeddings = self.module, self._target.embed(tokens).to(self.dtype)
        normed = net.embedding_norm(embeddings), net.hidden_norm(hidden.to(self.dtype))
        projected: Tensor = net.fc(torch.cat(normed, dim=-1))
        return projected

    def _run(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, tree: Rows | Prompt
    ) -> Tensor:
        arguments: dict[str, Any] = {"attention_mask": self._dummy, "tree": tree}
        if self._dense_mask:
            mask = seen_by(tree, len(tokens), tokens.device)
            arguments = {"attention_mask": additive(mask, self.dtype)}
        view = slab_view(self.cache, tree, len(tokens), dense=self._dense_mask)
        return self._through(hidden, tokens, positions, view, arguments)

    def _through(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        view: Any,
        arguments: dict[str, Any],
    ) -> Tensor:
        """Return states after the head's norm."""
        net, inputs = self.module, self._inputs(hidden, tokens)[None]
        at = (positions + 1).clamp(max=self._last)[None]
        turned = None if net.rotary_emb is None else net.rotary_emb(inputs, at)
        out = net.block(
            inputs, position_embeddings=turned, position_ids=at, past_key_values=view, **arguments
        )
        return cast(Tensor, net.norm(out[0] if isinstance(out, tuple) else out))[0]

    @torch.inference_mode()
    def _layout(self) -> CacheLayout:
        """Return what a cache keeps of the block. UnsupportedModelError if it keeps no keys and values."""
        recorder = _ShapeRecorder()
        hidden = torch.zeros(
            1, int(self.module.fc.out_features), dtype=self.dtype, device=self._target.device
        )
        token = torch.zeros(1, dtype=torch.int64, device=self._target.device)
        self.module.block_config._attn_implementation = "eager"
        try:
            self._through(hidden, token, token, recorder, {"attention_mask": None})
        except NO_MEMORY:
            raise
        except Exception as error:  # modules of any kind may raise anything
            text = " ".join(str(error).split())
            raise UnsupportedModelError(
                f"draft: the MTP head fails on a token ({type(error).__name__}: {text:.200})"
            ) from error
        if list(recorder.shapes) != [0]:
            raise UnsupportedModelError("draft: the MTP head's layer keeps no keys and values")
        return CacheLayout.of([recorder.shapes[0][:3]], self.dtype, self._target.device)


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

    def model(self) -> PreTrainedModel:
        raise UnsupportedModelError(f"{self.name}: it is no model")

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
