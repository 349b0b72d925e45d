"""EXAONE 4: norms of what is added alone, and of each head. Next to layers with windows, the others turn nothing."""

from collections.abc import Callable
from typing import Any

from specengine.models.families import GGUF, SLIDING, Attention, Family, Layer, Name


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """The smaller models have no windows, of which transformers makes no list of layers."""
    return (
        {"layer_types": ["full_attention"] * fields["num_hidden_layers"]}
        if fields["sliding_window"] is None
        else {}
    )


FAMILY = Family(
    layer=Layer(
        attention_norm=None,
        attention=Attention(
            q_norm=Name("self_attn.q_norm", "attn_q_norm"),
            k_norm=Name("self_attn.k_norm", "attn_k_norm"),
            windows="by type",
            turns=lambda config, layer: (
                config.sliding_window is None or config.layer_types[layer] == SLIDING
            ),
        ),
        attention_output_norm=Name("post_attention_layernorm", "post_attention_norm"),
        mlp_norm=None,
        mlp_output_norm=Name("post_feedforward_layernorm", "post_ffw_norm"),
    ),
    gguf=GGUF("exaone4", keys={"attention.sliding_window": "sliding_window"}, finish=finish),
)
