"""DeepSeek-V3 and R1: latent attention, experts behind the first layers, and one for all tokens."""

from typing import Any

from specengine.models.families import (
    Experts,
    Family,
    Latent,
    Layer,
    Name,
    Routing,
    latent_factors,
    latent_of,
    latent_sizes,
    shared_experts,
)

CHOICE = "mlp.gate.e_score_correction_bias"


def experts(config: Any) -> Experts:
    """Return the experts of a layer that has some."""
    routing = Routing(
        config.num_experts_per_tok,
        "normalised sigmoid" if config.norm_topk_prob else "sigmoid",
        1e-20,
        config.routed_scaling_factor,
        config.n_group,
        config.topk_group,
    )
    return Experts(
        config.n_routed_experts,
        config.moe_intermediate_size,
        routing,
        choice=Name(CHOICE, "exp_probs_b.bias"),
        shared=shared_experts("shared_experts"),
        shared_inner=config.moe_intermediate_size * config.n_shared_experts,
    )


def layer(config: Any, number: int) -> Layer:
    attention = latent_of(config, neighbours=bool(config.rope_interleave))
    if number < config.first_k_dense_replace:
        return Layer(attention=attention)
    return Layer(attention=attention, mlp=experts(config))


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=Latent()),
    sizes=latent_sizes,
    alone=lambda config, number: {"first_k_dense_replace": int(number < config.first_k_dense_replace)},
    factors=latent_factors,
    exact=(CHOICE,),
)
