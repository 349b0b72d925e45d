"""Answers over the native forward, in bfloat16 and on every instruction set, are those of plain decoding, bit for bit.

In float32 they are what transformers answers. `SPECENGINE_TEST_BACKEND=native SPECENGINE_CPU=avx2 pytest tests/engine`
runs all tests of the engine over it, on any of the instruction sets.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from specengine import Engine, policies
from specengine.drafters.eagle import EagleDraft
from specengine.models import Successors, eagle
from specengine.models.eagle import EagleConfig, head_from
from specengine.models.extension import WITH_PAIRS
from specengine.models.native import NativeHead, NativeTarget, lm as native_lm_module
from tests.engine.engines import DependsOnThePath, InPlace
from tests.models.native_engines import (
    DRAFTS,
    FAMILIES,
    INSTRUCTION_SETS,
    PROMPT,
    drafter_of,
    engine_of,
    lm_of,
    model_of,
    native_lm,
    needs_extension,
    plainly,
)
from tests.toy import (
    CPU,
    POLICIES,
    VOCABULARY,
    head_config,
    policy_for,
    random_state,
    random_tree,
    tiny,
)

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
# those that run float32
WITH_VECTORS = [name for name in INSTRUCTION_SETS if name not in WITH_PAIRS]
HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "narrowed": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 12345678901234567890},
    "penalised": {"repetition_penalty": 1.3, "logits_processor": [DependsOnThePath(), InPlace()]},
    "penalised and sampled": {
        "temperature": 1.1,
        "presence_penalty": 1.0,
        "no_repeat_ngram_size": 3,
        "seed": 0,
    },
}


@cache
def plain_answer(family: str, instructions: str, how: str, count: int) -> list[int]:
    return (
        engine_of(family, "none", instructions=instructions)
        .generate(PROMPT, max_new_tokens=count, **HOW[how])
        .token_ids
    )


def case_of(policy: str, instructions: str) -> tuple[str, str]:
    """Family and draft: over all policies and sets every draft meets each policy, each set and each family."""
    number = POLICIES.index(policy) + INSTRUCTION_SETS.index(instructions)
    return FAMILIES[(number + POLICIES.index(policy) // len(DRAFTS)) % len(FAMILIES)], DRAFTS[
        number % len(DRAFTS)
    ]


@pytest.mark.sliced(8)
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_bfloat16_answers_equal_plain_decoding(policy: str, instructions: str) -> None:
    family, draft = case_of(policy, instructions)
    engine = engine_of(family, draft, policy, instructions)
    assert engine.target.lm.instruction_set == instructions
    for how in ("greedy", "sampled"):
        result = engine.generate(PROMPT, max_new_tokens=20, **HOW[how])
        assert result.token_ids == plain_answer(family, instructions, how, 20)
        assert engine.target.cache.length == len(engine.target.tokens) == len(PROMPT) + 19
        if draft == "small_model":
            assert result.stats.num_accepted_draft_tokens > 0


@pytest.mark.sliced(4)
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize("how", [name for name in HOW if name not in ("greedy", "sampled")])
def test_bfloat16_answers_with_processors_equal_plain_decoding(how: str, instructions: str) -> None:
    for number, draft in enumerate(DRAFTS):
        engine = engine_of(
            "qwen3", draft, ("random", "talon", "fixed", "eagle")[number], instructions
        )
        result = engine.generate(PROMPT, max_new_tokens=16, **HOW[how])
        assert result.token_ids == plain_answer("qwen3", instructions, how, 16)
        assert result.stats.num_draft_tokens > 0 or draft == "ngram"


@pytest.mark.parametrize("name", [name for name in policies.names() if name != "plain"])
def test_policies_with_their_own_defaults(name: str) -> None:
    """Trees of the sizes that users get; SpecDec++'s head reads states of another width than a tiny model has."""
    engine = engine_of("llama", "small_model")
    engine.policy = policy_for(name) if name == "specdecpp" else policies.make(name)
    result = engine.generate(PROMPT, max_new_tokens=40)
    assert result.token_ids == plain_answer("llama", INSTRUCTION_SETS[0], "greedy", 40)


GREEDY: tuple[dict[str, Any], ...] = ({}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3})


@cache
def answers_of_transformers(family: str) -> list[list[int]]:
    return [plainly(model_of(family, torch.float32), PROMPT, 20, **options) for options in GREEDY]


