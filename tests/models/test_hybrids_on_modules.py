"""Hybrid models on transformers' modules: trees answer as plain decoding does, and states go back to where they can."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine
from specengine.drafters.small_model import SmallModel
from specengine.engine import TextGeneration
from specengine.errors import UnsupportedModelError
from specengine.models import huggingface, recurrent
from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.models.kv_cache import LONG_PROMPT, MARKED_BEFORE
from specengine.models.own_cache import OwnCacheTarget, target_of
from specengine.models.refusals import NoTreesError
from specengine.ops.tree import TokenTree
from tests.models.native_engines import native_lm, needs_extension, plainly
from tests.models.native_variants import native_logits
from tests.toy import VOCABULARY, near_copy, policy_for, random_tree, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
HYBRIDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
KINDS = ("lfm3", "qwen3_next", "falcon_h1")  # one of each kind of recurrent layer
PROMPT = [(7 * place + place * place // 5) % VOCABULARY for place in range(70)]
HOW: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 5})


@cache
def model_of(name: str) -> PreTrainedModel:
    return tiny(name)


@cache
def lm_of(name: str) -> CausalLM:
    return CausalLM(model_of(name))


def target(name: str) -> HuggingFaceTarget:
    """A target over the model that all tests share."""
    fresh = object.__new__(HuggingFaceTarget)
    huggingface.CachedTarget.__init__(fresh, lm_of(name))
    fresh.reason, fresh.captured, fresh.pads, fresh.strict_rows = "", False, False, 0
    return fresh


def engine_of(name: str, policy: str | None = None) -> Engine:
    if policy is None:
        return Engine(target(name), None, None)
    return Engine(target(name), SmallModel(near_copy(name)), policy_for(policy, 3))


def close(found: Tensor, expected: Tensor) -> None:
    """A delta rule's norms of small vectors enlarge rounding."""
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------- answers


@needs_extension
@pytest.mark.sliced(3)
@pytest.mark.parametrize("name", HYBRIDS)
def test_answers_with_trees_are_those_of_transformers_and_of_plain_decoding(name: str) -> None:
    assert target(name).lm.recurrent
    plain = engine_of(name)
    for policy in ("random", "eagle"):
        engine = engine_of(name, policy)
        for how in HOW:
            result = engine.generate(PROMPT, max_new_tokens=16, **how)
            assert result.token_ids == plain.generate(PROMPT, max_new_tokens=16, **how).token_ids
            if not how:
                assert result.token_ids == plainly(model_of(name), PROMPT, 16)
    assert result.stats.num_accepted_draft_tokens > 0
    assert not result.stats.notes


@needs_extension
@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_of_a_tree_are_those_of_the_native_forward_and_of_the_modules(name: str) -> None:
    tree, fresh = random_tree(9, 21, VOCABULARY, root=3), target(name)
    with torch.inference_mode():
        fresh.prefill(PROMPT)
        logits, _ = fresh.verify(tree)
        close(logits, native_logits(native_lm(model_of(name)), PROMPT, tree))
        for node in (0, 5, 20):
            path = torch.tensor([[*PROMPT, 3, *tree.path_tokens(node)]])
            close(logits[node], model_of(name)(input_ids=path).logits[0, -1])


@pytest.mark.parametrize("name", HYBRIDS)
def test_prompts_in_pieces_are_whole_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = lm_of(name)
    with torch.inference_mode():
        whole = lm.extend(lm.new_cache(1), PROMPT, logits="all")[0]
        for rows in (1, 33):
            monkeypatch.setattr(huggingface, "PREFILL_ROWS", rows)
            close(lm.extend(lm.new_cache(1), PROMPT, logits="all")[0], whole)


