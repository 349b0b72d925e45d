"""Gemma 4, its text: other heads without windows, keys and values that later layers read, inputs of single layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specengine.models.families import (
    GGUF,
    SLIDING,
    Attention,
    Experts,
    ExpertsWithDense,
    Factors,
    Family,
    Fields,
    Layer,
    Name,
    OwnInputs,
    Routing,
)

K_NORM = Name("self_attn.k_norm", "attn_k_norm")
GATE_UP = Name("experts.gate_up_proj", "ffn_gate_up_exps.weight")
ATTENTION = Attention(
    q_norm=Name("self_attn.q_norm", "attn_q_norm"),
    k_norm=K_NORM,
    windows="by type",
    unweighted=("v_norm",),
)


def reads(config: Any, number: int) -> int | None:
    """Return the layer whose keys and values a layer reads, the last of its type that has some; None for its own.

    Where no layer of its type has any, -2 less the number of its type among the config's, in alphabetical order: of an
    assistant, whose target has them.
    """
    first = config.num_hidden_layers - config.num_kv_shared_layers
    if number < first:
        return None
    types = config.layer_types
    return max(
        (other for other in range(first) if types[other] == types[number]),
        default=-2 - sorted(set(types)).index(types[number]),
    )


def attention(config: Any, number: int) -> Attention:
    source = reads(config, number)
    shares = bool(config.attention_k_eq_v) and config.layer_types[number] != SLIDING
    owning = replace(ATTENTION, v=None if shares else ATTENTION.v)
    return (
        owning
        if source is None
        else replace(owning, k=None, v=None, k_norm=None, unweighted=(), reads=source)
    )


def beside(config: Any) -> ExpertsWithDense | None:
    if not getattr(config, "enable_moe_block", False):
        return None
    return ExpertsWithDense(
        Experts(
            config.num_experts,
            config.moe_intermediate_size,
            Routing(config.top_k_experts),
            router=Name("router.proj", "ffn_gate_inp"),
            gate=GATE_UP,
            up=GATE_UP,
            down=Name("experts.down_proj", "ffn_down_exps.weight"),
            scales=Name("router.per_expert_scale", "ffn_down_exps.scale"),
        ),
        norm=Name("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
        router_norm=Name("router.scale", "ffn_gate_inp.scale"),
        mlp_norm=Name("post_feedforward_layernorm_1", "post_ffw_norm_1"),
        output_norm=Name("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    )


def own_inputs(config: Any) -> OwnInputs | None:
    if not (size := getattr(config, "hidden_size_per_layer_input", 0)):
        return None
    return OwnInputs(
        size,
        embedding=Name("model.embed_tokens_per_layer", "per_layer_token_embd"),
        projection=Name("model.per_layer_model_projection", "per_layer_model_proj"),
        norm=Name("model.per_layer_projection_norm", "per_layer_proj_norm"),
        gate=Name("per_layer_input_gate", "inp_gate"),
        out=Name("per_layer_projection", "proj"),
        output_norm=Name("post_per_layer_input_norm", "post_norm"),
    )


def layer(config: Any, number: int) -> Layer:
    return Layer(
        attention=attention(config, number),
        attention_output_norm=Name("post_attention_layernorm", "post_attention_norm"),
        mlp_norm=Name("pre_feedforward_layernorm", "ffn_norm"),
        mlp_output_norm=Name("post_feedforward_layernorm", "post_ffw_norm"),
        beside=beside(config),
        own=own_inputs(config),
        scale=Name("layer_scalar", "layer_output_scale.weight"),
    )


def factors(config: Any) -> Factors:
    return Factors(
        scores=1.0,
        embedding=config.hidden_size**0.5,
        cap=config.final_logit_softcapping or 0.0,
        own=(getattr(config, "hidden_size_per_layer_input", 0) or 1) ** 0.5,
        in_module=True,
    )


def alone(config: Any, number: int) -> dict[str, Any]:
    """Its last layer's type, which the config's class checks, is set when it is made."""
    count = 1 if reads(config, number) is None else 2
    return {"num_kv_shared_layers": count - 1, "layer_types": ["full_attention"] * count}


def sizes_at(config: Any, number: int) -> dict[str, Any]:
    return (
        {"inner": 2 * config.intermediate_size}
        if config.use_double_wide_mlp and reads(config, number) is not None
        else {}
    )


def unread(config: Any) -> list[Name]:
    """Return what files hold of layers that read another one's keys and values: those that they do not make."""
    return [
        part.below(Name(f"model.layers.{i}", f"blk.{i}"))
        for i in range(config.num_hidden_layers)
        if reads(config, i) is not None
        for part in (ATTENTION.k, ATTENTION.v, ATTENTION.k_norm)
        if part is not None
    ]


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Files state the heads of full layers, and lists by layer."""
    full, pattern = fields["rope_parameters"], value("attention.sliding_window_pattern")
    types = (
        [SLIDING if slides else "full_attention" for slides in pattern]
        if isinstance(pattern, list)
        else None
    )

    heads, widths = value("attention.head_count_kv"), value("feed_forward_length")
    added: dict[str, Any] = {
        "layer_types": types,
        "rope_parameters": {
            "full_attention": full,
            SLIDING: {
                "rope_type": "default",
                "rope_theta": value("rope.freq_base_swa") or 10_000.0,
            },
        },
        "global_head_dim": fields["head_dim"],
        "head_dim": value("attention.key_length_swa") or fields["head_dim"],
        "num_kv_shared_layers": fields["num_kv_shared_layers"] or 0,
        "hidden_size_per_layer_input": fields["hidden_size_per_layer_input"] or 0,
        "vocab_size_per_layer_input": fields["vocab_size"],
        "enable_moe_block": bool(fields["num_experts"]),
        "use_double_wide_mlp": isinstance(widths, list) and widths[-1] == 2 * widths[0],
    }
    if isinstance(heads, list) and types is not None:
        # the first one of each type
        by_type = dict(zip(reversed(types), reversed(heads), strict=False))
        added |= {
            "num_key_value_heads": by_type.get(SLIDING, heads[0]),
            "num_global_key_value_heads": by_type.get("full_attention"),
        }
        if added["num_kv_shared_layers"] == len(types):  # of an assistant, which has none itself
            added["attention_k_eq_v"] = True
    return added


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=ATTENTION),
    alone=alone,
    sizes_at=sizes_at,
    fields=Fields(activation="hidden_activation"),
    factors=factors,
    neutral={"use_bidirectional_attention": "vision"},
    unread=unread,
    gguf=GGUF(
        "gemma4",
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        by_layer=("attention.head_count_kv", "feed_forward_length"),
        without={"attention_k_eq_v": "attn_v.weight"},
        proportional=True,
        finish=finish,
    ),
)
