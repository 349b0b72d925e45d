"""bench.layers runs every way at every width and takes a layer as the difference of two depths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench import layers
from specengine import ops
from specengine.models import fused
from tests import toy


def test_a_layer_is_the_difference_of_two_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device: what would be timed runs once, and counts its layers."""
    depth = [0]

    def model_of(count: int, kind: torch.dtype) -> torch.nn.Module:
        depth[0] = count
        return toy.tiny("llama", num_hidden_layers=count, vocab_size=3000).to(kind)

    monkeypatch.setattr(ops, "is_served", lambda *_: True)
    monkeypatch.setattr(fused, "DEVICES", ())
    ways = {
        name: (("cpu",) if devices else (), merge) for name, (devices, merge) in layers.WAYS.items()
    }
    monkeypatch.setattr(layers, "WAYS", ways)
    monkeypatch.setattr(layers, "DEPTHS", (1, 3))
    monkeypatch.setattr(layers, "CONTEXT", 30)
    monkeypatch.setattr(layers, "PROMPT", 30)
    monkeypatch.setattr(layers, "model_of", model_of)
    monkeypatch.setattr(layers, "captured", lambda run: SimpleNamespace(replay=run))
    monkeypatch.setattr(layers, "kernels", lambda run: (run(), 5 + 10 * depth[0])[1])
    monkeypatch.setattr(layers, "microseconds", lambda run: (run(), 2.0 + 4.0 * depth[0])[1])
    found = list(layers.records(torch.float32))
    assert [row["way"] for row in found[::4]] == ["modules", "fused", "merged"]
    assert [row["forward"] for row in found[:4]] == [
        "1 rows",
        "16 rows",
        "64 rows",
        "a prompt of 30",
    ]
    assert {(row["kernels of a layer"], row["us of a layer"], row["us"]) for row in found} == {
        (10.0, 4.0, 14.0)
    }
