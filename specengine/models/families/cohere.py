"""Command R, Aya: the layers of Command R7B, all of which turn channels and none of which has a window."""

from dataclasses import replace

from specengine.models.families import GGUF, Attention, Layer
from specengine.models.families.cohere2 import FAMILY as SECOND

FAMILY = replace(
    SECOND,
    layer=Layer(attention=Attention(neighbours=True), mlp_norm=None),
    gguf=GGUF(
        "command-r",
        keys={"logit_scale": "logit_scale"},
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    neutral={"use_qk_norm": False},
)
