"""Gemma 4's assistants draft what transformers' class of them says, and answers stay the target's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
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
from specengine.errors import CheckpointError, InputError, UnsupportedModelError
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from tests.checkpoints.gguf_files import finish
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
    # transformers 5.23 makes no model all of whose layers read keys of another one; 5.17, without this property, does
    if modes := getattr(text, "kv_sharing_modes", None):
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


# ---- in GGUF files


LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
    **{
        f"model.layers.{number}.{module}.weight": f"blk.{number}.{stored}.weight"
        for number in range(3)
        for module, stored in LAYERS.items()
    },
    **{
        f"model.layers.{number}.layer_scalar": f"blk.{number}.layer_output_scale.weight"
        for number in range(3)
    },
}


def in_file(
    model: PreTrainedModel,
    path: Path,
    changes: dict[str, Any] | None = None,
    more: dict[str, np.ndarray | None] | None = None,
) -> Path:
    """Write an assistant as llama.cpp's converter does; changes: of keys; more: tensors; what is None goes."""
    text = model.config.get_text_config()
    writer = GGUFWriter(path, "gemma4-assistant")
    values: dict[str, Any] = {
        "block_count": 3,
        "nextn_predict_layers": 3,
        "context_length": 256,
        "embedding_length": 24,
        "embedding_length_out": model.config.backbone_hidden_size,
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": 40,
        "attention.head_count": 4,
        "attention.head_count_kv": [2, 2, 1] if text.attention_k_eq_v else 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.key_length_swa": 8,
        "attention.value_length_swa": 8,
        "attention.layer_norm_rms_epsilon": float(text.rms_norm_eps),
        "attention.shared_kv_layers": 3,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [True, True, False],
        "rope.dimension_count": 16,
        "rope.dimension_count_swa": 8,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        **(changes or {}),
    }
    adders: dict[Any, Any] = {
        int: writer.add_uint32,
        list: writer.add_array,
        str: writer.add_string,
    }
    for key, value in values.items():
        if value is not None:
            adders.get(type(value), writer.add_float32)(f"gemma4-assistant.{key}", value)
    full = text.rope_parameters[FULL]
    assert (full["rope_theta"], full["partial_rotary_factor"]) == (1e6, 0.25)
    tensors: dict[str, Any] = {
        NAMES[name]: tensor.float().numpy()
        for name, tensor in model.state_dict().items()
        if name in NAMES
    }
    tensors["rope_freqs.weight"] = np.array([1.0] * 2 + [1e30] * 6, np.float32)
    for name, numbers in (tensors | (more or {})).items():
        if numbers is not None:
            writer.add_tensor(name, numbers)
    return finish(writer, path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shares", [True, False])
def test_a_file_drafts_as_its_folder_does(
    backend: str, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"attention_k_eq_v": shares, "num_global_key_value_heads": 1 if shares else None}
    target = tiny("gemma4_text", **heads)
    draft = assistant(tmp_path / "folder", monkeypatch, **heads)
    path = in_file(draft, tmp_path / "assistant.gguf")
    prompt, drafted = prompt_of(40), []
    for place in (tmp_path / "folder", path):
        engine = Engine.from_pretrained(target, str(place), "eagle", backend=backend, lookup=False)
        assert engine.drafter.name == "assistant"
        for options in ({}, {"do_sample": True, "seed": 3}):
            cycles = [*engine.answer(prompt, max_new_tokens=12, eos_token_id=[], **options)]
            trees = [
                (cycle.tree.tokens.tolist(), cycle.tree.log_probs.tolist()) for cycle in cycles
            ]
            drafted.append((trees, [token for cycle in cycles for token in cycle.tokens]))
    assert drafted[:2] == drafted[2:]
    assert drafted[0][1] == plainly(target, prompt, 12)
    plain = Engine.from_pretrained(target, "none", backend=backend)
    sampled = plain.generate(prompt, max_new_tokens=12, eos_token_id=[], do_sample=True, seed=3)
    assert drafted[1][1] == sampled.token_ids


DAMAGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": (
        {},
        {"blk.1.attn_q.weight": None},
        r"missing: model\.layers\.1\.self_attn\.q_proj\.weight",
    ),
    "a projection": (
        {},
        {"nextn.post_projection.weight": np.ones((32, 25), np.float32)},
        r"post_projection\.weight \[32, 25\], not \[32, 24\]",
    ),
    "unused": (
        {},
        {"blk.0.attn_k.weight": np.ones((16, 24), np.float32)},
        r"unknown: blk\.0\.attn_k\.weight",
    ),
    "layers": ({"nextn_predict_layers": 2}, {}, "must be block_count, 3; it is 2"),
    "no pattern": ({"attention.sliding_window_pattern": None}, {}, "must be a list by layer"),
    "a short pattern": ({"attention.sliding_window_pattern": [True, False]}, {}, "layer"),
    "no outer width": (
        {"embedding_length_out": None},
        {},
        "embedding_length_out must be a positive",
    ),
    "unknown": ({"attention.twist": 2}, {}, r"attention\.twist = 2 is not known"),
    "no factors": ({}, {"rope_freqs.weight": np.ones(8, np.float32) / 2}, "rope_freqs"),
}


def test_files_for_bfloat16_targets_may_hold_clusters(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = {
        "masked_embd_centroids.weight": np.ones((26, 24), np.float32),
        "masked_embd_ordering": np.arange(VOCABULARY, dtype=np.float32),
    }
    draft = assistant(tmp_path / "folder", monkeypatch)
    path = str(in_file(draft, tmp_path / "assistant.gguf", more=clusters))
    target = target.bfloat16()
    plain = Engine.from_pretrained(target, "none", backend="huggingface")
    engine = Engine.from_pretrained(target, path, "eagle", backend="huggingface", lookup=False)
    answer = engine.generate(prompt_of(30), max_new_tokens=12, eos_token_id=[])
    expected = plain.generate(prompt_of(30), max_new_tokens=12, eos_token_id=[])
    assert answer.token_ids == expected.token_ids
    assert answer.stats.num_draft_tokens


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_files_are_refused(
    case: str, target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, more, message = DAMAGES[case]
    draft = assistant(tmp_path / "folder", monkeypatch)
    path = in_file(draft, tmp_path / "assistant.gguf", changes, more)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        Engine.from_pretrained(target, str(path))


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
