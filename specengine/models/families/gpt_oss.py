"""GPT-OSS: sinks besides the scores of attention, windows in every second layer, and experts with biases."""

from collections.abc import Callable
from typing import Any

from specengine.models.families import GGUF, Attention, Experts, Family, Layer, Name, Routing

ATTENTION = Attention(windows="by type", sinks=Name("self_attn.sinks", "attn_sinks.weight"))
NORM = Name("post_attention_layernorm", "post_attention_norm")


def layer(config: Any, number: int) -> Layer:
    return Layer(
        attention=ATTENTION,
        mlp_norm=NORM,
        mlp=Experts(
            config.num_local_experts,
            config.intermediate_size,
            Routing(config.num_experts_per_tok),
            router=Name("mlp.router", "ffn_gate_inp"),
            biases=True,
        ),
    )


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Files say no more of positions than that they are scaled, and give experts' channels a key of their own."""
    rope = fields["rope_parameters"]
    return {
        "intermediate_size": value("expert_feed_forward_length") or fields["intermediate_size"],
        "rope_parameters": rope | ({"truncate": False} if len(rope) > 2 else {}),
    }


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=ATTENTION, mlp_norm=NORM),
    gguf=GGUF(
        "gpt-oss",
        keys={
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        flags={"attention_bias": "attn_q.bias"},
        finish=finish,
    ),
    neutral={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    alternating=True,
    activation="clamped",
)
