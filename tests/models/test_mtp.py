"""Heads for multi-token prediction are read from checkpoints, and compute what transformers' MtpModel does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from specengine import Engine
from specengine.checkpoints import mtp
from specengine.drafters.mtp import Mtp
from specengine.errors import CheckpointError, InputError, UnsupportedModelError
from specengine.models.mtp import MtpHead, names_in_head, parts_in
from specengine.models.native.lm import NativeMtpHead
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from tests.models.mtp_checkpoints import NEMOTRON, NEXT_N, QWEN, checkpoint, edited
from tests.models.native_engines import needs_extension
from tests.sweep.serving import generated, prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[*NEXT_N, *QWEN, NEMOTRON])
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *checkpoint(request.param, folder)


def passed(head: Any, states: Tensor, places: Tensor, cache: Any, ids: Tensor) -> Tensor:
    """Return the states behind one pass of transformers' head."""
    if hasattr(head, "forward_layer"):
        return head.forward_layer(0, states, places, cache, input_ids=ids)
    # transformers 5.17 has one function for all passes of a draft; Qwen3.5's rotation takes three axes there
    embedded = head.embed_tokens(ids)
    axes = places.expand(3, -1, -1) if hasattr(head.rotary_emb, "mrope_section") else places
    return head.layers[0](
        embedded,
        states,
        position_embeddings=head.rotary_emb(embedded, position_ids=axes),
        position_ids=places,
        past_key_values=cache,
        **head.create_masks_for_mtp_layer(0, embedded, cache, places),
    )


