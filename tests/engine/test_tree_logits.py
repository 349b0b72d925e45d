"""The logits of a tree's nodes are those of their paths alone, up to the end of the context."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine
from specengine.drafters.ngram import NGram
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops.tree import TokenTree
from tests.engine.engines import PROMPT, engine_of, model_of, plainly
from tests.toy import FAMILIES, VOCABULARY, policy_for, random_tree, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

EXTRA: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 8, "num_key_value_heads": 2, "query_pre_attn_scalar": 8},
    "GPTJ": {"rotary_dim": 4},
    "StableLm": {"num_key_value_heads": 2},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 2,
        "n_routed_experts": 2,
    },
}


def dense_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def check_tree_logits(target: HuggingFaceTarget, model: PreTrainedModel, tree: TokenTree) -> None:
    logits, _ = target.verify(tree)
    root = int(tree.tokens[0])
    for node in range(len(tree)):
        tokens = [*target.tokens, root, *tree.path_tokens(node)]
        if len(tokens) <= target.max_context:
            assert (logits[node] - dense_logits(model, tokens)).abs().max() < 1e-4


def path_to(tree: TokenTree, node: int) -> list[int]:
    path = [node]
    while path[0] > 0:
        path.insert(0, int(tree.parents[path[0]]))
    return path


@pytest.mark.sliced(2)
@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA])
@torch.inference_mode()
def test_tree_logits_equal_those_of_each_path_alone(family: str) -> None:
    """Over several cycles, each committing another path, and with a tree that reaches past the context's end."""
    model = tiny(family, **EXTRA.get(family, {}))
    target, reference = HuggingFaceTarget(model), tiny(family, **EXTRA.get(family, {}))
    target.prefill(PROMPT)
    for seed in range(3):
        tree = random_tree(seed, 20, VOCABULARY, root=7)
        check_tree_logits(target, reference, tree)
        target.commit(tree, path_to(tree, int(tree.depths.argmax()) if seed else 0))
    target.prefill(
        [
            *target.tokens,
            *(i % VOCABULARY for i in range(target.max_context - len(target.tokens) - 4)),
        ]
    )
    check_tree_logits(target, reference, random_tree(9, 20, VOCABULARY, root=8))
    assert target.lm.attention == ("dense mask" if family in EXTRA else "tree")


def test_attention_that_the_tree_kernel_does_not_know_runs_with_a_dense_mask() -> None:
    model = tiny("Gemma2", **EXTRA["Gemma2"])
    chosen = model.config._attn_implementation  # eager from transformers 5.23, before it sdpa
    target = HuggingFaceTarget(model)
    assert target.lm.attention == "dense mask"
    assert target.lm.config._attn_implementation == "eager"
    assert target.model.config._attn_implementation == chosen
    engine = Engine(target, NGram(shortest=1), policy_for("eagle"))
    ids = torch.tensor([PROMPT])
    expected = tiny("Gemma2", **EXTRA["Gemma2"]).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    assert (
        engine.generate(PROMPT, max_new_tokens=24).token_ids == expected[0, len(PROMPT) :].tolist()
    )


def test_a_sliding_window_does_not_bound_the_context() -> None:
    assert HuggingFaceTarget(model_of("mistral")).max_context == 256


def test_longrope_bounds_the_context_where_its_frequencies_change() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = tiny("llama", rope_parameters=rope)
    target = HuggingFaceTarget(model)
    assert target.max_context == 64
    with torch.inference_mode():
        target.prefill([*PROMPT, *PROMPT, *range(8)])
        check_tree_logits(
            target, tiny("llama", rope_parameters=rope), random_tree(0, 40, VOCABULARY, root=7)
        )


def test_long_prompts_are_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specengine.models.huggingface.PREFILL_ROWS", 7)
    for family in ("llama", "gpt2"):
        engine = engine_of(family, "small_model", "fixed")
        assert engine.generate(PROMPT, max_new_tokens=16).token_ids == plainly(family, PROMPT, 16)


def test_generation_fills_the_context_and_stops() -> None:
    prompt = (PROMPT * 10)[:240]
    expected = plainly("llama", prompt, 16)
    for draft in ("none", "ngram", "recycling", "small_model"):
        result = engine_of("llama", draft).generate(prompt, max_new_tokens=1000)
        assert (result.token_ids, result.finish_reason) == (expected, "length")
