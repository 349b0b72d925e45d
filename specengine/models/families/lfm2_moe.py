"""LFM2 with experts: the layers of LFM2, and experts after the first layers."""

from dataclasses import replace
from typing import Any

from specengine.models.families import Experts, Family, Layer, Name, Routing, lfm2

CHOICE = "feed_forward.expert_bias"


def layer(config: Any, number: int) -> Layer:
    scores = "normalised sigmoid" if config.norm_topk_prob else "sigmoid"
    experts = Experts(
        config.num_experts,
        config.moe_intermediate_size,
        Routing(config.num_experts_per_tok, scores, 1e-6, config.routed_scaling_factor),
        router=Name("feed_forward.gate", "ffn_gate_inp"),
        gate=Name("feed_forward.experts.gate_up_proj", "ffn_gate_exps.weight"),
        up=Name("feed_forward.experts.gate_up_proj", "ffn_up_exps.weight"),
        down=Name("feed_forward.experts.down_proj", "ffn_down_exps.weight"),
        choice=Name(CHOICE, "exp_probs_b.bias") if config.use_expert_bias else None,
    )
    blocks = lfm2.layer(config, number)
    return blocks if number < config.num_dense_layers else replace(blocks, mlp=experts)


FAMILY = replace(
    lfm2.FAMILY,
    layer=layer,
    alone=lambda config, number: {"num_dense_layers": int(number < config.num_dense_layers)},
    sizes=Family().sizes,
    exact=(CHOICE,),
    gguf=None,
)
