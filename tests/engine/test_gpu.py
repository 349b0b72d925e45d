"""The engine on a CUDA device: the same answers as plain decoding and as Hugging Face there, and as on the CPU."""

from __future__ import annotations

import pytest
import torch

from bench.short_models import first_layers
from specengine import Engine
from tests import toy

pytestmark = pytest.mark.gpu
PROMPT = [1, 5, 9, 5, 9, 7, 5, 9]


@pytest.mark.parametrize("family", list(toy.FAMILIES))
def test_greedy_answer_on_cuda_is_huggingfaces(family: str) -> None:
    model = toy.tiny(family).to("cuda")
    ids = torch.tensor([PROMPT], device="cuda")
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    for draft in ("ngram", first_layers(model, 1)):
        for policy in ("chain", "eagle", "fixed"):
            result = Engine.from_pretrained(model, draft, policy).generate(
                PROMPT, max_new_tokens=24
            )
            assert [*PROMPT, *result.token_ids] == expected[0].tolist()


def test_sampled_answer_on_cuda_is_plain_samplings() -> None:
    model = toy.tiny("llama").to("cuda")
    options = {
        "max_new_tokens": 24,
        "temperature": 0.9,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "seed": 3,
    }
    expected = Engine.from_pretrained(model, policy="plain").generate(PROMPT, **options).token_ids
    for draft in ("ngram", first_layers(model, 1)):
        assert (
            Engine.from_pretrained(model, draft, "eagle").generate(PROMPT, **options).token_ids
            == expected
        )
