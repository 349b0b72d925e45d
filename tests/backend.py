"""The backend of the tests' tiny models: transformers, or the C++ forward with SPECENGINE_TEST_BACKEND=native."""

from __future__ import annotations

import os
from functools import cache

from transformers import PreTrainedModel

from specengine.errors import UnsupportedModelError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeLM, NativeTarget, from_model


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
