"""Heads that checkpoints bring along: for multi-token prediction (MTP), and Gemma 4's assistants.

An MTP head is one decoder layer of the model's own kind; of Nemotron-H, whose layers have one block each, several.
Sources: DeepSeek-V3 (section 2.2), Qwen3-Next; transformers' MtpModel computes the same; for Nemotron-H vLLM's
NemotronHMTP. An assistant is a small model of which all layers read the target's keys and values, drafting from one
position. Source: transformers' Gemma4AssistantForCausalLM and SinglePositionMultiTokenCandidateGenerator.
"""

import re
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, DynamicCache, PretrainedConfig

from specengine.errors import require_input, require_or, require_supported
from specengine.models.attention import ATTENTION, Prompt, additive, seen_by
from specengine.models.configs import empty_model, family_of, with_buffers
from specengine.models.eagle import DraftHead, require_sizes
from specengine.models.families import SLIDING
from specengine.models.huggingface import recorded, slab_view
from specengine.models.kv_cache import CachedTarget, CacheLayout, KVCache, LanguageModel, Rows
from specengine.models.refusals import errors_named

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
    beyond = {
        name: match[1]
        for name in names
        if (match := _LAYER.fullmatch(name)) and int(match[1]) >= layers
    }
    heads = {number for name, number in beyond.items() if any(mark in name for mark in _MARKS)}
    return {name for name in names if name.startswith("mtp.") or beyond.get(name) in heads}


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
    sparse = {"first_k_dense_replace": 0, "mlp_only_layers": []}
    fields |= {name: value for name, value in sparse.items() if hasattr(config, name)}
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
        self._dense_mask = bool(layout.shapes)
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
        return cast(Tensor, net.fc(torch.cat(normed, dim=-1)))

    def _run(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, tree: Rows | Prompt
    ) -> Tensor:
        arguments: dict[str, Any] = (
            {"attention_mask": additive(seen_by(tree, len(tokens), tokens.device), self.dtype)}
            if self._dense_mask
            else {"attention_mask": self._dummy, "tree": tree}
        )
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
        # Qwen3.5 turns by positions on three axes; transformers 5.17 takes no fewer
        axes = at.expand(3, -1, -1) if hasattr(net.rotary_emb, "mrope_section") else at
        turned = None if net.rotary_emb is None else net.rotary_emb(inputs, axes)
        out = net.block(
            inputs, position_embeddings=turned, position_ids=at, past_key_values=view, **arguments
        )
        return cast(Tensor, net.norm(out[0] if isinstance(out, tuple) else out))[0]

    @torch.inference_mode()
    def _layout(self) -> CacheLayout:
        """Return what a cache keeps of the block. UnsupportedModelError if it keeps no keys and values."""
        cache = DynamicCache()
        hidden = torch.zeros(
            1, int(self.module.fc.out_features), dtype=self.dtype, device=self._target.device
        )
        token = torch.zeros(1, dtype=torch.int64, device=self._target.device)
        self.module.block_config._attn_implementation = "eager"
        with errors_named("draft: the MTP head fails on a token"):
            self._through(hidden, token, token, cache, {"attention_mask": None})
        shapes = recorded(cache)
        require_supported(
            "draft: the MTP head's layer keeps no keys and values", list(shapes) == [0]
        )
        return CacheLayout.of([shapes[0][:3]], self.dtype, self._target.device)


# ---- Gemma 4's assistants


ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")  # in configs, as `model_type`


