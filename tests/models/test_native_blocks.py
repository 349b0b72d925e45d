"""Families of other blocks than Llama's: answers past windows are transformers' own, and bits hang on no other row."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine
from specengine.drafters.ngram import NGram
from specengine.errors import UnsupportedModelError
from specengine.models.extension import WITH_PAIRS, instruction_sets
from specengine.models.native import NativeLM, NativeTarget, from_model, weights
from specengine.ops.tree import TokenTree
from tests.models.native_engines import (
    INSTRUCTION_SETS,
    OTHERS,
    native_lm as lm_on,
    needs_extension,
    plainly,
)
from tests.models.native_variants import GEMMA4_EXPERTS, native_logits
from tests.toy import VOCABULARY, policy_for, random_tree, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
PROMPT = [(7 * i * i + 3 * i) % VOCABULARY for i in range(70)]
TYPES = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 20}),
    "ministral3": ("ministral3", {"sliding_window": 20}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "layer_types": TYPES[::-1]},
    ),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": TYPES}),
    "gemma3_text": ("gemma3_text", {"head_dim": 32}),
    "phi3": ("phi3", {"sliding_window": 33}),
    "smollm3": ("smollm3", {"use_sliding_window": True, "sliding_window": 24}),
    "olmo3": ("olmo3", {"hidden_size": 128}),
    "exaone4": ("exaone4", {}),
    "cohere2": ("cohere2", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 20}),
    "muse_glimmer_text": ("muse_glimmer_text", {}),
    "gemma4_text with experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gpt_oss of three queries a key": (
        "gpt_oss",
        {"num_attention_heads": 6},
    ),  # 16 queries end within a row
}


@cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    family, changes = WINDOWS.get(name, (name, {}))
    model = tiny(family, **changes).to(dtype)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            parameter.data *= 20  # enough for an answer to hang on whose they are
    return model


@cache
def lm_of(
    name: str, instructions: str | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> NativeLM:
    return lm_on(model_of(name, dtype), instructions, **options)


# ---------------------------------------------------------------------------------------------------- answers


@pytest.mark.sliced(4)
@pytest.mark.parametrize("name", [*WINDOWS, *(name for name in OTHERS if name not in WINDOWS)])
def test_answers_past_the_window_are_those_of_transformers(name: str) -> None:
    model = model_of(name)
    lm = from_model(model)
    assert lm.max_context == 256
    for draft, policy in ((None, None), (NGram(longest=3, shortest=1), policy_for("random", 7))):
        engine = Engine(NativeTarget(lm), draft, policy)
        assert engine.generate(PROMPT, max_new_tokens=40).token_ids == plainly(model, PROMPT, 40)


@pytest.mark.sliced(6)
@pytest.mark.parametrize(
    "name",
    [
        "gemma3_text",
        "gemma4_text",
        "smollm3",
        "ernie4_5",
        "ministral3",
        "glm4",
        "cohere2",
        "stablelm",
        "olmo3",
        "mixtral",
        "qwen3_moe",
        "olmoe",
        "lfm2",
        "lfm3",
        "qwen3_5_text",
        "muse_glimmer_text",
    ],
)
def test_folders_answer_so_too(name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path)
    engine = Engine.from_pretrained(str(tmp_path), "none", offline=True, backend="native")
    assert engine.generate(PROMPT, max_new_tokens=24).token_ids == plainly(
        model_of(name), PROMPT, 24
    )


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}])
def test_a_layer_of_each_kind_is_tried_at_load(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of("gemma3_text").save_pretrained(tmp_path)
    real = weights.rope_of

    def other(config: Any, key: str = "") -> tuple[Tensor, float]:
        frequencies, scale = real(config, key)
        return frequencies * (1.5 if key == "full_attention" else 1.0), scale

    monkeypatch.setattr(weights, "rope_of", other)
    with pytest.raises(
        UnsupportedModelError, match="gives other hidden states than its own modules"
    ):
        Engine.from_pretrained(str(tmp_path), "none", offline=True, backend="native", **options)


# ---------------------------------------------------------------------------------------------------- bits


@torch.inference_mode()
def alone(lm: NativeLM, tree: TokenTree) -> Tensor:
    """Return the logits of each node, decoded plainly after its path, one token at a time."""
    root, rows = int(tree.tokens[0]), []
    target = NativeTarget(lm)
    for node in range(len(tree)):
        path = [root, *tree.path_tokens(node)]
        target.prefill([*PROMPT, *path[:-1]])
        rows.append(target.verify(TokenTree.root(path[-1], 1))[0][0])
    return torch.stack(rows)


@pytest.mark.sliced(6)
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    "name",
    [
        *WINDOWS,
        "olmo2",
        "granite",
        "glm4",
        "stablelm",
        "mixtral",
        "qwen3_moe",
        "gemma4_text",
        "gemma4_text with experts",
    ],
)
def test_a_row_alone_has_the_bits_that_it_has_in_a_tree(name: str, instructions: str) -> None:
    lm = lm_of(name, instructions)
    for nodes in (2, 17, 64):
        tree = random_tree(nodes, nodes, VOCABULARY, root=3)
        assert torch.equal(native_logits(lm, PROMPT, tree), alone(lm, tree))


def test_the_control_a_window_changes_bits() -> None:
    tree = random_tree(17, 17, VOCABULARY, root=3)
    models = [tiny("mistral", sliding_window=window) for window in (20, 21, 200, None)]
    found = [native_logits(from_model(model), PROMPT, tree) for model in models]
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert (found[1] - found[2]).abs().max() > 1e-3
    assert torch.equal(found[2], found[3])


@pytest.mark.sliced(2)
@pytest.mark.parametrize(
    "name", [*WINDOWS, "gemma", "olmo2", "granite", "ernie4_5", "mixtral", "qwen3_moe"]
)
def test_integer_rows_have_the_same_bits_on_every_instruction_set(name: str) -> None:
    tree = random_tree(17, 17, VOCABULARY, root=3)
    options = {"quantize": "int8", "numerics": "integer"}
    found = [
        native_logits(lm_of(name, one, **options), PROMPT, tree)
        for one in instruction_sets("integer")
    ]
    assert all(torch.equal(logits, found[0]) for logits in found)
    assert torch.equal(
        found[0], alone(lm_of(name, instruction_sets("integer")[0], **options), tree)
    )


@pytest.mark.parametrize("rows", [1, 16, 33])
def test_prompts_in_pieces_past_the_window_have_the_bits_of_whole_ones(
    rows: int, monkeypatch: Any
) -> None:
    lm = lm_of("gemma3_text")
    whole = lm.extend(lm.new_cache(len(PROMPT)), PROMPT, logits="all")[0]
    monkeypatch.setattr("specengine.models.native.lm.PREFILL_ROWS", rows)
    assert torch.equal(lm.extend(lm.new_cache(len(PROMPT)), PROMPT, logits="all")[0], whole)


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping in its config"),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention in its config",
        ),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm in its config"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm in its config"),
        (
            "gemma",
            {"hidden_act": "gelu_new"},
            "activation gelu_new, known are silu, gelu_pytorch_tanh",
        ),
    ],
)
def test_settings_of_other_blocks_are_refused(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"native: {reason}"):
        from_model(tiny(family, **changes))


def test_the_instruction_sets_of_float32_are_tried() -> None:
    model, tree = model_of("gemma3_text"), random_tree(17, 17, VOCABULARY, root=3)
    found = [
        native_logits(lm_on(model, one), PROMPT, tree)
        for one in INSTRUCTION_SETS
        if one not in WITH_PAIRS
    ]
    for logits in found:
        assert (logits - found[0]).abs().max() <= 1e-4 * found[0].abs().max()
