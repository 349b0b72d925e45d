"""The files of a pair of networks, as `networks=` of the policy ltd reads them, are written here."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specengine.policies._classifier import write
from specengine.policies._ltd import FORMAT, Networks


def save(
    file: Path, networks: Networks, facts: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    """Write a pair; `facts` are JSON values, for the record."""
    stored = {
        "format": FORMAT,
        "kind": "ltd",
        "shape": asdict(networks.shape),
        "hidden": hidden_of(networks),
        "activation": networks.activation,
        **facts,
    }
    write(file, networks, stored, dtype)


def hidden_of(networks: Networks) -> dict[str, list[int]]:
    """Return the units of the hidden layers of each network."""
    pairs = {"depth": networks.depth, "size": networks.size}
    return {
        name: [layer.out_features for layer in network if isinstance(layer, nn.Linear)][:-1]
        for name, network in pairs.items()
    }
