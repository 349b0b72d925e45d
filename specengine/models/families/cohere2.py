"""Command R7B, Command A: attention and network of one layer norm; layers with windows turn channels, others do not."""

from specengine.models.families import GGUF, SLIDING, Attention, Factors, Family, Fields, Layer

FAMILY = Family(
    layer=Layer(
        attention=Attention(
            windows="by type",
            turns=lambda config, layer: config.layer_types[layer] == SLIDING,
            neighbours=True,
        ),
        mlp_norm=None,
    ),
    fields=Fields(eps="layer_norm_eps"),
    gguf=GGUF(
        "cohere2", keys={"attention.sliding_window": "sliding_window", "logit_scale": "logit_scale"}
    ),
    layer_norms=True,
    parallel=lambda config: True,
    factors=lambda config: Factors(divisor=1 / config.logit_scale),
)
