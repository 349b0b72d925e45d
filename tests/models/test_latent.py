"""Latent attention: bits that hang on no other row, the cache that it keeps, and sizes that are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import Engine
from specengine.drafters.ngram import NGram
from specengine.errors import UnsupportedModelError
from specengine.models import families
from specengine.models.extension import instruction_sets
from specengine.models.families import Factors
from specengine.models.native import NativeLM, NativeTarget, from_model
from specengine.ops.tree import TokenTree
from tests.models.native_engines import INSTRUCTION_SETS, native_lm, needs_extension, plainly
from tests.models.native_variants import VARIANTS, native_logits
from tests.toy import VOCABULARY, policy_for, random_tree, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
PROMPT = [(7 * i * i + 3 * i) % VOCABULARY for i in range(200)]
MODELS = ("deepseek_v2 lite", "deepseek_v3 sizes", "glm4_moe_lite")


@cache
def lm_of(
    variant: str, instructions: str | None, dtype: torch.dtype, quantize: str, numerics: str
) -> NativeLM:
    family, changes = VARIANTS[variant]
    return native_lm(
        tiny(family, **changes).to(dtype),
        instructions,
        quantize=quantize or None,
        numerics=numerics,
    )


@torch.inference_mode()
def assert_rows_are_alone(lm: NativeLM, nodes: int, most: int = 12) -> Tensor:
    """Hold nodes of a tree against plain decoding, one token at a time; the last ones where there are many."""
    tree = random_tree(nodes, nodes, VOCABULARY, root=3)
    found, target = native_logits(lm, PROMPT, tree), NativeTarget(lm)
    for node in range(max(0, nodes - most), nodes):
        path = [3, *tree.path_tokens(node)]
        target.prefill([*PROMPT, *path[:-1]])
        assert torch.equal(target.verify(TokenTree.root(path[-1], 1))[0][0], found[node]), node
    return found


@pytest.mark.sliced(5)
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize("variant", MODELS)
def test_a_row_alone_has_the_bits_that_it_has_in_a_tree(variant: str, instructions: str) -> None:
    for options in (("", "bfloat16"), ("int8", "bfloat16")):
        for nodes in (1, 3, 17, 64):
            assert_rows_are_alone(lm_of(variant, instructions, torch.bfloat16, *options), nodes)


def test_so_it_has_in_float32_and_beside_other_threads() -> None:
    lm, before = lm_of("deepseek_v3", None, torch.float32, "", "auto"), torch.get_num_threads()
    wanted = assert_rows_are_alone(lm, 40)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(
                native_logits(lm, PROMPT, random_tree(40, 40, VOCABULARY, root=3)), wanted
            )
    finally:
        torch.set_num_threads(before)


@pytest.mark.sliced(1)
@pytest.mark.parametrize("variant", MODELS)
def test_integer_rows_have_the_same_bits_on_every_instruction_set(variant: str) -> None:
    lms = [
        lm_of(variant, one, torch.bfloat16, "int8", "integer")
        for one in instruction_sets("integer")
    ]
    found = [assert_rows_are_alone(lm, 17) for lm in lms]
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_the_cache_keeps_a_latent_and_a_turned_key_of_each_layer() -> None:
    for layers in (2, 3):
        model = tiny("deepseek_v3", num_hidden_layers=layers)
        slab = from_model(model).new_cache(256).slab
        sizes = model.config.kv_lora_rank + model.config.qk_rope_head_dim
        assert slab.numel() == -(-layers // 2) * 2 * 256 * sizes
        engine = Engine(
            NativeTarget(from_model(model)), NGram(longest=3, shortest=1), policy_for("random", 7)
        )
        result = engine.generate(PROMPT[:70], max_new_tokens=40)
        assert result.token_ids == plainly(model, PROMPT[:70], 40)
        assert result.stats.num_draft_tokens


def test_several_answers_at_once_are_those_given_alone() -> None:
    target = NativeTarget(lm_of("glm4_moe_lite", None, torch.bfloat16, "", "auto"))
    engine = Engine(target, NGram(longest=3, shortest=1), policy_for("fixed"))
    prompts = [PROMPT[:31], PROMPT[40:57], PROMPT[100:190]]
    alone = [engine.generate(prompt, max_new_tokens=16).token_ids for prompt in prompts]
    assert [
        result.token_ids for result in engine.generate_many(prompts, max_new_tokens=16)
    ] == alone


def test_folders_answer_as_transformers_does(tmp_path: Path) -> None:
    model = tiny("deepseek_v3", num_hidden_layers=3)
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(str(tmp_path), "none", offline=True, backend="native")
    assert engine.generate(PROMPT[:60], max_new_tokens=24).token_ids == plainly(
        model, PROMPT[:60], 24
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"kv_lora_rank": 24},
            r"native: latents of 24 channels for heads of 12 \+ 8 and 16, known are multiples of 32",
        ),
        ({"v_head_dim": 15}, r"native: latents of 32 channels for heads of 12 \+ 8 and 15"),
    ],
)
def test_other_sizes_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        from_model(tiny("deepseek_v3", **changes))


def test_scores_without_the_growth_of_yarn_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(
        families.known()["deepseek_v3"], factors=lambda config: Factors(scores=20**-0.5)
    )
    known = families.known() | {"deepseek_v3": family}
    monkeypatch.setattr(families, "known", lambda: known)
    with pytest.raises(
        UnsupportedModelError, match="gives other hidden states than its own modules"
    ):
        from_model(tiny("deepseek_v3"))
