"""Model families that the native forward runs: one file each, named as transformers' model type, with a `FAMILY`.

A family says which blocks a layer has, and what their tensors and sizes are called in transformers and in GGUF files.
csrc/cpu has the blocks. Models of other types run through transformers' modules.
"""

import functools
import importlib
import pkgutil

from specengine.models.families.blocks import (
    CONVOLUTIONS,
    GATED_NORMS,
    ROUTER_NORM,
    SLIDING,
    STATES,
    Attention,
    Experts,
    ExpertsWithDense,
    GatedDelta,
    GatedMLP,
    Latent,
    Layer,
    Mamba2,
    Name,
    OwnInputs,
    Place,
    PlainMLP,
    QueryFactors,
    Routes,
    Routing,
    Shape,
    ShortConvolution,
    by_sigmoid,
    latent_of,
    mamba,
    shared_experts,
)
from specengine.models.families.family import (
    GGUF,
    Factors,
    Family,
    Fields,
    Scaled,
    config_at,
    has_experts,
    latent_factors,
    scaled_context,
    stated,
)

__all__ = [
    "CONVOLUTIONS",
    "GATED_NORMS",
    "GGUF",
    "ROUTER_NORM",
    "SLIDING",
    "STATES",
    "Attention",
    "Experts",
    "ExpertsWithDense",
    "Factors",
    "Family",
    "Fields",
    "GatedDelta",
    "GatedMLP",
    "Latent",
    "Layer",
    "Mamba2",
    "Name",
    "OwnInputs",
    "Place",
    "PlainMLP",
    "QueryFactors",
    "Routes",
    "Routing",
    "Scaled",
    "Shape",
    "ShortConvolution",
    "by_sigmoid",
    "config_at",
    "has_experts",
    "known",
    "latent_factors",
    "latent_of",
    "mamba",
    "scaled_context",
    "shared_experts",
    "stated",
]


@functools.cache
def known() -> dict[str, Family]:
    """Return all families by model type."""
    return {
        module.name: importlib.import_module(f"{__name__}.{module.name}").FAMILY
        for module in pkgutil.iter_modules(__path__)
        if module.name not in ("blocks", "family")
    }
