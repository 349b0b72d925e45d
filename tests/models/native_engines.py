"""Native models and engines over tiny random ones, on an instruction set of one's choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specengine import Engine
from specengine.drafters import Drafter
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.ngram import NGram
from specengine.drafters.small_model import SmallModel
from specengine.models import extension
from specengine.models.eagle import head_from
from specengine.models.extension import VARIABLE
from specengine.models.native import NativeHead, NativeLM, NativeTarget, from_model
from tests.heads import deep
from tests.toy import CPU, head_config, policy_for, random_state

INSTRUCTION_SETS = extension.instruction_sets()
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
OTHERS = (  # of blocks that those have not
    "bamba",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon_h1",
    "gemma",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "ministral3",
    "muse_glimmer_text",
    "mixtral",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
DRAFTS = ("ngram", "small_model", "eagle-3", "eagle-1")
PROMPT = [*range(40, 56), *range(40, 50)]

needs_extension = pytest.mark.skipif(
    not INSTRUCTION_SETS, reason="the extension specengine._cpu is not built"
)


@contextmanager
def forced(instructions: str | None) -> Iterator[None]:
    """Models made inside run on this instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        if instructions is not None:
            patch.setenv(VARIABLE, instructions)
        yield


def native_lm(
    model: PreTrainedModel,
    instructions: str | None = None,
    *,
    quantize: str | None = None,
    numerics: str = "auto",
) -> NativeLM:
    with forced(instructions):
        return from_model(model, quantize=quantize, numerics=numerics)


@cache
def model_of(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Deep enough for EAGLE-3."""
    return deep(family).to(dtype)


@cache
def lm_of(
    family: str, instructions: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> NativeLM:
    return native_lm(model_of(family, dtype), instructions)


@cache
def draft_lm(family: str, instructions: str | None) -> NativeLM:
    """A smaller model that often agrees: the same one with noise on its weights."""
    model = deep(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight += 0.04 * weight.std() * torch.randn_like(weight)
    return native_lm(model.to(torch.bfloat16), instructions)


def drafter_of(draft: str, lm: NativeLM, family: str, instructions: str | None) -> Drafter:
    if draft == "ngram":
        return NGram(longest=3, shortest=1)
    if draft == "small_model":
        return SmallModel(draft_lm(family, instructions), lm.vocab_size)
    config = head_config(3 if draft == "eagle-3" else 1, lm.model)
    state = random_state(config)
    if draft == "eagle-3":
        return EagleDraft(NativeHead(config, state, lm), lm)
    return EagleDraft(head_from(config, state, lm.dtype, CPU), lm)


def engine_of(
    family: str = "llama",
    draft: str = "small_model",
    policy: str = "eagle",
    instructions: str | None = None,
    tokenizer: Any = None,
) -> Engine:
    """A new engine over the shared bfloat16 model of that family; draft `none` decodes plainly."""
    lm = lm_of(family, instructions)
    if draft == "none":
        return Engine(NativeTarget(lm), None, None, tokenizer)
    drafter = drafter_of(draft, lm, family, instructions)
    return Engine(NativeTarget(lm), drafter, policy_for(policy, 3), tokenizer)


def plainly(model: PreTrainedModel, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Return the answer of transformers' own greedy generate."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "pad_token_id": 0, **options}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    return out[0, len(prompt) :].tolist()
