"""Gemma 3, its text: norms before and after, windows with positions of their own in five layers of six."""

from collections.abc import Callable
from typing import Any

from specengine.models.families import GGUF, Attention, Factors, Family, Fields, Layer, Name

LOCAL_THETA, LAYERS_OF_27B = 10_000.0, 62


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Files state the positions of full layers, and one model divides scores by another root."""

    return {
        "rope_parameters": {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": value("rope.freq_base_swa") or LOCAL_THETA,
            },
        },
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]
        if fields["num_hidden_layers"] == LAYERS_OF_27B
        else fields["head_dim"],
    }


ATTENTION = Attention(
    q_norm=Name("self_attn.q_norm", "attn_q_norm"),
    k_norm=Name("self_attn.k_norm", "attn_k_norm"),
    windows="by type",
)
FAMILY = Family(
    layer=Layer(
        attention=ATTENTION,
        attention_output_norm=Name("post_attention_layernorm", "post_attention_norm"),
        mlp_norm=Name("pre_feedforward_layernorm", "ffn_norm"),
        mlp_output_norm=Name("post_feedforward_layernorm", "post_ffw_norm"),
    ),
    fields=Fields(activation="hidden_activation"),
    gguf=GGUF(
        "gemma3",
        keys={"attention.sliding_window": "sliding_window"},
        finish=finish,
    ),
    one_is_zero=True,
    factors=lambda config: Factors(
        scores=config.query_pre_attn_scalar**-0.5, embedding=config.hidden_size**0.5, in_module=True
    ),
    neutral={"final_logit_softcapping": None, "use_bidirectional_attention": False},
)
