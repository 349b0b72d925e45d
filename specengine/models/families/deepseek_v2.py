"""DeepSeek-V2 and V2-Lite: latent attention, and experts that are chosen by the best of their groups, or of all."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specengine.models.families import (
    Experts,
    GatedMLP,
    Layer,
    Routing,
    deepseek_v3,
    latent_of,
    shared_experts,
)


def layer(config: Any, number: int) -> Layer:
    groups, kept_groups = (
        (config.n_group, config.topk_group)
        if config.topk_method == "group_limited_greedy"
        else (1, 1)
    )

    experts = Experts(
        config.n_routed_experts,
        config.moe_intermediate_size,
        Routing(
            config.num_experts_per_tok,
            "softmax",
            0.0,
            config.routed_scaling_factor,
            groups,
            kept_groups,
            rated=1,
        ),
        shared=shared_experts("shared_experts"),
        shared_inner=config.moe_intermediate_size * config.n_shared_experts,
    )
    return Layer(
        attention=latent_of(config, neighbours=True),
        mlp=GatedMLP() if number < config.first_k_dense_replace else experts,
    )


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Return what DeepSeek-V3 does, and how groups of experts are left out."""
    added = deepseek_v3.finish(fields, value)
    if added["norm_topk_prob"]:
        raise ValueError("expert_weights_norm is true, but experts are chosen by softmax")
    return added | {"topk_method": "group_limited_greedy" if added["n_group"] > 1 else "greedy"}


FAMILY = replace(
    deepseek_v3.FAMILY, layer=layer, gguf=replace(deepseek_v3.STORED, finish=finish), exact=()
)
