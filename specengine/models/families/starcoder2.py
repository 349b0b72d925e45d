"""StarCoder 2: layer norms with biases, a network without a gate, and one window for all layers."""

from specengine.models.families import GGUF, Attention, Family, Fields, Layer, Name, PlainMLP

FAMILY = Family(
    layer=Layer(
        attention=Attention(windows="all"),
        mlp=PlainMLP(up=Name("mlp.c_fc", "ffn_up"), down=Name("mlp.c_proj", "ffn_down")),
    ),
    fields=Fields(eps="norm_epsilon"),
    gguf=GGUF(
        "starcoder2",
        flags={"use_bias": "attn_q.bias"},
        finish=lambda fields, value: {"sliding_window": None},  # files have none, as llama.cpp
    ),
    layer_norms=True,
)