# ---------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("name", KINDS)
def test_an_accepted_path_counts_and_no_other(name: str) -> None:
    """The control: had another path been accepted, the next token's logits were others."""
    tree, after, found = random_tree(6, 24, VOCABULARY, root=3), TokenTree.root(7, 1), []
    children = [node for node, parent in enumerate(tree.parents.tolist()) if parent == 0]
    fresh = target(name)
    with torch.inference_mode():
        for path in ([0], [0, children[0]], [0, children[-1]]):
            fresh.reset()
            fresh.prefill(PROMPT)
            fresh.verify(tree)
            fresh.commit(tree, path)
            found.append(fresh.verify(after)[0])
            fresh.prefill([*PROMPT, *tree.tokens[path].tolist()], 0)
            close(fresh.verify(after)[0], found[-1])
    assert not torch.allclose(found[1], found[2], atol=1e-3)
    assert not torch.allclose(found[0], found[1], atol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_any_order_of_prompts_trees_paths_and_crops_leaves_the_states_of_the_text(
    name: str,
) -> None:
    pick, one, fresh = random.Random(name), target(name), target(name)
    with torch.inference_mode():
        for step in range(40):
            what = pick.choice(["extend", "tree", "tree", "again", "crop", "mark", "change"])
            if what == "extend" and len(one.tokens) < 150:
                one.rate([pick.randrange(VOCABULARY) for _ in range(pick.randrange(1, 12))])
            elif what in ("tree", "again"):
                size = pick.randrange(1, 20)
                tree = random_tree(step, size, VOCABULARY, root=pick.randrange(VOCABULARY))
                one.verify(tree)
                if what == "tree":
                    path = [pick.randrange(len(tree))]
                    while path[0]:
                        path.insert(0, int(tree.parents[path[0]]))
                    one.commit(tree, path)
            elif what == "crop":
                one.prefill(one.tokens[: pick.randrange(len(one.tokens) + 1)])
            elif what == "mark":
                one.cache.mark()
            elif what == "change":
                kept = one.tokens[: pick.randrange(len(one.tokens) + 1)]
                more = [pick.randrange(VOCABULARY) for _ in range(pick.randrange(90))]
                one.prefill([*kept, *more][:150])
            assert one.cache.length == len(one.tokens)
            root = TokenTree.root(step % VOCABULARY, 1)
            fresh.prefill(one.tokens, 0)
            close(one.verify(root)[0], fresh.verify(root)[0])


@pytest.mark.parametrize("name", KINDS)
def test_a_cache_is_cropped_to_what_it_can_go_back_to(name: str) -> None:
    lm = lm_of(name)
    cache = lm.new_cache(100)
    with torch.inference_mode():
        lm.extend(cache, PROMPT[:20])
        assert [cache.reach(length) for length in (20, 19, 0)] == [20, 0, 0]
        cache.mark()
        lm.extend(cache, PROMPT[20:40])
        assert [cache.reach(length) for length in (40, 39, 20, 19)] == [40, 20, 20, 0]
        expected = lm.extend(cache, PROMPT[40:50])[0]
        cache.crop(45)
        assert cache.length == int(cache.states[0].folded) == 20
        close(lm.extend(cache, PROMPT[20:50])[0], expected)
        cache.crop(10)
        assert cache.length == int(cache.states[0].folded) == 0
        close(lm.extend(cache, PROMPT[:50])[0], expected)


@pytest.mark.parametrize("name", KINDS)
def test_scratch_can_be_taken_back_up_to_the_last_root(name: str) -> None:
    chain, after, one = TokenTree.root(3, 4), TokenTree.root(9, 1), target(name)
    for token in (5, 6, 7):
        chain.add(torch.tensor([len(chain) - 1]), torch.tensor([token]), torch.zeros(1))
    with torch.inference_mode():
        one.prefill(PROMPT)
        one.verify(chain)
        one.commit(chain, [0, 1, 2, 3])
        one.cache.crop(len(PROMPT) + 2)
        assert one.cache.length == len(PROMPT) + 2
        found = one.verify(after)[0]
        one.prefill([*PROMPT, 3, 5], 0)
        close(one.verify(after)[0], found)


@pytest.mark.parametrize("name", KINDS)
def test_a_path_that_was_taken_back_leaves_nothing(name: str) -> None:
    """The next path's rows are in place, so that the cache moves none of them."""
    device = torch.device("cpu")
    tree, after = TokenTree.of_lists([3, 4, 5], [-1, 0, 0], device), TokenTree.root(9, 1)
    one = target(name)
    with torch.inference_mode():
        one.prefill(PROMPT[:20])
        one.verify(tree)
        one.commit(tree, [0, 2])
        one.cache.crop(20)
        one.tokens = one.tokens[:20]
        one.verify(tree)
        one.commit(tree, [0, 1])
        found = one.verify(after)[0]
        one.prefill([*PROMPT[:20], 3, 4], 0)
        close(one.verify(after)[0], found)


@pytest.mark.parametrize("name", ["nemotron_h", "bamba", "qwen3_next"])
def test_trees_run_in_half_precision_whatever_dtype_logits_have(name: str) -> None:
    """Nemotron-H's modules give float32 logits of rounded states."""
    model = tiny(name).to(torch.bfloat16)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[1, 2]])).logits
    assert (logits.dtype == torch.float32) is (name == "nemotron_h")
    assert CausalLM(model).recurrent


