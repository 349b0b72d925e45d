"""Gemma 4's assistants: small models of which all layers read the target's keys and values, drafting from one position.

Source: transformers' Gemma4AssistantForCausalLM and SinglePositionMultiTokenCandidateGenerator.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PretrainedConfig

from specengine.errors import InputError, UnsupportedModelError
from specengine.models.configs import family_of
from specengine.models.eagle import DraftHead, require_sizes
from specengine.models.families import SLIDING
from specengine.models.kv_cache import CachedTarget, CacheLayout, KVCache, Rows
from specengine.models.native import NativeLM

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")  # in configs, as `model_type`


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
        if not config.tie_word_embeddings:
            raise ValueError("its vocabulary head has weights of its own")
        model_class = MODEL_MAPPING[type(text)]
        size, self.outer = text.hidden_size, int(config.backbone_hidden_size)
        with torch.device("meta"):
            self.model: Any = model_class(self.text_config).to(dtype)
            self.pre_projection = nn.Linear(2 * self.outer, size, bias=False, dtype=dtype)
            self.post_projection = nn.Linear(size, self.outer, bias=False, dtype=dtype)
            self.masked_embedding = (
                Clusters(config, size, dtype) if config.use_ordered_embeddings else None
            )
        self.tied = "lm_head.weight"  # the embeddings, again

    def read(self, states: Tensor) -> Tensor:
        """Return logits of states, float32 [rows, vocabulary]."""
        head = self.model.embed_tokens.weight
        chosen = self.masked_embedding
        return (
            nn.functional.linear(states, head) if chosen is None else chosen(states, head)
        ).float()


class Clusters(nn.Module):
    """Scores of the tokens in the likeliest clusters alone; all others get one that is lower than these."""

    def __init__(self, config: Any, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.most, self.count = int(config.centroid_intermediate_top_k), int(config.num_centroids)
        self.centroids = nn.Linear(size, self.count, bias=False, dtype=dtype)
        vocabulary = config.get_text_config().vocab_size
        self.register_buffer(
            "token_ordering", torch.empty(vocabulary, dtype=torch.int64, device="meta")
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
        self._target, self._keeper = target.lm, target
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
        if target.captured:
            raise UnsupportedModelError(
                "draft: an assistant reads keys of a length that no CUDA graph has"
            )
        self._slabs = self._find_slabs()

    def follow(self, target: CachedTarget) -> None:
        """Read another text's committed tokens from here on; target: over the same model."""
        self._keeper = target

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
        embeddings = self._target.embed(tokens).to(self.dtype) * self._scale
        inputs = self._net.pre_projection(torch.cat((embeddings, hidden.to(self.dtype)), dim=-1))[
            None
        ]
        keys = {kind: self._keys_of(kind) for kind in self._slabs}
        out = self._net.model(
            inputs_embeds=inputs,
            position_ids=self._keeper.cache.filled.long().expand(1, len(tokens)),
            attention_mask=dict.fromkeys(keys),
            shared_kv_states=keys,
            use_cache=False,
            is_causal=False,
            logits_to_keep=None,  # all rows: by default transformers slices inputs of single layers, and none are there
        ).last_hidden_state[0]
        return self._net.read(out), self._net.post_projection(out)

    def _keys_of(self, kind: str) -> tuple[Tensor, Tensor]:
        """Return keys and values, [1, KV heads, tokens, head size] each, of the committed tokens that are in sight."""
        cache, (slab, layer) = self._keeper.cache, self._slabs[kind]
        end = cache.length
        first = max(end - self._window - 1, 0) if kind == SLIDING else 0
        return cache.layer(layer, first, end, slab)

    def _find_slabs(self) -> dict[str, tuple[int, int]]:
        """Return by the assistant's types of layers the slab, and the layer in it, that these read."""
        lm, text = self._target, self._net.text_config
        config = lm.config.get_text_config(decoder=True)
        types, needed = getattr(config, "layer_types", None) or [], set(text.layer_types)
        owners = list(range(len(types) - (getattr(config, "num_kv_shared_layers", 0) or 0)))
        last = {types[number]: number for number in owners}
        if not needed <= last.keys():
            raise InputError(
                f"draft: an assistant reads the keys of Gemma 4; {config.model_type} has none such"
            )
        slabs = dict[str, tuple[int, int]]()
        for kind in needed:
            number = last[kind]
            slabs[kind] = 0, number
            if isinstance(lm, NativeLM):
                sizes = [
                    (at.kv_heads, at.head_dim)
                    for at in (family_of(config).shape_at(config, i) for i in owners)
                ]
                slab = list(dict.fromkeys(sizes)).index(sizes[number])
                slabs[kind] = slab, sizes[:number].count(sizes[number])
        for layer, kind in zip(self._net.model.layers, text.layer_types, strict=True):
            slab, number = slabs[kind]
            keys, reader = self._keeper.cache.layer(number, slab=slab)[0], layer.self_attn
            heads, size = keys.shape[1], keys.shape[3]
            if (
                reader.head_dim != size
                or reader.num_key_value_groups * heads != text.num_attention_heads
            ):
                raise InputError(
                    f"draft: the assistant reads heads of {reader.head_dim} channels, "
                    f"the target keeps {heads} of {size}"
                )
        return slabs