@pytest.mark.sliced(4)
@pytest.mark.parametrize("instructions", WITH_VECTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_answers_are_those_of_transformers(family: str, instructions: str) -> None:
    """Under trees of random shape, of a head and of n-grams."""
    lm = lm_of(family, instructions, torch.float32)
    for draft in ("eagle-3", "ngram"):
        engine = Engine(
            NativeTarget(lm), drafter_of(draft, lm, family, None), policy_for("random", 7)
        )
        found = [
            engine.generate(PROMPT, max_new_tokens=20, **options).token_ids for options in GREEDY
        ]
        assert found == answers_of_transformers(family)


# ---------------------------------------------------------------------------------------------------- many rows


@pytest.mark.sliced(1)
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_wide_trees_over_long_contexts_equal_plain_decoding(instructions: str) -> None:
    """More nodes than a word of a mask has bits, and than a tile has rows."""
    prompt = [(7 * i * i + i) % VOCABULARY for i in range(150)]
    plain = engine_of("qwen2", "none", instructions=instructions)
    lm = plain.target.lm
    for draft, policy in (
        ("small_model", policies.make("eagle", width=24, expansions=5, budget=110)),
        ("eagle-3", policies.make("fixed", branching=(9, 4, 2))),
    ):
        engine = Engine(NativeTarget(lm), drafter_of(draft, lm, "qwen2", instructions), policy)
        for options in ({}, {"temperature": 1.3, "seed": 2}):
            stream = engine.stream(prompt, max_new_tokens=30, **options)
            sizes = [len(piece.cycle.tree) for piece in stream]
            assert max(sizes) > 64
            assert (
                stream.result.token_ids
                == plain.generate(prompt, max_new_tokens=30, **options).token_ids
            )


@pytest.mark.parametrize("rows", [1, 3, 16, 17])
def test_prompts_run_in_pieces_have_the_bits_of_prompts_run_whole(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(5 * i * i + 3) % VOCABULARY for i in range(90)]
    lm, ids = lm_of("mistral"), (0, 2, 6)

    def run() -> list[torch.Tensor]:
        cache = lm.new_cache(len(prompt))
        logits, states = lm.extend(cache, prompt, ids)
        return [logits, states, cache.slab[:, :, :, : len(prompt)]]

    answers = {
        draft: engine_of("mistral", draft).generate(prompt, max_new_tokens=12)
        for draft in ("none", "eagle-3")
    }
    whole = run()
    monkeypatch.setattr(native_lm_module, "PREFILL_ROWS", rows)
    monkeypatch.setattr(eagle, "PREFILL_ROWS", rows)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run(), whole, strict=True))
    assert whole[1].shape == (len(prompt), 3 * 32)
    for draft, expected in answers.items():
        result = engine_of("mistral", draft).generate(prompt, max_new_tokens=12)
        assert result.token_ids == expected.token_ids
        assert result.stats.acceptance_histogram == expected.stats.acceptance_histogram


def test_a_prompt_of_one_token_and_answers_up_to_the_end_of_the_context() -> None:
    for draft in DRAFTS:
        engine, plain = engine_of("llama", draft, "fixed"), engine_of("llama", "none")
        for prompt in ([7], [*range(200), *range(40)]):
            result = engine.generate(prompt, max_new_tokens=40)
            assert result.token_ids == plain.generate(prompt, max_new_tokens=40).token_ids
            assert len(result.token_ids) == min(40, 256 - len(prompt))


# ---------------------------------------------------------------------------------------------------- drafts


def test_the_choice_of_a_node_is_the_largest_finite_logit() -> None:
    target, tree = NativeTarget(lm_of("qwen3")), random_tree(1, 45, VOCABULARY, root=3)
    target.prefill(PROMPT)
    target.want((1, 6))
    logits, states = target.verify(tree)
    chosen = target.choose(tree)
    assert chosen.tokens == logits.argmax(-1).tolist()
    assert torch.equal(states, chosen.features)
    assert chosen.successors is None


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize("nodes", [1, 16, 45])
def test_the_successors_of_a_node_are_its_largest_logits(nodes: int, instructions: str) -> None:
    target, tree = (
        NativeTarget(lm_of("qwen3", instructions)),
        random_tree(1, nodes, VOCABULARY, root=3),
    )
    target.prefill(PROMPT)
    logits, _ = target.verify(tree)
    for count in (1, 8, VOCABULARY + 5):
        target.want(successors=count)
        chosen = target.choose(tree)
        values, tokens = logits.topk(min(count, VOCABULARY), dim=1)
        assert torch.equal(chosen.successors.logits, values)
        assert torch.equal(chosen.successors.tokens, tokens)
        assert chosen.tokens == tokens[:, 0].tolist()
        assert all(
            map(torch.equal, chosen.successors, Successors.of(logits, min(count, VOCABULARY)))
        )


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize("threads", [1, 3])
def test_of_equal_logits_the_lowest_token_comes_first(threads: int, instructions: str) -> None:
    model, before = tiny("qwen3").bfloat16(), torch.get_num_threads()
    rows = model.lm_head.weight.data
    rows[8:] = rows[torch.arange(8, len(rows)) % 8]
    torch.set_num_threads(threads)
    try:
        target = NativeTarget(native_lm(model, instructions))
        target.prefill(PROMPT)
        for nodes in (1, 16, 45):
            tree = random_tree(1, nodes, VOCABULARY, root=3)
            logits, _ = target.verify(tree)
            order = logits.argsort(dim=1, descending=True, stable=True)
            for count in (1, 8, VOCABULARY):
                target.want(successors=count)
                assert torch.equal(target.choose(tree).successors.tokens, order[:, :count])
    finally:
        torch.set_num_threads(before)


HEADS: dict[str, EagleConfig] = {
    "eagle-1": head_config(1),
    "eagle-3": head_config(),
    "window": head_config(sliding_window=5),
    "window of one": head_config(sliding_window=1),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_draft_as_torch_does(kind: str) -> None:
    """On a native target's features; EAGLE-3 by the native forward, whose float32 sums stand in another order."""
    lm, config = lm_of("llama", None, torch.float32), HEADS[kind]
    state = random_state(config)
    native_head = (
        NativeHead(config, state, lm)
        if config.version == 3
        else head_from(config, state, lm.dtype, CPU)
    )
    runs = []
    for head in (native_head, head_from(config, state, lm.dtype, CPU)):
        engine = Engine(
            NativeTarget(lm),
            EagleDraft(head, lm),
            policies.make("eagle", width=4, expansions=4, budget=20),
        )
        pieces = list(engine.stream(PROMPT, max_new_tokens=24))
        runs.append(
            [(piece.cycle.tree.tokens.tolist(), piece.cycle.tree.log_probs) for piece in pieces]
        )
    for (tokens, scores), (their_tokens, their_scores) in zip(*runs, strict=True):
        assert tokens == their_tokens
        assert torch.allclose(scores, their_scores, atol=1e-3)
