"""Granite 4: Mamba-2 in most layers, attention in the others, mostly without positions; with experts or without."""

from dataclasses import replace
from typing import Any

from specengine.models.families import Attention, Experts, GatedMLP, Layer, Mamba2, Name
from specengine.models.families import granitemoe as sparse

RECURRENT = "linear_attention"
ATTENTION = Layer(attention=Attention(turns=lambda config, layer: config.position_embedding_type == "rope"))


def shared(suffix: str) -> GatedMLP:
    """Return the network that all tokens use; suffix: of its names in GGUF files."""
    both = "shared_mlp.input_linear"
    return GatedMLP(
        Name(both, f"ffn_gate{suffix}"),
        Name(both, f"ffn_up{suffix}"),
        Name("shared_mlp.output_linear", f"ffn_down{suffix}"),
    )


def layer(config: Any, number: int) -> Layer:
    """Return the blocks of a layer."""
    own = replace(ATTENTION, mlp=shared(""))
    experts = sparse.layer(config, number).mlp
    if config.num_local_experts and isinstance(experts, Experts):
        inner = config.shared_intermediate_size
        own = replace(own, mlp=replace(experts, shared=shared("_shexp"), shared_inner=inner))
    if config.layer_types[number] != RECURRENT:
        return own
    mixer = Mamba2(
        taps=config.mamba_d_conv,
        groups=config.mamba_n_groups,
        heads=config.mamba_n_heads,
        size=config.mamba_d_state,
        head_size=config.mamba_d_head,
        norms=config.mamba_n_groups,
        limits=tuple(config.time_step_limit),
    )
    return replace(own, mixer=mixer)


FAMILY = replace(
    sparse.FAMILY,
    layer=layer,
    attending=ATTENTION,
    kinds=(RECURRENT,),
    sizes=lambda config: {"inner": config.shared_intermediate_size},
    gguf=None,
)
