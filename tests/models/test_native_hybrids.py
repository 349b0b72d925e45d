"""Hybrid models on the native forward: trees answer as plain decoding does, and states go back to where they can."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specengine import Engine
from specengine.drafters import Drafter
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.engine import TextGeneration
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.extension import WITH_PAIRS, instruction_sets
from specengine.models.kv_cache import LONG_PROMPT, MARKED_BEFORE
from specengine.models.native import (
    NativeLM,
    NativeTarget,
    RowBatch,
    from_model,
    weights,
)
from specengine.models.native.weights import Weight
from specengine.ops.tree import TokenTree
from tests.models.native_engines import INSTRUCTION_SETS, native_lm, needs_extension, plainly
from tests.models.native_variants import native_logits
from tests.models.test_native_blocks import PROMPT, alone
from tests.toy import VOCABULARY, near_copy, nodes_of, policy_for, random_tree, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
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
HOW: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 5})
NUMERICS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "int8": (torch.bfloat16, {"quantize": "int8", "numerics": "bfloat16"}),
    "integer": (torch.bfloat16, {"quantize": "int8", "numerics": "integer"}),
}


@cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny(name).to(dtype)


@cache
def lm_of(name: str, numerics: str = "float32", instructions: str | None = None) -> NativeLM:
    dtype, options = NUMERICS[numerics]
    return native_lm(model_of(name, dtype), instructions, **options)


@cache
def draft_of(name: str) -> NativeLM:
    return from_model(near_copy(name))


def drafter_of(draft: str, name: str) -> Drafter:
    if draft == "small_model":
        return SmallModel(draft_of(name))
    return Recycling() if draft == "recycling" else NGram(longest=3, shortest=1)


def engine_of(name: str, draft: str, policy: str = "eagle", numerics: str = "float32") -> Engine:
    target = NativeTarget(lm_of(name, numerics))
    if draft == "none":
        return Engine(target, None, None)
    return Engine(target, drafter_of(draft, name), policy_for(policy, 3))


# ---------------------------------------------------------------------------------------------------- answers


@pytest.mark.sliced(3)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    ("draft", "policy"),
    [
        ("ngram", "random"),
        ("recycling", "eagle"),
        ("small_model", "eagle"),
        ("small_model", "chain"),
    ],
)
def test_answers_with_trees_are_those_of_transformers_and_of_plain_decoding(
    name: str, draft: str, policy: str
) -> None:
    engine, plain = engine_of(name, draft, policy), engine_of(name, "none")
    for how in HOW:
        result = engine.generate(PROMPT, max_new_tokens=48, **how)
        assert result.token_ids == plain.generate(PROMPT, max_new_tokens=48, **how).token_ids
        if not how:
            assert result.token_ids == plainly(model_of(name), PROMPT, 48)
    if draft == "small_model":
        assert engine.generate(PROMPT, max_new_tokens=48).stats.num_accepted_draft_tokens > 0


@pytest.mark.sliced(3)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("numerics", ["bfloat16", "integer"])
def test_bits_make_other_numerics_answers_those_of_plain_decoding(name: str, numerics: str) -> None:
    for how in HOW:
        expected = (
            engine_of(name, "none", numerics=numerics)
            .generate(PROMPT, max_new_tokens=40, **how)
            .token_ids
        )
        for policy in ("random", "eagle"):
            engine = engine_of(name, "small_model", policy, numerics)
            assert engine.generate(PROMPT, max_new_tokens=40, **how).token_ids == expected


# ---------------------------------------------------------------------------------------------------- bits


@pytest.mark.sliced(1)
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_row_alone_has_the_bits_that_it_has_in_trees(name: str, numerics: str) -> None:
    sets = instruction_sets("integer") if numerics == "integer" else INSTRUCTION_SETS
    for instructions in sets:
        if numerics == "float32" and instructions in WITH_PAIRS:
            continue
        lm = lm_of(name, numerics, instructions)
        assert lm.instruction_set == instructions
        for nodes in (1, 5, 64):
            tree = random_tree(nodes, nodes, VOCABULARY, root=3)
            assert torch.equal(native_logits(lm, PROMPT, tree), alone(lm, tree))


@pytest.mark.sliced(2)
@pytest.mark.parametrize("name", HYBRIDS)
def test_integer_rows_have_the_same_bits_on_every_instruction_set(name: str) -> None:
    tree = random_tree(17, 17, VOCABULARY, root=3)
    found = [
        native_logits(lm_of(name, "integer", one), PROMPT, tree)
        for one in instruction_sets("integer")
    ]
    assert all(torch.equal(logits, found[0]) for logits in found)


@pytest.mark.sliced
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_prompts_in_pieces_have_the_bits_of_whole_ones(
    name: str, rows: int, monkeypatch: Any
) -> None:
    lm = lm_of(name)
    whole = lm.extend(lm.new_cache(len(PROMPT)), PROMPT, logits="all")[0]
    monkeypatch.setattr("specengine.models.native.lm.PREFILL_ROWS", rows)
    assert torch.equal(lm.extend(lm.new_cache(len(PROMPT)), PROMPT, logits="all")[0], whole)


@pytest.mark.parametrize("name", HYBRIDS)
def test_threads_change_no_bits(name: str) -> None:
    lm, tree = lm_of(name), random_tree(9, 40, VOCABULARY, root=3)
    found = native_logits(lm, PROMPT, tree)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(native_logits(lm, PROMPT, tree), found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", HYBRIDS)
def test_an_accepted_path_counts_and_no_other(name: str) -> None:
    """The control: had another path been accepted, the next token's logits were others."""
    tree, after = random_tree(6, 24, VOCABULARY, root=3), TokenTree.root(7, 1)
    target, found = NativeTarget(lm_of(name)), []
    children = [node for node, parent in enumerate(tree.parents.tolist()) if parent == 0]
    assert len(children) > 1
    for path in ([0], [0, children[0]], [0, children[-1]]):
        target.reset()
        target.prefill(PROMPT)
        target.verify(tree)
        target.commit(tree, path)
        found.append(target.verify(after)[0])
        target.prefill([*PROMPT, *tree.tokens[path].tolist()], 0)
        assert torch.equal(target.verify(after)[0], found[-1])
    assert not torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[1])


