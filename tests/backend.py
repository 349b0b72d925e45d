"""The backend of the tests' tiny models: transformers, or the C++ forward with SPECENGINE_TEST_BACKEND=native."""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from specengine.errors import UnsupportedModelError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeLM, NativeTarget, from_model

# whether bfloat16 layers can be packed here, and the mark of tests that need it
PACKS = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_packing = pytest.mark.skipif(not PACKS, reason="oneDNN has no bfloat16 on this machine")


@cache
def lm_of(model: PreTrainedModel) -> PreTrainedModel | NativeLM:
    """The model, or what runs it natively."""
    if os.environ.get("SPECENGINE_TEST_BACKEND") == "native":
        try:
            return from_model(model)
        except UnsupportedModelError:
            return model
    return model


def target_of(model: PreTrainedModel) -> HuggingFaceTarget | NativeTarget:
    lm = lm_of(model)
    return NativeTarget(lm) if isinstance(lm, NativeLM) else HuggingFaceTarget(lm)
