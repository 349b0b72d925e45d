"""Gemma 4's assistants draft what transformers' class of them says, and answers stay the target's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)

from specengine import Engine
from specengine.drafters.mtp import Mtp
from specengine.engine import Pool
from specengine.errors import CheckpointError, InputError
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from tests.models.native_engines import needs_extension, plainly
from tests.toy import VOCABULARY, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SWA, FULL, WINDOW = "sliding_attention", "full_attention", 24
BACKENDS = ["huggingface", pytest.param("native", marks=needs_extension)]
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": [SWA, SWA, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 3,
    "pad_token_id": None,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i) % VOCABULARY for i in range(length)]


# Targets, and the classes of their assistants.
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "gemma4_text": (Gemma4AssistantForCausalLM, Gemma4AssistantConfig, Gemma4TextConfig),
    "gemma4_unified_text": (
        Gemma4UnifiedAssistantForCausalLM,
        Gemma4UnifiedAssistantConfig,
        Gemma4UnifiedTextConfig,
    ),
}


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny("gemma4_text")


def assistant(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int = 32,
    kind: str = "gemma4_text",
    **changes: Any,
) -> PreTrainedModel:
    """Save a random assistant of a target of `size` channels; changes: of its text's config, or ordered: True."""
    made, whole, text = KINDS[kind]
    modes = text.kv_sharing_modes
    # transformers 5.23 makes no model all of whose layers read keys of another one
    monkeypatch.setattr(
        text,
        "kv_sharing_modes",
        property(
            lambda own: (
                ["reuse"] * 3
                if own.num_kv_shared_layers == 3 == own.num_hidden_layers
                else modes.fget(own)
            )
        ),
    )
    ordered = changes.pop("ordered", False)
    config = whole(
        text_config=text(**TEXT | changes),
        backbone_hidden_size=size,
        use_ordered_embeddings=ordered,
        num_centroids=VOCABULARY // 10,
        centroid_intermediate_top_k=4,
    )
    torch.manual_seed(5)
    model = made(config).eval()
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    model.save_pretrained(folder)
    monkeypatch.undo()
    return model