# ---------------------------------------------------------------------------------------------------- sessions


@pytest.mark.sliced(3)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("draft", ["none", "small_model"])
def test_a_second_turn_answers_as_a_fresh_engine_does(name: str, draft: str) -> None:
    engine = engine_of(name, draft)
    text = [*PROMPT, *engine.generate(PROMPT, max_new_tokens=20).token_ids]
    count = len(PROMPT)
    turns = {  # the next prompt, and how much of it is there: a draft's memory may have less
        "goes on": ([*text, *range(60, 75)], (len(text) - 5, len(text))),
        "changes behind the prompt": (
            [*PROMPT[: count - 3], *range(60, 75)],
            (count - 1 - MARKED_BEFORE,) * 2,
        ),
        "changes early": ([*PROMPT[:10], *range(60, 75)], (0, 0)),
    }
    assert count - 1 >= LONG_PROMPT
    for prompt, (least, most) in turns.values():
        engine.reset()
        engine.generate(PROMPT, max_new_tokens=20)
        result = TextGeneration(engine, prompt, {"max_new_tokens": 20}, reuse_cache=True).run()
        assert (
            result.token_ids == engine_of(name, draft).generate(prompt, max_new_tokens=20).token_ids
        )
        assert result.token_ids == plainly(model_of(name), prompt, 20)
        assert least <= result.stats.num_cached_prompt_tokens <= most or draft == "small_model"


@pytest.mark.sliced(5)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("draft", ["none", "small_model"])
def test_a_stream_that_is_closed_leaves_the_next_answer_as_it_is(name: str, draft: str) -> None:
    engine = engine_of(name, draft)
    for pieces in (0, 1, 3):
        stream = engine.stream(PROMPT, max_new_tokens=30)
        for _ in range(pieces):
            next(stream)
        stream.close()
        assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(
            model_of(name), PROMPT, 20
        )


