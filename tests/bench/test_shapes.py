"""Forwards at published shapes with random weights: sizes are the models', and what is extrapolated says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cpu import shapes
from bench.cpu.shapes import SHAPES, RandomSource, Shape, Untried, config_of, parameters_of
from specengine.costs import find_costs
from specengine.models.configs import layer_template
from specengine.models.native import NativeTarget
from specengine.ops.tree import TokenTree
from tests.models.native_engines import needs_extension

SMALL = {
    "qwen3.5-0.8b": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
    "lfm2-1.2b": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt-oss-20b": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    | {"head_dim": 32, "num_local_experts": 6},
    "qwen3-30b-a3b": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
    | {"num_experts": 16, "num_key_value_heads": 2},
}
BILLIONS = {  # as published
    "llama-3.1-8b": (7.9, 8.2),
    "qwen3.5-0.8b": (0.7, 0.9),
    "qwen3.5-2b": (1.8, 2.1),
    "lfm2-1.2b": (1.1, 1.25),
    "gpt-oss-20b": (20.5, 21.2),
    "qwen3-30b-a3b": (30.0, 31.0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_sizes(name: str) -> None:
    least, most = BILLIONS[name]
    config = config_of(SHAPES[name], SHAPES[name].config["num_hidden_layers"])
    assert least < parameters_of(config) / 1e9 < most


@pytest.mark.sliced(2)
@needs_extension
@pytest.mark.parametrize("kind", ["int8", "q4_0"])
@pytest.mark.parametrize("name", SMALL)
def test_a_cut_model_is_measured_and_extrapolated(
    name: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = SHAPES[name].config | SMALL[name] | {"vocab_size": 96}
    monkeypatch.setitem(SHAPES, name, Shape(small, 4))
    monkeypatch.setattr(shapes, "READ", 2**16)
    out = tmp_path / "shape.jsonl"
    assert (
        shapes.main(
            [
                name,
                "--kind",
                kind,
                "--rounds",
                "1",
                "--rows",
                "3",
                "--context",
                "6",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    found = json.loads(out.read_text().splitlines()[1])
    layers = small["num_hidden_layers"]
    assert (found["layers_run"], found["layers"], found["extrapolated"]) == (4, layers, True)
    for rows in ("1", "3"):
        more = (layers - 4) / 4 * found["ms_without_head"][rows]
        assert found["verify_ms_by_nodes"][rows] == pytest.approx(
            found["ms_of_layers_run"][rows] + more, abs=0.01
        )
    assert find_costs(str(out)).verify[3] == pytest.approx(found["verify_ms_by_nodes"]["3"] / 1e3)
    assert found["weights_mb"] >= found["weights_mb_of_layers_run"]
    assert f"4 of {layers}, extrapolated" in capsys.readouterr().out
    experts = found["experts_of_layers_run"]
    assert bool(experts) == ("experts" in str(small))
    if experts:  # rows choose experts of their own
        assert experts["3"] > 1.2 * experts["1"]
    assert ("i8" if kind == "int8" else "q4_0") in found["backend"]


@pytest.mark.sliced(1)
@needs_extension
@pytest.mark.parametrize("name", SMALL)
def test_random_weights_are_those_of_a_model(name: str) -> None:
    """All tensors are there, and logits are numbers that differ."""
    config = config_of(Shape(SHAPES[name].config | SMALL[name] | {"vocab_size": 96}, 4), 4)
    source = RandomSource(name, config, "int8")
    found = {weight.name: weight for weight in source.weights()}
    assert found.keys() == layer_template(config).keys()
    for key, shape in layer_template(config).items():
        numbers = found[key].rows(0, found[key].shape[0])
        assert numbers.numel() == torch.Size(shape).numel()
        assert numbers.float().isfinite().all()
    target = NativeTarget(Untried(source, quantize="int8", numerics="integer"))
    target.prefill([1, 2, 3])
    logits, _ = target.verify(TokenTree.root(5))
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_memory_is_not_that_of_floats() -> None:
    """Rows of all matrices of so many inputs come from one small pool."""
    source = RandomSource("qwen3-30b-a3b", config_of(SHAPES["qwen3-30b-a3b"], 2), "int8")
    for weight in source.weights():
        weight.rows(0, 2)
    pools: dict[Any, Any] = source._pools
    assert sum(pool.nbytes for pool in pools.values()) < 20e6
