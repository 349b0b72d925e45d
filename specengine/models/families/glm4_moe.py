"""GLM-4.5 and 4.6: experts after the first layers, and one for all tokens; half of a head turned."""

from typing import Any

from specengine.models.families import (
    Attention,
    Experts,
    Family,
    Layer,
    Name,
    by_sigmoid,
    shared_experts,
)

PLAIN = Attention(partial=True)
NORMED = Attention(
    q_norm=Name("self_attn.q_norm", "attn_q_norm"),
    k_norm=Name("self_attn.k_norm", "attn_k_norm"),
    partial=True,
)
CHOICE = "mlp.gate.e_score_correction_bias"


def layer(config: Any, number: int) -> Layer:
    attention = NORMED if config.use_qk_norm else PLAIN
    if number < config.first_k_dense_replace:
        return Layer(attention=attention)
    routing = by_sigmoid(config)
    experts = Experts(
        config.n_routed_experts,
        config.moe_intermediate_size,
        routing,
        choice=Name(CHOICE, "exp_probs_b.bias"),
        shared=shared_experts("shared_experts"),
        shared_inner=config.moe_intermediate_size * config.n_shared_experts,
    )
    return Layer(attention=attention, mlp=experts)


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=PLAIN),
    alone=lambda config, number: {
        "first_k_dense_replace": int(number < config.first_k_dense_replace)
    },
    exact=(CHOICE,),
)
