"""GLM-4.5 and 4.6: experts after the first layers, and one for all tokens; half of a head turned."""

from typing import Any

from specengine.models.families import Attention, Family, GatedMLP, Layer, Name
from specengine.models.families.deepseek_v3 import CHOICE, experts

PLAIN = Attention(partial=True)
NORMED = Attention(
    q_norm=Name("self_attn.q_norm", "attn_q_norm"),
    k_norm=Name("self_attn.k_norm", "attn_k_norm"),
    partial=True,
)


def layer(config: Any, number: int) -> Layer:
    return Layer(
        attention=NORMED if config.use_qk_norm else PLAIN,
        mlp=GatedMLP() if number < config.first_k_dense_replace else experts(config),
    )


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=PLAIN),
    alone=lambda config, number: {
        "first_k_dense_replace": int(number < config.first_k_dense_replace)
    },
    exact=(CHOICE,),
)
