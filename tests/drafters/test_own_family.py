"""Small models of every native family: their passes give what a fresh read of the text gives, with all states.

A model that drafts for itself is always right. So each token that a tree misses shows a state, a window or a slot that
a rejected branch has left wrong, which equal answers alone would not.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specengine import Engine, policies
from specengine.drafters.small_model import SmallModel
from specengine.errors import UnsupportedModelError
from specengine.models.native import NativeLM, NativeTarget
from tests.models.native_engines import FAMILIES, OTHERS, native_lm, needs_extension
from tests.models.test_native_blocks import PROMPT, WINDOWS, model_of
from tests.toy import near_copy, policy_for, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
NAMES = tuple(dict.fromkeys([*FAMILIES, *WINDOWS, *OTHERS]))
WIDTHS = ((1, 1, 1, 1), (2, 1, 1), (3, 2, 1), (1, 4, 2))
TOKENS = 41
SAMPLED = {"temperature": 0.9, "seed": 5}


@cache
def lm_of(name: str) -> NativeLM:
    return native_lm(model_of(name))


@cache
def plain_of(name: str, sampled: bool = False) -> list[int]:
    engine = Engine(NativeTarget(lm_of(name)), None, None)
    return engine.generate(PROMPT, max_new_tokens=TOKENS, **(SAMPLED if sampled else {})).token_ids


def fixed(branching: tuple[int, ...]) -> Any:
    return policies.make("fixed", branching=branching)


@pytest.mark.sliced(14)
@pytest.mark.parametrize("branching", WIDTHS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_always_right_about_itself(name: str, branching: tuple[int, ...]) -> None:
    engine = Engine(NativeTarget(lm_of(name)), SmallModel(lm_of(name)), fixed(branching))
    for _ in range(2):  # the second answer begins with the prompt that the first one left
        result = engine.generate(PROMPT, max_new_tokens=TOKENS)
        assert result.token_ids == plain_of(name)
        deepest = 1 + len(branching)
        assert result.stats.num_spec_steps == -(-TOKENS // deepest)


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "a folder"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_a_draft_whose_own_modules_take_no_trees_runs_natively(
    family: str, loaded: bool, tmp_path: Path
) -> None:
    model = model_of(family)
    if loaded:
        draft = SmallModel(model)
        engine = Engine(NativeTarget(lm_of(family)), draft, fixed((2, 1, 1)))
    else:
        copy.deepcopy(model).save_pretrained(tmp_path)  # which changes a config
        target = tiny("llama", vocab_size=model.config.vocab_size)
        options: dict[str, Any] = {"backend": "huggingface", "lookup": False, "offline": True}
        engine = Engine.from_pretrained(target, str(tmp_path), fixed((2, 1, 1)), **options)
        assert isinstance(engine.drafter, SmallModel)
        draft = engine.drafter
    assert isinstance(draft.lm, NativeLM)
    result = engine.generate(PROMPT, max_new_tokens=20)
    plain = Engine(engine.target, None, None).generate(PROMPT, max_new_tokens=20)
    assert result.token_ids == plain.token_ids
    if loaded:
        assert result.stats.num_spec_steps == 5


def test_a_draft_that_no_forward_takes_is_refused_for_its_modules() -> None:
    model = copy.deepcopy(model_of("qwen3_5_text"))
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="serve a target, no draft"):
        SmallModel(model)


@pytest.mark.sliced(4)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_exact_where_a_small_model_is_often_wrong(name: str) -> None:
    family, changes = WINDOWS.get(name, (name, {}))
    wrong = native_lm(near_copy(family, **changes))
    for policy in (fixed((3, 2, 1)), policy_for("eagle"), policy_for("auto")):
        engine = Engine(NativeTarget(lm_of(name)), SmallModel(wrong), policy)
        assert engine.generate(PROMPT, max_new_tokens=TOKENS).token_ids == plain_of(name)
        sampled = engine.generate(PROMPT, max_new_tokens=TOKENS, **SAMPLED)
        assert sampled.token_ids == plain_of(name, sampled=True)


@pytest.mark.sliced(12)
@pytest.mark.parametrize("name", NAMES)
def test_lanes_keep_the_states_of_their_own_texts(name: str) -> None:
    engine = Engine(NativeTarget(lm_of(name)), SmallModel(lm_of(name)), fixed((2, 1, 1)))
    prompts = [[*PROMPT[: 70 - 9 * number], 5 + number] for number in range(4)]
    plain = Engine(NativeTarget(lm_of(name)), None, None)
    alone = [plain.generate(prompt, max_new_tokens=20).token_ids for prompt in prompts]
    results = engine.generate_many(prompts, parallel=3, max_new_tokens=20)
    assert [result.token_ids for result in results] == alone
    assert [result.stats.num_spec_steps for result in results] == [5] * 4