class Assistant(nn.Module):
    """The network of an assistant, on the meta device until its weights are loaded; names are transformers'.

    transformers 5.18 makes no model of such a config, because it looks for layers with keys of their own.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        text: Any = config.get_text_config()
        shared = {"kv_sharing_modes": property(lambda own: ["reuse"] * own.num_hidden_layers)}
        of_shared: Any = type("Shared", (type(text),), shared)
        self.text_config: Any = of_shared.from_dict(text.to_dict())
        self.text_config._attn_implementation = "sdpa"  # whatever the target's is, which sees trees
        require_or(
            ValueError,
            "its vocabulary head has weights of its own",
            bool(config.tie_word_embeddings),
        )
        size, self.outer = text.hidden_size, int(config.backbone_hidden_size)
        with torch.device("meta"):
            self.model: Any = MODEL_MAPPING[type(text)](self.text_config).to(dtype)
            self.pre_projection = nn.Linear(2 * self.outer, size, bias=False, dtype=dtype)
            self.post_projection = nn.Linear(size, self.outer, bias=False, dtype=dtype)
            self.masked_embedding = (
                Clusters(config, size, dtype) if config.use_ordered_embeddings else None
            )


class Clusters(nn.Module):
    """Scores of the tokens in the likeliest clusters alone; all others get one that is lower than these."""

    def __init__(self, config: Any, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.most, self.count = int(config.centroid_intermediate_top_k), int(config.num_centroids)
        self.centroids = nn.Linear(size, self.count, bias=False, dtype=dtype)
        self.register_buffer(
            "token_ordering",
            torch.empty(config.get_text_config().vocab_size, dtype=torch.int64, device="meta"),
        )

    def forward(self, states: Tensor, head: Tensor) -> Tensor:
        """states: [rows, hidden size]; head: [vocabulary, hidden size]. Returns [rows, vocabulary]."""
        best = self.centroids(states).topk(self.most, dim=-1).indices
        tokens = self.token_ordering.long().view(self.count, -1)[best].flatten(1)  # type: ignore[operator]
        scores = (head[tokens] @ states[:, :, None])[:, :, 0]
        return (scores.amin(1, keepdim=True) - 1).expand(-1, len(head)).scatter(1, tokens, scores)


class AssistantHead(DraftHead):
    """Run an assistant as a head: a row reads its token's embedding, a state, and the target's committed tokens.

    Rows see nothing of each other and stand at the root's position; what they know of the tokens between is in their
    parent's state. So the cache has counts alone.

    net: with its weights, of the target's dtype and on its device; target: whose cache is read. InputError where the
    assistant was made for another target; UnsupportedModelError where the target's cycles are CUDA graphs.
    """

    def __init__(self, net: Assistant, target: CachedTarget) -> None:
        self._net: Any = net.eval().requires_grad_(False)
        self.weights = (net,)
        self._target, self.followed = target.lm, target
        text, device = net.text_config, target.lm.device
        self.dtype, self._window = target.dtype, int(text.sliding_window)
        # of Gemma's embeddings
        self._scale = torch.tensor(net.outer**0.5, dtype=self.dtype, device=device)
        self.cache = KVCache(CacheLayout(((1, 1, 1),), self.dtype, device), 1)
        require_sizes(
            (net.outer, int(target.lm.config.hidden_size)),
            (int(text.vocab_size), target.lm.vocab_size),
        )
        super().__init__(net.outer, (target.lm.layers,), net.outer)
        require_supported(
            "draft: an assistant reads keys of a length that no CUDA graph has", not target.captured
        )
        self._slabs = self._find_slabs()

    def follow(self, target: CachedTarget) -> None:
        """Read another text's committed tokens from here on; target: over the same model."""
        self.followed = target

    def _prefill(self, features: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """Do nothing: rows are counted, and none is run."""

    def forward(
        self,
        states: Tensor,
        sources: Tensor,
        rows: Rows,
        one: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden, tokens = (
            (states if features is None else features).index_select(0, sources),
            rows.tokens,
        )
        if one is not None:
            hidden, tokens = hidden.index_select(0, one), tokens.index_select(0, one)
        cache = self.followed.cache
        end, near = cache.length, max(cache.length - self._window - 1, 0)
        # of the committed tokens that are in sight, [1, KV heads, tokens, head size] each
        keys = {
            kind: cache.layer(layer, near if kind == SLIDING else 0, end, slab)
            for kind, (slab, layer) in self._slabs.items()
        }
        out = self._net.model(
            inputs_embeds=self._inputs(hidden, tokens)[None],
            position_ids=self.followed.cache.filled.long().expand(1, len(tokens)),
            attention_mask=dict.fromkeys(keys),
            shared_kv_states=keys,
            use_cache=False,
            is_causal=False,
            logits_to_keep=None,  # all rows: by default transformers slices inputs of single layers, and none are there
        ).last_hidden_state[0]
        read: Any = self._net.masked_embedding or nn.functional.linear
        logits = read(out, self._net.model.embed_tokens.weight).float()
        return logits, self._net.post_projection(out)

    def _inputs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return what the layers read of states and tokens, [rows, hidden size]."""
        embeddings = self._target.embed(tokens).to(self.dtype) * self._scale
        return cast(
            Tensor,
            self._net.pre_projection(torch.cat((embeddings, hidden.to(self.dtype)), dim=-1)),
        )

    def _find_slabs(self) -> dict[str, tuple[int, int]]:
        """Return the slab that each type of its layers reads, and the layer in it; types in alphabetical order."""
        lm, text = self._target, self._net.text_config
        config = lm.config.get_text_config(decoder=True)
        types, needed = getattr(config, "layer_types", None) or [], set(text.layer_types)
        owners = list(range(len(types) - (getattr(config, "num_kv_shared_layers", 0) or 0)))
        last = {types[number]: number for number in owners}
        require_input(
            f"draft: an assistant reads the keys of Gemma 4; {config.model_type} has none such",
            needed <= last.keys(),
        )
        sizes = [(0, 0)] * len(owners)
        if len(self.followed.cache.slabs) > 1:
            sizes = [
                (shape.kv_heads, shape.head_dim)
                for shape in (family_of(config).shape_at(config, number) for number in owners)
            ]
        slabs = {
            kind: (
                list(dict.fromkeys(sizes)).index(sizes[number]),
                sizes[:number].count(sizes[number]),
            )
            for kind, number in sorted(last.items())
            if kind in needed
        }
        for layer, kind in zip(self._net.model.layers, text.layer_types, strict=True):
            slab, number = slabs[kind]
            keys, reader = self.followed.cache.layer(number, slab=slab)[0], layer.self_attn
            heads, size = keys.shape[1], keys.shape[3]
            require_input(
                f"draft: the assistant reads heads of {reader.head_dim} channels, "
                f"the target keeps {heads} of {size}",
                reader.head_dim == size
                and reader.num_key_value_groups * heads == text.num_attention_heads,
            )
        return slabs
