"""Networks that Learning to Draft's authors published, as Stable-Baselines3 saves policies, for the policy ltd."""

from __future__ import annotations

import argparse
import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from research.ltd.files import hidden_of, save
from specengine.errors import InputError, require_input, why_not_loaded
from specengine.policies import _ltd
from specengine.policies._classifier import filled

# the code's actions, the paper's
SIZES = {24: tuple(range(10, 241, 10)), 12: tuple(range(20, 241, 20))}
LAYERS = "mlp_extractor.policy_net."
CRITIC = ("mlp_extractor.value_net.", "value_net.")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Write the pair to a file that `networks=` of the policy ltd reads."""
    networks = load(args.depth, args.size)
    save(args.file, networks, {"source": f"{args.depth.name}, {args.size.name}"})
    yield {"record": "networks", "file": str(args.file), "hidden": hidden_of(networks)}


def load(depth: Path, size: Path) -> _ltd.Networks:
    """Load two policies that Stable-Baselines3 saved, as the paper's code does: tanh units, padded with zeros,
    a level's parents best first.

    InputError where a file is none of these, or has other tensors.
    """
    actors = {name: _actor(file, name) for name, file in (("depth", depth), ("size", size))}
    actions = len(actors["size"]["action_net.bias"]) if "action_net.bias" in actors["size"] else 24
    require_input(
        f"{size} has {actions} actions, accepted {' or '.join(map(str, SIZES))}", actions in SIZES
    )
    shape = _ltd.LtdShape(sizes=SIZES[actions], pad=0.0, best_first=True)
    hidden = {name: _hidden(actor) for name, actor in actors.items()}
    state = {
        f"{name}.{key}": tensor
        for name, actor in actors.items()
        for key, tensor in as_network(actor).items()
    }
    return filled(_ltd.Networks(shape, hidden, "tanh"), state, f"{depth}, {size}")


def _actor(file: Path, name: str) -> dict[str, Tensor]:
    """Load the tensors of the policy network from a .zip of Stable-Baselines3, or from the state dict in it."""
    try:
        with zipfile.ZipFile(file) as opened:
            source = (
                io.BytesIO(opened.read("policy.pth")) if "policy.pth" in opened.namelist() else file
            )
        state = torch.load(source, map_location="cpu", weights_only=True)
        if not isinstance(state, Mapping) or not all(
            isinstance(value, Tensor) for value in state.values()
        ):
            raise ValueError("it holds other things than tensors")
    except (
        OSError,
        zipfile.BadZipFile,
        UnpicklingError,
        RuntimeError,
        ValueError,
        EOFError,
    ) as error:
        raise InputError(
            f"{file} ({name}) is not a policy saved by Stable-Baselines3 ({why_not_loaded(error)})"
        ) from error
    return actor_of(state)


def actor_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a Stable-Baselines3 policy that its actions depend on."""
    return {key: tensor for key, tensor in state.items() if not key.startswith(CRITIC)}


def _hidden(actor: Mapping[str, Tensor]) -> list[int]:
    return [
        len(actor[key])
        for key in sorted(actor, key=_number)
        if key.startswith(LAYERS) and key.endswith(".bias")
    ]


def as_network(actor: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of an actor to those of a network here. Unknown ones keep their names, to be reported."""
    return {
        key.removeprefix(LAYERS).replace("action_net.", f"{2 * len(_hidden(actor))}."): tensor
        for key, tensor in actor.items()
    }


def _number(key: str) -> int:
    number = key.removeprefix(LAYERS).partition(".")[0]
    return int(number) if number.isdecimal() else -1
