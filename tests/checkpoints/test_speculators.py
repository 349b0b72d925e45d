"""Heads between here and the speculators library, both ways; skipped where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("speculators")

from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

from specengine.checkpoints.eagle import Checkpoint, Verifier, load_head, save_head
from specengine.models.eagle import causal, head_from
from tests.toy import CPU, VOCABULARY, head_config, random_state, tiny

LAYERS, ROWS = 6, 9
# its positions begin with 1, which rounds the rotations otherwise
NEAR = {"rtol": 1e-4, "atol": 1e-4}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"fusion_norm": "each"},
    {"fusion_norm": "whole", "norm_recurrent": True},
    {"qk_norm": True},
    {"qkv_bias": True, "o_bias": True},
    {"layer_ids": (1, 4)},
    {"draft_vocab_size": VOCABULARY},
    {"temperatures": (0.8, 1.25)},
    {"rope": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
]


@pytest.fixture
def target(tmp_path: Path) -> str:
    tiny(num_hidden_layers=LAYERS).save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def theirs(folder: Path) -> Eagle3DraftModel:
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(folder, config=config).eval()


def their_logits(model: Eagle3DraftModel, features: Tensor, tokens: Tensor) -> Tensor:
    """Return the logits of a pass over a whole text; the library itself returns only tokens."""
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _given, out: found.append(out))
    with torch.inference_mode():
        model(features, tokens, torch.zeros_like(tokens), ttt_steps=1)
    hook.remove()
    return found[0]


def our_logits(head: Checkpoint, table: Tensor, features: Tensor, tokens: Tensor) -> Tensor:
    made = head_from(head.config, head.state, torch.float32, CPU)
    with torch.inference_mode():
        states = made(
            made.fuse(features), table[tokens], torch.arange(tokens.shape[1])[None], causal
        )
        found = made.logits(states)
    assert found is not None
    return found


def some_input(features: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, ROWS), generator=random)
    return torch.randn(1, ROWS, features * 32, generator=random), tokens


@pytest.mark.parametrize("changes", VARIANTS)
def test_speculators_loads_our_export(tmp_path: Path, target: str, changes: dict[str, Any]) -> None:
    config = head_config(**({"layer_ids": (1, 3, 4)} | changes), own_embeddings=True)
    save_head(
        config,
        random_state(config),
        tmp_path / "head",
        "speculators",
        verifier=Verifier(target, tokens=4),
    )
    model, head = theirs(tmp_path / "head"), load_head(tmp_path / "head")
    assert model.config.speculators_config.proposal_methods[0].speculative_tokens == 4
    features, tokens = some_input(config.num_features)
    ours = our_logits(head, head.state["embed_tokens.weight"], features, tokens)
    torch.testing.assert_close(their_logits(model, features, tokens), ours, **NEAR)


def test_speculators_takes_missing_embeddings_from_the_target_that_the_export_names(
    tmp_path: Path, target: str
) -> None:
    config = head_config(layer_ids=(1, 3, 4))
    save_head(
        config, random_state(config), tmp_path / "head", "speculators", verifier=Verifier(target)
    )
    model, head = theirs(tmp_path / "head"), load_head(tmp_path / "head")
    model.load_verifier_weights()
    features, tokens = some_input(3)
    ours = our_logits(head, model.embed_tokens.weight, features, tokens)
    torch.testing.assert_close(their_logits(model, features, tokens), ours, **NEAR)


@pytest.mark.parametrize(
    ("layer", "changes"),
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"norm_before_residual": True, "fc_norm": True}),
        (Qwen3Config, {"norm_before_fc": True, "norm_output": True}),
    ],
)
def test_a_head_of_speculators_loads_here(
    tmp_path: Path, target: str, layer: Any, changes: dict[str, Any]
) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    shape = layer(**sizes, head_dim=8, vocab_size=VOCABULARY, num_hidden_layers=1)
    shape._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=shape,
        draft_vocab_size=200,
        eagle_aux_hidden_state_layer_ids=[1, 3, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            verifier=VerifierConfig.from_pretrained(target),
        ),
        **changes,
    )
    torch.manual_seed(0)
    made = Eagle3DraftModel(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(
                0.5 + torch.rand_like(weight) if "norm" in name else torch.randn_like(weight) * 0.3
            )
    ids = torch.randperm(VOCABULARY)[:200].sort().values
    made.load_vocab_mappings(
        torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True), ids - torch.arange(200)
    )
    made.save_pretrained(tmp_path / "head")
    head = load_head(tmp_path / "head")
    stated = json.loads((tmp_path / "head" / "config.json").read_text())
    assert head.config.norm_before_residual is stated["norm_before_residual"]
    assert head.config.layer_ids == (1, 3, 4)
    assert torch.equal(head.state["d2t"] + torch.arange(200), ids)
    features, tokens = some_input(3)
    ours = our_logits(head, head.state["embed_tokens.weight"], features, tokens)
    torch.testing.assert_close(
        their_logits(theirs(tmp_path / "head"), features, tokens), ours, **NEAR
    )
