"""`specengine export`: heads as other engines read them, which read back here as the same heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.checkpoints import embedded
from specengine.checkpoints.eagle import Checkpoint, load_head, save_head, writer
from specengine.cli import main
from specengine.cli.commands import FORMATS, make_parser
from specengine.models.eagle import causal, head_from
from tests.checkpoints.layouts import LAYER_IDS, same
from tests.toy import CPU, head_config, random_state, tiny

LAYERS = 6


@pytest.fixture
def target(tmp_path: Path) -> str:
    tiny(num_hidden_layers=LAYERS).save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def saved(folder: Path, **changes: Any) -> str:
    config = head_config(**changes)
    save_head(config, random_state(config), folder)
    return str(folder)


def logits(head: Checkpoint) -> Tensor:
    made = head_from(head.config, head.state, torch.float32, CPU)
    random = torch.Generator().manual_seed(1)
    features = torch.randn(
        1, 9, head.config.num_features * head.config.target_hidden_size, generator=random
    )
    embeddings = torch.randn(1, 9, head.config.hidden_size, generator=random)
    with torch.inference_mode():
        found = made.logits(made(made.fuse(features), embeddings, torch.arange(9)[None], causal))
    assert found is not None
    return found


@pytest.mark.parametrize("layout", ["speculators", "eagle"])
@pytest.mark.parametrize(
    "changes", [{}, {"norm_before_residual": True, "fusion_norm": "each"}, {"layer_ids": (1, 4)}]
)
def test_an_exported_head_reads_back_with_the_same_logits(
    tmp_path: Path, target: str, layout: str, changes: dict[str, Any], capsys: Any
) -> None:
    head, out = saved(tmp_path / "head", **changes), tmp_path / "out"
    assert main(["export", head, str(out), "--format", layout, "--target", target]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    before, after = load_head(head), load_head(out)
    assert after.config == replace(before.config, layer_ids=before.config.feature_ids(LAYERS))
    assert same(after.state, before.state)
    assert torch.equal(logits(before), logits(after))
    assert after.dialect.layout == ("official" if layout == "eagle" else layout)


def test_what_vllm_asks_of_the_speculators_layout_is_there(tmp_path: Path, target: str) -> None:
    out = tmp_path / "out"
    head = saved(tmp_path / "head")
    assert main(["export", head, str(out), "--target", target, "--tokens", "5"]) == 0
    raw = json.loads((out / "config.json").read_text())
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert raw["speculators_config"]["verifier"] == {
        "architectures": ["LlamaForCausalLM"],
        "name_or_path": target,
    }
    assert raw["transformer_layer_config"]["model_type"] == "llama"
    assert raw["transformer_layer_config"]["num_aux_hidden_states"] == 3
    assert (
        raw["norm_before_residual"] is False
    )  # where it is missing vLLM takes it as true, speculators as false
    assert raw[LAYER_IDS] == [2, 3, 3]  # of six layers
    assert (raw["draft_vocab_size"], raw["dtype"]) == (head_config().draft_vocab_size, "float32")


def test_sglang_is_told_the_dtype_and_the_layers_whose_output_is_read(
    tmp_path: Path, target: str
) -> None:
    out = tmp_path / "out"
    head = saved(tmp_path / "head", layer_ids=(1, 3, 5))
    assert main(["export", head, str(out), "--format", "eagle", "--target", target]) == 0
    raw = json.loads((out / "config.json").read_text())
    assert (raw["torch_dtype"], raw["architectures"]) == ("float32", ["LlamaForCausalLMEagle3"])
    assert raw["eagle_config"] == {LAYER_IDS: [0, 2, 4]}


@pytest.mark.parametrize(("reader", "layout"), [("vllm", "speculators"), ("sglang", "official")])
def test_a_format_goes_by_who_reads_it(reader: str, layout: str) -> None:
    parsed = make_parser().parse_args(["export", "head", "folder", "--format", reader])
    assert FORMATS[parsed.format] == layout


def test_the_eagle_format_needs_no_target(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", saved(tmp_path / "head"), str(out), "--format", "eagle"]) == 0
    assert LAYER_IDS not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize(("name", "layout"), [(embedded.NAME, "eagle"), (embedded.HEAD, "sglang")])
def test_the_shipped_head_goes_by_its_name_and_the_default_models(
    name: str, layout: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["export", name, str(out), "--format", layout, "--offline"]) == 0
    shipped = embedded.draft_head(embedded.NAME)
    assert shipped is not None
    assert same(load_head(out).state, load_head(shipped).state)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "{head} {out}",
            "target: got None, accepted the name of the model that the head was made for",
        ),
        (
            "{head} {out} --target {target} --tokens 0",
            "tokens: got 0, accepted a whole number, 1 to 64",
        ),
        (
            "{head} {out} --target {target} --tokens 65",
            "tokens: got 65, accepted a whole number, 1 to 64",
        ),
        ("{head} {out} --format eagle --tokens 3", "tokens: the eagle format has no field for it"),
        ("{head} {head} --target {target}", "accepted a new or an empty folder"),
        ("{target} {out} --target {target}", "accepted a folder or Hub id of an EAGLE head"),
        (
            "./nowhere {out} --target {target}",
            "head: got ./nowhere, accepted a folder or Hub id of an EAGLE head",
        ),
        ("{head} {out} --target ./nowhere", "target: ./nowhere: there is no such file or folder"),
        ("{head} {out} --target {other}", "made for a target with hidden size 32, this one has 48"),
        (
            "{head} {out} --target {shallow}",
            "a target of 2 layers has 0 to 1 before its final norm",
        ),
        (
            "{head} {out} --target {target} --draft-option layers=1",
            "draft_options: unknown option 'layers'",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path, target: str, given: str, said: str, capsys: Any
) -> None:
    tiny(num_hidden_layers=LAYERS, hidden_size=48, intermediate_size=64).save_pretrained(
        tmp_path / "other"
    )
    tiny(num_hidden_layers=2).save_pretrained(tmp_path / "shallow")
    head = saved(tmp_path / "head")
    before = sorted(tmp_path.rglob("*"))
    places = {"head": head, "out": tmp_path / "out", "target": target}
    places |= {name: tmp_path / name for name in ("other", "shallow")}
    assert main(["export", *given.format(**places).split()]) == 2
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("eagle", {"norm_before_residual": True}, "SGLang ignores norm_before_residual"),
        (
            "eagle",
            {"norm_logits": False},
            "vLLM knows no head whose logits are read before the final norm",
        ),
        ("eagle", {"qkv_bias": True, "o_bias": True}, "SGLang drops the biases"),
        ("eagle", {"qkv_bias": True}, "vLLM drops biases that only some"),
        (
            "speculators",
            {"hidden_act": "gelu"},
            "vLLM runs no hidden_act but silu, this head has gelu",
        ),
        ("speculators", {"version": 1}, "vLLM and speculators have no reader of EAGLE-1"),
    ],
)
def test_what_a_reader_would_not_do_is_said(
    tmp_path: Path, target: str, layout: str, changes: dict[str, Any], said: str, capsys: Any
) -> None:
    head = saved(tmp_path / "head", **changes)
    assert (
        main(["export", head, str(tmp_path / "out"), "--format", layout, "--target", target]) == 0
    )
    assert f"specengine: warning: {said}" in capsys.readouterr().err


def test_the_usual_head_is_read_as_it_means_everywhere() -> None:
    usual = head_config(layer_ids=(2, 3, 4))
    assert writer("official").unread(usual) == writer("speculators").unread(usual) == []
