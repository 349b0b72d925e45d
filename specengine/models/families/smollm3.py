"""SmolLM3: the blocks of Llama, with no positions in each fourth layer, which may have a window."""

from specengine.models.families import GGUF, Attention, Family, Layer

FAMILY = Family(
    layer=Layer(
        attention=Attention(
            windows="by type", turns=lambda config, layer: bool(config.no_rope_layers[layer])
        )
    ),
    gguf=GGUF(
        "smollm3",
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
        pairs=("attn_q", "attn_k"),
    ),
)