@torch.no_grad()
def reference(
    model: PreTrainedModel, draft: Any, tokens: list[int], child: int
) -> tuple[Tensor, Tensor]:
    """Return the logits of transformers' assistant behind all tokens, and behind a child as well."""
    out = model(
        torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True
    )
    place, state, found = torch.tensor([[len(tokens) - 1]]), out.hidden_states[-1][:, -1:], []
    for token in (tokens[-1], child):
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        given = torch.cat((embedded, state), dim=-1)
        step = draft(inputs_embeds=given, position_ids=place, shared_kv_states=out.shared_kv_states)
        state = step.last_hidden_state
        found.append(step.logits[0, 0])
    return found[0], found[1]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_those_of_transformers(
    target: PreTrainedModel,
    backend: str,
    ordered: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = assistant(tmp_path, monkeypatch, ordered=ordered)
    engine = Engine.from_pretrained(target, str(tmp_path), "eagle", backend=backend, lookup=False)
    drafter = engine.drafter
    assert type(drafter) is Mtp
    assert drafter.name == "assistant"
    engine.target.want(drafter.traits.features)
    for length in (12, WINDOW + 1, WINDOW + 2, WINDOW + 3, 60):
        tokens, child = prompt_of(length), 11
        engine.target.reset()
        drafter.reset()
        with torch.inference_mode():
            drafter.begin(tokens[:-1], engine.target.prefill(tokens[:-1]))
        tree = TokenTree.root(tokens[-1], 4)
        root = drafter.root(tree).logits[0]
        for token in (5, child):
            tree.add(torch.zeros(1, dtype=torch.int64), torch.tensor([token]), torch.zeros(1))
        below = drafter.step(tree, Nodes.of(torch.tensor([1, 2]))).logits
        expected = reference(target, draft, tokens, child)
        for found, wanted in zip((root, below[1]), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
        assert (below[0] - expected[1]).abs().max() > 1e-3  # of a sibling


@pytest.mark.sliced(1)
@pytest.mark.parametrize(
    ("backend", "policy"),
    [
        ("huggingface", "eagle"),
        pytest.param("native", "eagle", marks=needs_extension),
        pytest.param("native", "chain", marks=needs_extension),
    ],
)
def test_answers_are_those_of_the_model(
    target: PreTrainedModel,
    backend: str,
    policy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assistant(tmp_path, monkeypatch)
    engine = Engine.from_pretrained(target, str(tmp_path), policy, backend=backend, lookup=False)
    for prompt in (prompt_of(30), prompt_of(1), prompt_of(33)):
        answer = engine.generate(prompt, max_new_tokens=12, eos_token_id=[])
        assert answer.token_ids == plainly(target, prompt, 12)
        assert answer.stats.num_draft_tokens


@pytest.mark.sliced(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_assistants_of_every_kind_draft_from_folders_and_loaded(
    backend: str, loaded: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as transformers asks
    shared = {"num_hidden_layers": 6, "layer_types": [SWA, FULL] * 3, "num_kv_shared_layers": 3}
    heads = {field: TEXT[field] for field in ("num_global_key_value_heads", "attention_k_eq_v")}
    model, draft = tiny(kind, **shared, **heads), assistant(tmp_path, monkeypatch, kind=kind)
    assert draft.config.model_type == (
        "gemma4_assistant" if kind == "gemma4_text" else "gemma4_unified_assistant"
    )
    engine = Engine.from_pretrained(
        model, draft if loaded else str(tmp_path), "eagle", backend=backend, lookup=False
    )
    assert engine.drafter.name == "assistant"
    answer = engine.generate(prompt_of(30), max_new_tokens=12, eos_token_id=[])
    assert answer.token_ids == plainly(model, prompt_of(30), 12)
    assert answer.stats.num_draft_tokens
    tokens, child = prompt_of(30), 11
    engine.target.reset()
    engine.drafter.reset()
    with torch.inference_mode():
        engine.drafter.begin(tokens[:-1], engine.target.prefill(tokens[:-1]))
    found = engine.drafter.root(TokenTree.root(tokens[-1], 2)).logits[0]
    torch.testing.assert_close(
        found, reference(model, draft, tokens, child)[0], atol=2e-5, rtol=2e-5
    )


def test_assistants_of_other_targets_are_refused(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, changes, message in (
        ("size", {"size": 40}, "made for a target with hidden size 40"),
        ("heads", {"global_head_dim": 8}, "reads heads of 8 channels, the target keeps 1 of 16"),
    ):
        assistant(tmp_path / folder, monkeypatch, **changes)
        with pytest.raises(InputError, match=message):
            Engine.from_pretrained(target, str(tmp_path / folder))
    assistant(tmp_path / "llama", monkeypatch)
    with pytest.raises(InputError, match="reads the keys of Gemma 4; llama has none such"):
        Engine.from_pretrained(tiny("llama", hidden_size=32), str(tmp_path / "llama"))


def test_damaged_assistants_are_refused(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant(tmp_path, monkeypatch)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["post_projection.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: post_projection\.weight"):
        Engine.from_pretrained(target, str(tmp_path))


@needs_extension
def test_an_assistant_reads_the_keys_of_its_own_text(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, tokens = assistant(tmp_path, monkeypatch), prompt_of(40)
    pool = Pool(
        Engine.from_pretrained(target, str(tmp_path), "eagle", backend="native", lookup=False), 2
    )
    for number, engine in enumerate(
        pool.engines
    ):  # the second one ends with other keys in its cache
        engine.generate(tokens[number:], max_new_tokens=4, eos_token_id=[])
    for number, engine in enumerate(pool.engines):
        own = tokens[number : 30 + number]
        engine.target.want(engine.drafter.traits.features)
        with torch.inference_mode():
            engine.drafter.begin(own[:-1], engine.target.prefill(own[:-1], 0))
        found = engine.drafter.root(TokenTree.root(own[-1], 2)).logits[0]
        torch.testing.assert_close(
            found, reference(target, draft, own, 11)[0], atol=2e-5, rtol=2e-5
        )