@torch.no_grad()
def reference(
    model: PreTrainedModel, head: Any, tokens: list[int], child: int
) -> tuple[Tensor, Tensor]:
    """Return the logits of transformers' head behind all tokens, and behind a child as well: its state is read then."""
    ids = torch.tensor([tokens])
    states = model(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    cache: Any = MtpCache(config=head.config) if isinstance(head, MtpModel) else DynamicCache()
    places = torch.arange(1, len(tokens))[None]
    own = passed(head, states, places, cache, ids[:, 1:])
    after = torch.tensor([[child]]), torch.tensor([[len(tokens)]])
    below = passed(head, own[:, -1:], after[1], cache, after[0])
    return model.lm_head(own[0, -1]), model.lm_head(below[0, -1])


@pytest.mark.parametrize("backend", ["huggingface", pytest.param("native", marks=needs_extension)])
def test_logits_are_those_of_transformers(stored: tuple[Path, Any, Any], backend: str) -> None:
    folder, model, head = stored
    engine = Engine.from_pretrained(
        str(folder), "mtp", dtype=torch.float32, lookup=False, backend=backend
    )
    drafter, target, tokens = engine.drafter, engine.target, prompt_of(19)
    assert type(drafter) is Mtp
    assert type(drafter.head) is (NativeMtpHead if backend == "native" else MtpHead)
    target.want(drafter.traits.features)
    with torch.inference_mode():
        drafter.begin(tokens[:-1], target.prefill(tokens[:-1]))
    tree = TokenTree.root(tokens[-1], 4)
    root = drafter.root(tree).logits[0]
    other, child = 5, 11
    for token in (other, child):
        ids = torch.tensor([token])
        tree.add(torch.zeros(1, dtype=torch.int64), ids, torch.zeros(1))
    below = drafter.step(tree, Nodes.of(torch.tensor([1, 2]))).logits
    expected = reference(model, head, tokens, child)
    for found, wanted in zip((root, below[1]), expected, strict=True):
        # a target with a delta rule runs it row by row, its modules in chunks
        torch.testing.assert_close(found, wanted, atol=5e-5, rtol=2e-5)
    assert (below[0] - expected[1]).abs().max() > 1e-3  # of a sibling


@pytest.mark.sliced(3)
@pytest.mark.parametrize("policy", ["eagle", "auto", "chain"])
def test_answers_are_those_of_the_model(stored: tuple[Path, Any, Any], policy: str) -> None:
    folder, model, _ = stored
    prompt = prompt_of(30)
    engine = Engine.from_pretrained(str(folder), "mtp", policy, dtype=torch.float32)
    answer = engine.generate(prompt, max_new_tokens=24, eos_token_id=[])
    assert answer.token_ids == generated(model, prompt)
    assert answer.stats.num_draft_tokens or policy == "auto"


@pytest.mark.sliced(2)
def test_a_stored_head_is_the_default_draft(stored: tuple[Path, Any, Any]) -> None:
    folder, model, _ = stored
    assert "mtp" in Engine.from_pretrained(str(folder)).drafter.name
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert "mtp" in Engine.from_pretrained(loaded).drafter.name
    assert "recycling" in Engine.from_pretrained(model).drafter.name  # of no folder


def test_a_model_without_a_head_is_refused_by_name(tmp_path: Path) -> None:
    model, _ = checkpoint("glm4_moe", tmp_path)
    edited(tmp_path, lambda tensors: [tensors.pop(key) for key in parts_in(list(tensors), 2)])
    assert not mtp.is_stored(str(tmp_path), model)
    with pytest.raises(
        InputError,
        match=r"draft: got mtp, accepted where .* hold a head for multi-token prediction",
    ):
        Engine.from_pretrained(str(tmp_path), "mtp")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"), "missing: fc.weight"),
        (
            lambda tensors: tensors.update({"model.layers.2.gate.weight": torch.ones(2)}),
            "unknown: block.gate.weight",
        ),
        (
            lambda tensors: tensors.update({"model.layers.2.hnorm.weight": torch.ones(3)}),
            r"hidden_norm.weight \[3\]",
        ),
        (
            lambda tensors: tensors.pop("model.layers.2.mlp.experts.1.up_proj.weight"),
            "missing: .*experts.gate_up_proj",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_their_tensors(
    tmp_path: Path, change: Any, named: str
) -> None:
    checkpoint("glm4_moe", tmp_path)
    edited(tmp_path, change)
    with pytest.raises(
        CheckpointError, match=f"its MTP head does not fit the model's config; .*{named}"
    ):
        Engine.from_pretrained(str(tmp_path), "mtp")


def test_names_of_both_layouts() -> None:
    names = [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.shared_head.norm.weight",
        "model.layers.2.shared_head.head.weight",
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.self_attn.q_proj.bias",
        "model.layers.3.eh_proj.weight",
    ]
    assert parts_in(names, 2) == set(names[1:])
    assert not parts_in(["model.layers.2.mlp.up_proj.weight"], 2)  # a layer that the config lacks
    assert names_in_head(names, 2) == {
        "model.layers.2.eh_proj.weight": "fc.weight",
        "model.layers.2.shared_head.norm.weight": "norm.weight",
        "model.layers.2.self_attn.q_proj.bias": "block.self_attn.q_proj.bias",
    }
    qwen = [
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
        "mtp.layers.1.mlp.gate.weight",
    ]
    nemotron = [
        "mtp.layers.0.norm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.1.final_layernorm.weight",
    ]
    nemotron += ["mtp.layers.1.mixer.gate.weight", "mtp.layers.2.norm.weight"]
    assert names_in_head(nemotron, 4, 2) == {
        nemotron[0]: "block.0.norm.weight",
        nemotron[1]: "hidden_norm.weight",
        nemotron[2]: "norm.weight",
        nemotron[3]: "block.1.mixer.gate.weight",
    }
    assert set(names_in_head(qwen, 2).values()) == {
        "fc.weight",
        "norm.weight",
        "block.self_attn.q_proj.weight",
    }


@needs_extension
@pytest.mark.parametrize("name", ["qwen3_5_text", "glm4_moe"])
@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}])
def test_heads_of_rounded_models_draft_on_the_native_forward(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint(name, tmp_path)
    found = {}
    for draft, policy in (("mtp", "eagle"), ("none", None)):
        engine = Engine.from_pretrained(
            str(tmp_path),
            draft,
            policy,
            dtype=torch.bfloat16,
            backend="native",
            lookup=False,
            **options,
        )
        found[draft] = engine.generate(prompt_of(30), max_new_tokens=16, eos_token_id=[])
        assert draft == "none" or type(engine.drafter.head) is NativeMtpHead
    assert found["mtp"].token_ids == found["none"].token_ids
    assert found["mtp"].stats.num_draft_tokens


@needs_extension
def test_a_head_that_the_native_forward_lacks_runs_on_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint("qwen3_5_text", tmp_path)

    def refuse(*_: Any) -> None:
        raise UnsupportedModelError("native: no such block")

    monkeypatch.setattr("specengine.checkpoints.mtp.NativeMtpHead", refuse)
    engine = Engine.from_pretrained(
        str(tmp_path), "mtp", "eagle", dtype=torch.float32, lookup=False
    )
    assert type(engine.drafter.head) is MtpHead
    assert engine.generate(prompt_of(30), max_new_tokens=8).stats.num_draft_tokens
