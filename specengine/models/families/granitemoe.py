"""Granite 3 with experts: its factors, and a router in each layer."""

from typing import Any

from specengine.models.families import GGUF, Experts, Family, Layer, Name, Routing
from specengine.models.families.granite import FAMILY as DENSE

MLP = "block_sparse_moe"


def layer(config: Any, number: int) -> Layer:
    return Layer(
        mlp=Experts(
            config.num_local_experts,
            config.intermediate_size,
            Routing(config.num_experts_per_tok),
            router=Name(f"{MLP}.router", "ffn_gate_inp"),
            gate=Name(f"{MLP}.experts.gate_up_proj", "ffn_gate_exps.weight"),
            up=Name(f"{MLP}.experts.gate_up_proj", "ffn_up_exps.weight"),
            down=Name(f"{MLP}.experts.down_proj", "ffn_down_exps.weight"),
        )
    )


assert DENSE.gguf is not None
FAMILY = Family(
    layer=layer,
    gguf=GGUF(
        "granitemoe",
        keys={
            **DENSE.gguf.keys,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        flags={"attention_bias": "attn_q.bias"},
        pairs=DENSE.gguf.pairs,
    ),
    factors=DENSE.factors,
    renamed={
        f"{MLP}.input_linear.weight": f"{MLP}.experts.gate_up_proj",
        f"{MLP}.output_linear.weight": f"{MLP}.experts.down_proj",
        f"{MLP}.router.layer.weight": f"{MLP}.router.weight",
    },
)