# ---------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_cache_is_cropped_to_what_it_can_go_back_to(name: str) -> None:
    lm = lm_of(name)
    cache = lm.new_cache(100)
    lm.extend(cache, PROMPT[:20])
    assert [cache.reach(length) for length in (20, 19, 0)] == [20, 0, 0]
    cache.mark()
    lm.extend(cache, PROMPT[20:40])
    assert [cache.reach(length) for length in (40, 39, 20, 19)] == [40, 20, 20, 0]
    expected = lm.extend(cache, PROMPT[40:50])[0]
    cache.crop(45)
    assert (cache.length, cache.states[0].folded) == (20, 20)
    assert torch.equal(lm.extend(cache, PROMPT[20:50])[0], expected)
    cache.crop(10)
    assert (cache.length, cache.states[0].folded, cache.states[0].marked) == (0, 0, 0)
    assert torch.equal(lm.extend(cache, PROMPT[:50])[0], expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_scratch_can_be_taken_back_up_to_the_last_root(name: str) -> None:
    target, chain = NativeTarget(lm_of(name)), TokenTree.root(3, 4)
    for token in (5, 6, 7):
        chain.add(torch.tensor([len(chain) - 1]), torch.tensor([token]), torch.zeros(1))
    target.prefill(PROMPT)
    target.verify(chain)
    target.commit(chain, [0, 1, 2, 3])
    target.cache.crop(len(PROMPT) + 2)
    assert target.cache.length == len(PROMPT) + 2
    after = TokenTree.root(9, 1)
    found = target.verify(after)[0]
    target.prefill([*PROMPT, 3, 5], 0)
    assert torch.equal(target.verify(after)[0], found)


@pytest.mark.parametrize("name", HYBRIDS)
def test_any_order_of_prompts_trees_paths_and_crops_leaves_the_states_of_the_text(
    name: str,
) -> None:
    lm, pick = lm_of(name), random.Random(name)
    target, fresh = NativeTarget(lm), NativeTarget(lm)
    for step in range(60):
        what = pick.choice(["extend", "tree", "tree", "again", "crop", "mark", "change"])
        if what == "extend" and len(target.tokens) < 200:
            target.rate([pick.randrange(VOCABULARY) for _ in range(pick.randrange(1, 12))])
        elif what in ("tree", "again"):
            tree = random_tree(
                step, pick.randrange(1, 20), VOCABULARY, root=pick.randrange(VOCABULARY)
            )
            target.verify(tree)
            if what == "tree":
                path = [pick.randrange(len(tree))]
                while path[0]:
                    path.insert(0, int(tree.parents[path[0]]))
                target.commit(tree, path)
        elif what == "crop":
            target.prefill(target.tokens[: pick.randrange(len(target.tokens) + 1)])
        elif what == "mark":
            target.cache.mark()
        elif what == "change":
            kept = target.tokens[: pick.randrange(len(target.tokens) + 1)]
            target.prefill(
                [*kept, *(pick.randrange(VOCABULARY) for _ in range(pick.randrange(90)))][:200]
            )
        assert target.cache.length == len(target.tokens)
        root = TokenTree.root(step % VOCABULARY, 1)
        fresh.prefill(target.tokens, 0)
        assert torch.equal(target.verify(root)[0], fresh.verify(root)[0]), (step, what)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_last_row_that_is_kept_outlasts_a_larger_tree(name: str) -> None:
    """Rows are kept in blocks of 16: a tree that fills one, whose last node is accepted, and then one beyond it."""
    target, fresh = NativeTarget(lm_of(name)), NativeTarget(lm_of(name))
    full, path = TokenTree.root(3, 16), [0, *range(9, 16)]
    for node in range(1, 16):
        parent = torch.tensor([node - 1 if node not in (1, 9) else 0])
        full.add(parent, torch.tensor([20 + node]), torch.zeros(1))
    target.prefill(PROMPT[:3])
    target.verify(full)
    target.commit(full, path)
    larger = random_tree(5, 40, VOCABULARY, root=9)
    fresh.prefill([*PROMPT[:3], *full.tokens[path].tolist()])
    assert torch.equal(target.verify(larger)[0], fresh.verify(larger)[0])


def test_a_memory_refuses_slots_that_were_not_run() -> None:
    lm = lm_of("qwen3_5_text")
    cache = lm.new_cache(100)
    lm.extend(cache, PROMPT[:20])
    cache.length = 21
    with pytest.raises(InputError, match="memory: holds slots 20 to 20, got 21 committed"):
        lm.extend(cache, PROMPT[:2])
    cache.length = 20
    with pytest.raises(InputError, match="path: slot 20 was not run"):
        cache.keep(nodes_of([0]))
    cache.states = lm_of("lfm2").new_cache(100).states
    with pytest.raises(InputError, match="memory: got 2, accepted one of this decoder"):
        lm.extend(cache, PROMPT[:2])


def test_a_forward_that_was_broken_off_is_noticed() -> None:
    """As one of a part of the layers is."""
    lm = lm_of("qwen3_5_text")
    cache, tokens = lm.new_cache(100), torch.tensor(PROMPT[20:23])
    lm.extend(cache, PROMPT[:20])
    cache.mark()
    expected = lm.extend(cache, PROMPT[20:23], logits="all")[0]
    cache.crop(20)
    lm.run(RowBatch(lm, tokens, torch.arange(20, 23), cache, (20, 20, None)), layers=1)
    with pytest.raises(InputError, match="memory: a forward was broken off"):
        lm.extend(cache, PROMPT[20:23])
    assert [cache.reach(length) for length in (20, 19)] == [20, 0]
    cache.crop(20)
    assert torch.equal(lm.extend(cache, PROMPT[20:23], logits="all")[0], expected)


def test_a_memory_does_not_grow_with_the_text() -> None:
    for name in HYBRIDS:
        lm, sizes = lm_of(name), []
        cache = lm.new_cache(1)
        for _ in range(3):
            lm.extend(cache, PROMPT)
            sizes.append(cache.states[0].bytes)
        assert len(set(sizes)) == 1
        kinds = [
            kind in ("full_attention", "sliding_attention", "hybrid")
            for kind in lm.config.layer_types
        ]
        assert cache.slab.shape[0] == sum(kinds)
        assert cache.nbytes == cache.slab.nbytes + sizes[0]


# ---------------------------------------------------------------------------------------------------- rounding

GATED_DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def move(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(
            0.05 * weight.std() * torch.sin(torch.arange(weight.numel())).view_as(weight).to(weight)
        )


def first_states(lm: NativeLM) -> torch.Tensor:
    """Hidden states behind the first layer, float32 [tokens, hidden size], at the places that are tried."""
    far, tokens = lm.max_context - 1, torch.tensor([1, 2, 3, 5, 7])
    positions = torch.tensor([0, 1, 2, far // 2, far])
    batch = RowBatch(lm, tokens, positions, lm.new_cache(5), (0, 0, None), features=(1,))
    lm.run(batch)
    assert batch.states is not None
    return batch.states


def test_a_token_that_rounding_moves_far_is_no_other_model() -> None:
    """In float32 too, where weights are rounded and nothing else is: its output is near zero, and normed."""
    model = tiny("qwen3_5_text").to(torch.bfloat16)
    engine = Engine.from_pretrained(model, "none", quantize="int8")
    move(model.model.layers[0].linear_attn.in_proj_qkv.weight)
    exact = from_model(copy.deepcopy(model).float())
    rounded = copy.deepcopy(model).float()
    with torch.no_grad():
        for layer in rounded.modules():
            if isinstance(layer, torch.nn.Linear):
                steps = layer.weight.abs().amax(dim=1, keepdim=True) / 127
                layer.weight.copy_((layer.weight / steps).round() * steps)
    assert len(engine.generate(PROMPT, max_new_tokens=8).token_ids) == 8
    wanted = first_states(exact)
    for lm in (from_model(rounded), from_model(model, quantize="int8")):
        found = first_states(lm)
        distances = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert distances.max() > 0.4
        assert distances.median() < 0.1


@pytest.mark.sliced(1)
@pytest.mark.parametrize("numerics", ["bfloat16", "int8", "integer"])
@pytest.mark.parametrize("name", GATED_DELTA)
def test_rounding_refuses_no_weights_of_a_delta_rule(name: str, numerics: str) -> None:
    model, (_, options) = tiny(name).to(torch.bfloat16), NUMERICS[numerics]
    lm = from_model(model, **options)
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    for round_ in range(6):
        move(matrices[round_ * 7 % len(matrices)])
        lm.refresh()
    assert lm.version == 6


@pytest.mark.sliced(3)
@pytest.mark.parametrize("part", ["linear_attn.out_proj", "linear_attn.in_proj_b", "down_proj"])
@pytest.mark.parametrize("name", GATED_DELTA)
def test_blocks_of_other_weights_are_refused_all_the_same(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the blocks alone, which the trial in float32 does not read; after a change as when a model is loaded."""
    model = tiny(name).to(torch.bfloat16)
    lm, real = from_model(model, quantize="int8"), weights.add_weight

    def wrong(weights: Any, weight: Weight, kinds: Any, following: Any = None) -> str:
        rows = weight.rows(0, weight.shape[0])
        if rows.dtype is torch.bfloat16 and part in weight.name:
            weight = weight._replace(rows=lambda first, last: -rows[first:last])
        return real(weights, weight, kinds, following)

    monkeypatch.setattr(weights, "add_weight", wrong)
    move(model.model.embed_tokens.weight)
    for _ in range(2):
        with pytest.raises(
            UnsupportedModelError, match="gives other hidden states than its own modules"
        ):
            lm.refresh()


# ---------------------------------------------------------------------------------------------------- refused


def test_states_of_other_sizes_are_refused() -> None:
    model = tiny("qwen3_5_text", linear_value_head_dim=24)
    with pytest.raises(UnsupportedModelError, match="heads of 16 and 24 channels"):
        from_model(model)
