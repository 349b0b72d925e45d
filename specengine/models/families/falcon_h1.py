"""Falcon-H1: attention and Mamba-2 side by side in every layer, and numbers that multiply what most modules give."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specengine.models.families import (
    GGUF,
    Attention,
    Factors,
    Family,
    Layer,
    Mamba2,
    Scaled,
    bamba,
    mamba,
)

ATTENTION = replace(bamba.ATTENTION, attention=Attention())


def layer(config: Any, number: int) -> Layer:
    return replace(ATTENTION, mixer=mixer(config))


def mixer(config: Any) -> Mamba2:
    _, *factors, _ = config.ssm_multipliers
    return replace(
        mamba(config),
        norms=config.mamba_n_groups if config.mamba_rms_norm else 0,
        factors=tuple(factors),
        gated_last=config.mamba_rms_norm and config.mamba_norm_before_gate,
    )


def scaled(config: Any) -> Mapping[str, Scaled]:
    """Return what multiplies modules of layers; what is convolved has factors of its own."""
    attention, ssm = config.attention_in_multiplier, config.ssm_in_multiplier
    gates, *_, steps = config.ssm_multipliers
    gate, down = config.mlp_multipliers
    return {
        "self_attn.q_proj": Scaled(attention),
        "self_attn.k_proj": Scaled(attention, config.key_multiplier),
        "self_attn.v_proj": Scaled(attention),
        "self_attn.o_proj": Scaled(1.0, config.attention_out_multiplier),
        "mamba.in_proj_z": Scaled(ssm, gates),
        "mamba.in_proj_xbc": Scaled(ssm),
        "mamba.in_proj_dt": Scaled(ssm, steps),
        "mamba.out_proj": Scaled(1.0, config.ssm_out_multiplier),
        "mlp.gate_proj": Scaled(1.0, gate),
        "mlp.down_proj": Scaled(1.0, down),
    }


FAMILY = Family(
    layer=layer,
    attending=ATTENTION,
    kinds=("hybrid",),
    norm=bamba.FAMILY.norm,
    factors=lambda config: Factors(
        embedding=config.embedding_multiplier,
        divisor=1 / config.lm_head_multiplier
        if config.lm_head_multiplier
        else 0.0,  # which is refused
        by_token=True,
    ),
    scaled=scaled,
    gguf=GGUF(  # whose weights llama.cpp's converter has multiplied
        "falcon-h1",
        keys={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.inner_size": "mamba_d_ssm",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
        },
        flags={
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mlp_bias": "ffn_up.bias",
            "mamba_rms_norm": "ssm_norm.weight",
        },
        finish=lambda fields, value: {"mamba_norm_before_gate": False},
    ),
)
