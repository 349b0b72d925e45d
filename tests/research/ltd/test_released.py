"""Networks that Learning to Draft's authors published become files of the policy."""

from __future__ import annotations

import zipfile
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from research.ltd.__main__ import main
from research.ltd.observations import best_actions
from research.ltd.released import load
from specengine import policies
from specengine.errors import InputError
from specengine.policies import _ltd
from specengine.policies._ltd import LtdShape


def released(
    file: Path, which: str, actions: int, zipped: bool = True, **more: Tensor
) -> dict[str, Tensor]:
    """A policy in the names of Stable-Baselines3, critic included."""
    inputs, hidden = LtdShape().inputs[which], [16] if which == "depth" else [16, 8]
    sizes = [inputs, *hidden]
    state: dict[str, Tensor] = {}
    for part in ("policy_net", "value_net"):
        for layer, (a, b) in enumerate(pairwise(sizes)):
            state[f"mlp_extractor.{part}.{2 * layer}.weight"] = torch.randn(b, a) * 0.1
            state[f"mlp_extractor.{part}.{2 * layer}.bias"] = torch.randn(b)
    for head, outputs in (("action_net", actions), ("value_net", 1)):
        state[f"{head}.weight"], state[f"{head}.bias"] = (
            torch.randn(outputs, sizes[-1]),
            torch.randn(outputs),
        )
    state |= more
    if not zipped:
        torch.save(state, file)
        return state
    inner = BytesIO()
    torch.save(state, inner)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("policy.pth", inner.getvalue())
        archive.writestr("data", "{}")
    return state


@pytest.mark.parametrize(("actions", "sizes"), [(24, range(10, 241, 10)), (12, range(20, 241, 20))])
def test_released_networks_load(tmp_path: Path, actions: int, sizes: range) -> None:
    depth, size = tmp_path / "depth.zip", tmp_path / "size.pth"
    released(depth, "depth", 2)
    state = released(size, "size", actions, zipped=False)
    file = tmp_path / "networks.safetensors"
    assert main(["convert", str(depth), str(size), str(file)]) == 0
    policy = policies.make("ltd", networks=str(file))
    assert policy.budget == 241
    networks = _ltd.load(str(file)).networks
    assert (networks.shape.sizes, networks.shape.pad, networks.activation) == (
        tuple(sizes),
        0.0,
        "tanh",
    )
    assert networks.shape.best_first
    seen = torch.randn(3, 1268)
    hidden = seen
    for layer in ("mlp_extractor.policy_net.0", "mlp_extractor.policy_net.2"):
        hidden = torch.tanh(hidden @ state[f"{layer}.weight"].T + state[f"{layer}.bias"])
    expected = hidden @ state["action_net.weight"].T + state["action_net.bias"]
    assert torch.equal(best_actions(networks, "size", seen), expected.argmax(-1))


def test_other_released_files_are_refused(tmp_path: Path) -> None:
    depth, size = tmp_path / "depth.zip", tmp_path / "size.zip"
    released(depth, "depth", 2)
    released(size, "size", 7)
    with pytest.raises(InputError, match="has 7 actions, accepted 24 or 12"):
        load(depth, size)
    released(size, "size", 24, log_std=torch.zeros(1))
    with pytest.raises(InputError, match=r"unused: size\.log_std"):
        load(depth, size)
    released(size, "size", 24)
    with pytest.raises(InputError, match=r"mis-shaped: depth.0.weight"):
        load(size, size)
    size.write_text("no zip")
    with pytest.raises(InputError, match="is not a policy saved by Stable-Baselines3"):
        load(depth, size)