def test_a_prompt_that_was_broken_off_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, runs = target("qwen3_next"), recurrent.FORWARDS["Qwen3NextGatedDeltaNet"]

    def fails(module: Any, states: Any, layer: int, rows: Tensor) -> Tensor:
        if layer == 1:
            raise MemoryError
        return runs(module, states, layer, rows)

    with torch.inference_mode():
        one.prefill(PROMPT[:30])
        expected = one.lm.extend(one.cache, PROMPT[30:35])[0]
        one.prefill(PROMPT[:20], 0)
        one.cache.mark()
        monkeypatch.setitem(recurrent.FORWARDS, "Qwen3NextGatedDeltaNet", fails)
        with pytest.raises(MemoryError):
            one.prefill(PROMPT[:35])
        monkeypatch.undo()
        with pytest.raises(UnsupportedModelError, match="memory: a prompt was broken off"):
            one.lm.extend(one.cache, PROMPT[20:35])
        assert one.cached(PROMPT[:35]) == one.cache.reach(20) == 20
        one.cache.crop(20)
        close(one.lm.extend(one.cache, PROMPT[20:35])[0], expected)


@needs_extension
@pytest.mark.parametrize("name", KINDS)
def test_a_second_turn_answers_as_a_fresh_engine_does(name: str) -> None:
    engine, count = engine_of(name, "eagle"), len(PROMPT)
    text = [*PROMPT, *engine.generate(PROMPT, max_new_tokens=20).token_ids]
    turns = {  # the next prompt, and how much of it is there
        "goes on": ([*text, *range(60, 75)], len(text) - 1),
        "changes behind the prompt": (
            [*PROMPT[: count - 3], *range(60, 75)],
            count - 1 - MARKED_BEFORE,
        ),
        "changes early": ([*PROMPT[:10], *range(60, 75)], 0),
    }
    assert count - 1 >= LONG_PROMPT
    for prompt, reused in turns.values():
        engine.reset()
        engine.generate(PROMPT, max_new_tokens=20)
        result = TextGeneration(engine, prompt, {"max_new_tokens": 20}, reuse_cache=True).run()
        assert result.token_ids == plainly(model_of(name), prompt, 20)
        assert engine.target.cache.states
        assert result.stats.num_cached_prompt_tokens <= reused


def test_a_memory_does_not_grow_with_the_text() -> None:
    for name in HYBRIDS:
        lm, sizes = lm_of(name), []
        cache = lm.new_cache(1)
        with torch.inference_mode():
            for _ in range(3):
                lm.extend(cache, PROMPT)
                sizes.append(cache.states[0].bytes)
        assert len(set(sizes)) == 1
        assert cache.nbytes == cache.slab.nbytes + sizes[0]
        assert lm.layers == model_of(name).config.num_hidden_layers
        features = lm.extend(cache, PROMPT[:3], (0, lm.layers))[1]
        assert features is not None
        assert features.shape == (3, 2 * lm.config.hidden_size)


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("name", KINDS)
def test_modules_that_give_other_numbers_leave_the_model_on_its_own_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recurrent.RecurrentStates.convolve

    def wrong(*given: Any, **options: Any) -> Tensor:
        return run(*given, **options).flip(1)

    monkeypatch.setattr(recurrent.RecurrentStates, "convolve", wrong)
    options: dict[str, Any] = {"pack": False, "strict": False, "merge": False, "reason": ""}
    one = target_of(model_of(name), captured=False, **options)
    assert isinstance(one, OwnCacheTarget)
    assert "its recurrent layers give other logits than their modules" in one.notes[0]


def test_a_changed_module_leaves_the_model_on_its_own_cache() -> None:
    model = tiny("lfm2")
    model.model.layers[1].conv.register_forward_hook(lambda module, given, out: out)
    with pytest.raises(NoTreesError):
        CausalLM(model)
    for layer in model.model.layers[:2]:
        layer.conv.forward = layer.conv.forward
    with pytest.raises(NoTreesError, match="convolution state"):
        CausalLM(model)


def test_what_recurrent_layers_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="strict: not with recurrent layers"):
        HuggingFaceTarget(model_of("lfm2"), strict=True)
    assert not lm_of("lfm2").joins
    native: Any = SmallModel(model_of("lfm2")).lm
    assert not isinstance(native, CausalLM)
