"""Models, engines and prompts of tests with several texts at once."""

from __future__ import annotations

import random
import time
from typing import Any

from specengine import Engine
from specengine.drafters.recycling import Recycling
from specengine.models.native import NativeLM, NativeTarget
from tests.models.native_engines import native_lm
from tests.toy import VOCABULARY, policy_for, tiny

KINDS = {"float32": {}, "bfloat16": {}, "int8": {"quantize": "int8", "numerics": "integer"}}


def lm_of(family: str, kind: str, instructions: str | None = None) -> NativeLM:
    model = tiny(family)
    model = model if kind == "float32" else model.bfloat16()
    return native_lm(model, instructions, **KINDS[kind])


def engine_of(
    policy: str = "eagle", draft: Any = None, kind: str = "bfloat16", family: str = "llama"
) -> Engine:
    drafter = Recycling() if draft is None else draft
    return Engine(NativeTarget(lm_of(family, kind)), drafter, policy_for(policy))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 3, 12, 40, 90]))]
        for _ in range(count)
    ]


def until(holds: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)
