"""EAGLE heads as drafts: each tree node's logits, what a cycle leaves behind, and answers equal to plain decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specengine import policies
from specengine.checkpoints.eagle import Convention, conventions, one_step_agreement
from specengine.drafters.eagle import EagleDraft
from specengine.engine import Engine
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.eagle import (
    Attend,
    EagleConfig,
    EagleHead,
    Rope,
    causal,
    default_layer_ids,
    head_from,
)
from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.backend import needs_packing
from tests.heads import LAYERS, LLAMA3, YARN, deep, fit
from tests.toy import (
    CPU,
    POLICIES,
    VOCABULARY,
    RandomShape,
    Tables,
    ToyTarget,
    byte_tokenizer,
    head_config,
    policy_for,
    random_state,
    tiny_head,
)

PROMPT = [*range(40, 52)]
VARIANTS: dict[str, EagleConfig] = {
    "eagle-1": head_config(1),
    "eagle-1 fc bias": head_config(1, fc_bias=True, own_embeddings=True),
    "eagle-1 qkv bias": head_config(1, qkv_bias=True, num_kv_heads=4),
    "eagle-3": head_config(),
    "eagle-3 whole vocabulary": head_config(draft_vocab_size=VOCABULARY),
    "eagle-3 llama3": head_config(rope=LLAMA3, layer_ids=(0, 1, 4)),
    "eagle-3 yarn": head_config(rope=YARN, head_dim=16, num_kv_heads=1),
    "eagle-3 qwen3 layer": head_config(
        qk_norm=True, norm_before_residual=True, qkv_bias=True, o_bias=True
    ),
    "eagle-3.1": head_config(fusion_norm="each", norm_recurrent=True, own_embeddings=True),
    "eagle-3 norm before fc": head_config(fusion_norm="whole", layer_ids=(1, 3)),
    "eagle-3 bare logits": head_config(norm_logits=False),
    "eagle-3 temperatures": head_config(temperatures=(0.5, 2.0)),
    "eagle-1 temperatures": head_config(1, temperatures=(2.0, 0.5, 0.25, 1.5, 3.0)),
    "eagle-3 own width": head_config(hidden_size=24, own_embeddings=True),
    "eagle-3 window": head_config(sliding_window=6),
    "eagle-3 window of two": head_config(sliding_window=2),
    "eagle-1 window": head_config(1, sliding_window=14),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def drafter_for(target: HuggingFaceTarget, config: EagleConfig, seed: int = 0) -> EagleDraft:
    return EagleDraft(tiny_head(config, seed), target.lm)


# ---------------------------------------------------------------------------------------------------- tree nodes


def seen(head: EagleHead, rows: int) -> Attend:
    """Attention by a dense mask, row by row."""
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    for row in range(rows):
        mask[row, max(0, row - (head.config.sliding_window or rows) + 1) : row + 1] = True
    return lambda query, key, value: scaled_dot_product_attention(
        query, key, value, mask, enable_gqa=True
    )


@torch.inference_mode()
def dense_logits(
    head: EagleHead, model: PreTrainedModel, tokens: list[int], below: int, sampled_at: float = 0.0
) -> Tensor:
    """The head's logits after `tokens`, of which the last `below` stand below the root; nothing is cached.

    Rows whose token stands below the root have no feature of the target's: each is run again with all rows before
    it, on the recurrent state of the row before (algorithms: EAGLE, section 4).
    """
    known = len(tokens) - below - 1  # tokens before the root
    states = model(
        input_ids=torch.tensor([tokens[:known]]), output_hidden_states=True
    ).hidden_states
    features = torch.cat([states[i][0] for i in head.config.feature_ids(len(states) - 1)], dim=-1)
    hidden = head.fuse(features)
    table = head.embed_tokens if head.config.own_embeddings else model.get_input_embeddings()
    embeddings = embedding(torch.tensor(tokens[1:]), table.weight)
    while True:
        rows = len(hidden)
        recurrent = head(
            hidden[None], embeddings[None, :rows], torch.arange(rows)[None], seen(head, rows)
        )[0, -1:]
        if rows == len(tokens) - 1:
            break
        hidden = torch.cat([hidden, recurrent])
    logits = head.logits(recurrent)
    given = head.config.temperatures or (1.0,)
    temperature = max(
        given[min(below, len(given) - 1)], sampled_at if head.config.temperatures else 0.0
    )
    return (model.get_output_embeddings()(recurrent) if logits is None else logits)[0] / temperature


class Checking(EagleDraft):
    """Compares each node's logits with the dense ones, and offers what the target will choose, to be accepted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.worst, self.checked, self.depths, self.heat = 0.0, 0, set[int](), 0.0

    def root(self, tree: TokenTree) -> Step:
        return self._checked(tree, tree.root_alone(), lambda: super(Checking, self).root(tree))

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        return self._checked(tree, frontier, lambda: super(Checking, self).step(tree, frontier))

    def _checked(self, tree: TokenTree, frontier: Nodes, run: Callable[[], Step]) -> Step:
        stable, nodes = self.cache.slab[:, :, :, : self.cache.length].clone(), frontier.alive()
        step = run()
        assert torch.equal(self.cache.slab[:, :, :, : stable.shape[3]], stable)
        if step.normalized:
            return step
        self.depths.add(len(set(tree.depths[nodes].tolist())))
        model = self.target.model
        rows = []
        for row, node in enumerate(nodes.tolist()):
            path = tree.path_tokens(node)
            tokens = [*self._tokens, int(tree.tokens[0]), *path]
            expected = dense_logits(self.head.module, model, tokens, len(path), self.heat)
            error = (step.logits[row] - expected).abs().max() / expected.abs().max().clamp(min=1.0)
            self.worst = max(self.worst, float(error))
            self.checked += 1
            rows.append(model(torch.tensor([tokens])).logits[0, -1] * 0.5)
        return Step(torch.stack(rows))  # often right, so that paths of all lengths are accepted


@pytest.mark.sliced(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_nodes_logits_equal_a_dense_recomputation_of_its_path(variant: str) -> None:
    """Nodes of mixed depth, over many cycles in which paths of all lengths are committed."""
    target = HuggingFaceTarget(deep())
    draft = Checking(tiny_head(VARIANTS[variant]), target.lm)
    result = Engine(target, draft, RandomShape(seed=1, most=3)).generate(PROMPT, max_new_tokens=28)
    assert (
        result.token_ids == Engine(target, None, None).generate(PROMPT, max_new_tokens=28).token_ids
    )
    assert draft.worst < 1e-4
    assert draft.checked > 40
    assert max(draft.depths) > 1
    assert len(result.stats.acceptance_histogram) > 2
    assert draft.cache.length + int(draft.taken) == len(draft._tokens) == len(target.tokens)


@pytest.mark.sliced(1)
@pytest.mark.parametrize("variant", ["eagle-3", "eagle-3 temperatures", "eagle-1 temperatures"])
def test_a_draft_is_as_unsure_as_the_sampling_that_it_drafts_for(variant: str) -> None:
    """Its own temperatures are those of a greedy target, and come back with a greedy text; where it is not coupled."""
    target = HuggingFaceTarget(deep())
    draft = Checking(tiny_head(VARIANTS[variant]), target.lm)
    engine = Engine(target, draft, RandomShape(seed=1, most=3))
    for heat in (0.0, 0.8, 1.7, 0.0):
        draft.heat = heat
        engine.generate(PROMPT, max_new_tokens=12, temperature=heat, seed=3, coupled=False)
    assert draft.worst < 1e-4
    assert draft.checked > 40


@torch.inference_mode()
def test_drafting_leaves_the_stable_rows_bit_identical_whatever_the_scratch_holds() -> None:
    target = HuggingFaceTarget(deep())
    answers = []
    for poison in (0.0, float("nan")):
        draft = drafter_for(target, head_config())
        target.want(draft.traits.features)
        target.reset()
        target.reserve(64, 32)
        draft.begin(PROMPT, target.prefill(PROMPT))
        draft.cache.reserve(256)
        draft.cache.slab[:, :, :, draft.cache.length :] = poison
        rows = []
        for cycle in range(3):
            tree = TokenTree.root(7 + cycle, 32)
            for passes in range(4):
                frontier = Nodes.of(torch.arange(max(passes > 0, len(tree) - 3), len(tree)))
                step = draft.step(tree, frontier) if passes else draft.root(tree)
                rows.append(step.logits.clone())
                step.add_best_children(tree, frontier, 2)
                tree.passes += 1
            stable = draft.cache.slab[:, :, :, : draft.cache.length].clone()
            _, features = target.verify(tree)
            target.commit(tree, [0, 1])
            draft.accept(
                Cycle(tree, [0, 1], [int(tree.tokens[1]), 9], Seconds(), features=features)
            )
            assert torch.equal(draft.cache.slab[:, :, :, : stable.shape[3]], stable)
        answers.append(torch.cat(rows))
    assert torch.equal(*answers)


def test_a_long_prompt_is_taken_in_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceTarget(deep())
    prompt = [(7 * i) % VOCABULARY for i in range(40)]
    logits = []
    for rows in (1024, 7):
        monkeypatch.setattr("specengine.models.huggingface.PREFILL_ROWS", rows)
        monkeypatch.setattr("specengine.models.eagle.PREFILL_ROWS", rows)
        draft = drafter_for(target, head_config())
        target.want(draft.traits.features)
        target.reset()
        with torch.inference_mode():
            draft.begin(prompt, target.prefill(prompt))
            logits.append(draft.root(TokenTree.root(3, 4)).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-4


# ---------------------------------------------------------------------------------------------------- answers


@pytest.mark.sliced(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("version", [1, 3])
def test_answers_equal_plain_decoding(policy: str, version: Any) -> None:
    target = HuggingFaceTarget(deep())
    engine = Engine(target, drafter_for(target, head_config(version)), policy_for(policy))
    plain = Engine(HuggingFaceTarget(deep()), None, None)
    for options in ({}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5}):
        expected = plain.generate(PROMPT, max_new_tokens=20, **options)
        assert engine.generate(PROMPT, max_new_tokens=20, **options).token_ids == expected.token_ids


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "phi", "gemma"]
)
def test_any_family_gives_its_hidden_states(family: str) -> None:
    model = deep(family)
    target = HuggingFaceTarget(model)
    engine = Engine(
        target, drafter_for(target, head_config(3, model)), policies.make("fixed", branching=(2, 2))
    )
    plain = Engine(HuggingFaceTarget(deep(family)), None, None).generate(PROMPT, max_new_tokens=12)
    assert engine.generate(PROMPT, max_new_tokens=12).token_ids == plain.token_ids
    with torch.inference_mode():
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
        target.want((1, LAYERS))
        target.reset()
        features = target.prefill(PROMPT)
    assert (features - torch.cat([states[1][0], states[LAYERS][0]], -1)).abs().max() < 1e-4


@pytest.mark.parametrize("prompt", [[5], [5, 6]])
@pytest.mark.parametrize("version", [1, 3])
def test_the_shortest_prompts(prompt: list[int], version: Any) -> None:
    target = HuggingFaceTarget(deep())
    engine = Engine(
        target,
        drafter_for(target, head_config(version)),
        policies.make("eagle", width=2, expansions=1, budget=6),
    )
    plain = Engine(target, None, None).generate(prompt, max_new_tokens=10)
    assert engine.generate(prompt, max_new_tokens=10).token_ids == plain.token_ids


def test_turns_reuse_what_target_and_draft_both_hold() -> None:
    target = HuggingFaceTarget(deep())
    draft = Checking(tiny_head(head_config()), target.lm)
    tokenizer = byte_tokenizer()
    session = Engine(target, draft, RandomShape(seed=3), tokenizer).session()
    for turn, text in enumerate(("Hi", "And now?", "Bye")):
        expected_messages = [*session.messages, {"role": "user", "content": text}]
        result = session.generate(text, max_new_tokens=7)
        fresh = Engine(HuggingFaceTarget(deep()), None, None, tokenizer).generate(
            expected_messages, max_new_tokens=7
        )
        assert result.token_ids == fresh.token_ids
        assert (result.stats.num_cached_prompt_tokens > 0) == (turn > 0)
    assert draft.worst < 1e-4


@pytest.mark.parametrize("cut", [0, 1, 5, 11, 12, 14])
@torch.inference_mode()
def test_a_prompt_that_leaves_the_last_one_is_run_again_from_there(cut: int) -> None:
    """`cut` tokens agree; the row before them was run with a token that is gone."""
    target = HuggingFaceTarget(deep())
    draft = drafter_for(target, head_config())
    engine = Engine(target, draft, policies.make("fixed", branching=(2, 1)))
    engine.generate(PROMPT, max_new_tokens=3)
    held = list(target.tokens)
    prompt = [*held[:cut], 99, 98, 97]
    kept = min(target.cached(prompt), draft.cached(prompt))
    assert kept >= cut - 1
    draft.begin(prompt, target.prefill(prompt, kept))
    logits = draft.root(TokenTree.root(3, 8)).logits[0]
    assert (
        logits - dense_logits(draft.head.module, target.model, [*prompt, 3], 0)
    ).abs().max() < 1e-4


@torch.inference_mode()
def test_the_columns_of_a_head_are_the_tokens_that_its_map_says() -> None:
    """d2t holds, by column, what is added to the column's number to get the target's token."""
    target, config = HuggingFaceTarget(deep()), head_config(draft_vocab_size=6)
    state = random_state(config) | {"d2t": torch.tensor([3, 3, 10, 40, 40, VOCABULARY - 6])}
    drafter = EagleDraft(head_from(config, state, torch.float32, CPU), target.lm)
    target.want(drafter.traits.features)
    drafter.begin(PROMPT[:-1], target.prefill(PROMPT[:-1]))
    step = drafter.root(TokenTree.root(PROMPT[-1], 2))
    assert step.token_ids is not None
    assert step.token_ids.tolist() == [3, 4, 12, 43, 44, VOCABULARY - 1]
    assert step.logits.shape == (1, 6)


@pytest.mark.parametrize("held", [0, 4, 20])
def test_a_draft_that_holds_less_than_the_target_decides_what_is_run_again(held: int) -> None:
    """held: how many tokens of the first turn the draft still has."""
    target, tokenizer = HuggingFaceTarget(deep()), byte_tokenizer()
    draft = Checking(tiny_head(head_config()), target.lm)
    session = Engine(target, draft, RandomShape(seed=3), tokenizer).session()
    session.generate("Hello there, you", max_new_tokens=7)
    kept = target.tokens[:held]
    draft.reset()
    if kept:
        with torch.inference_mode():
            draft.begin(
                kept, target.lm.extend(target.lm.new_cache(64), kept, draft.traits.features)[1]
            )
    expected_messages = [*session.messages, {"role": "user", "content": "And now?"}]
    result = session.generate("And now?", max_new_tokens=7)
    fresh = Engine(HuggingFaceTarget(deep()), None, None, tokenizer).generate(
        expected_messages, max_new_tokens=7
    )
    assert result.token_ids == fresh.token_ids
    assert result.stats.num_cached_prompt_tokens == held
    assert draft.worst < 1e-4


@needs_packing
def test_packed_targets_and_heads_draft_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (1, 3):
        config = head_config(version)  # type: ignore[arg-type]
        answers, drafted = [], []
        for pack in (False, True):
            target = HuggingFaceTarget(deep().to(torch.bfloat16), pack=pack)
            head = head_from(config, random_state(config), torch.bfloat16, CPU)
            draft = EagleDraft(head, target.lm, pack=pack)
            engine = Engine(target, draft, policies.make("eagle", width=3, expansions=2, budget=12))
            result = engine.generate(PROMPT, max_new_tokens=16)
            answers.append(result.token_ids)
            drafted.append(result.stats.acceptance_histogram)
            states = target.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
            assert (
                len(states) == LAYERS + 1
            )  # the hooks that give them stand on the shared layers once
        assert answers[0] == answers[1]
        assert drafted[0] == drafted[1]


def test_a_draft_without_features_asks_for_none() -> None:
    model = deep()
    engine = Engine.from_pretrained(model, "ngram", backend="huggingface")
    asked: list[bool] = []
    model.register_forward_pre_hook(
        lambda _module, _args, kwargs: asked.append(bool(kwargs.get("output_hidden_states"))),
        with_kwargs=True,
    )
    cycles = [piece.cycle for piece in engine.stream(PROMPT, max_new_tokens=8)]
    assert asked
    assert not any(asked)
    assert all(cycle.features is None for cycle in cycles)


def test_engines_may_share_a_target() -> None:
    target = HuggingFaceTarget(deep())
    plain = Engine(target, None, None)
    engine = Engine(target, drafter_for(target, head_config()), policies.make("chain", length=3))
    expected = plain.generate(PROMPT, max_new_tokens=12).token_ids
    for _ in range(2):
        assert engine.generate(PROMPT, max_new_tokens=12).token_ids == expected
        assert plain.generate(PROMPT, max_new_tokens=12).token_ids == expected


# ---------------------------------------------------------------------------------------------------- refusals


def test_targets_that_give_no_hidden_states_are_refused() -> None:
    target = HuggingFaceTarget(deep())
    engine = Engine(
        ToyTarget(Tables(VOCABULARY)),
        drafter_for(target, head_config()),
        policies.make("chain", length=2),
    )
    with pytest.raises(
        UnsupportedModelError, match="ToyTarget: gives no hidden states, and this draft reads them"
    ):
        engine.generate(PROMPT)
    with pytest.raises(UnsupportedModelError, match="hidden states 9 were asked for, it gives 7"):
        target.want((9,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 48}, "made for a target with hidden size 48, this one has 32"),
        ({"vocab_size": 300}, "made for a target with vocabulary 300, this one has 260"),
        (
            {"layer_ids": (1, 3, 6)},
            "reads hidden states 1, 3, 6; a target of 6 layers has 0 to 5 before its final norm",
        ),
    ],
)
def test_heads_of_other_targets_are_refused(changes: dict[str, Any], message: str) -> None:
    config = head_config(**changes)
    with pytest.raises(InputError, match=message):
        EagleDraft(tiny_head(config), CausalLM(deep()))


def test_features_must_be_given() -> None:
    target = HuggingFaceTarget(deep())
    draft = drafter_for(target, head_config())
    with pytest.raises(InputError, match="features: missing for tokens 0 to 12 of 12"):
        draft.begin(PROMPT)
    with pytest.raises(
        InputError, match="features: an EAGLE draft needs a target that gives its hidden states"
    ):
        draft.accept(Cycle(TokenTree.root(1), [0], [2], Seconds()))


# ---------------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize(
    "rope", [LLAMA3, YARN, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, None]
)
def test_rotary_positions_are_those_of_transformers(rope: dict[str, Any] | None) -> None:
    rope = rope or {"rope_type": "default", "rope_theta": 20000.0}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            head_dim=8,
            max_position_embeddings=256,
            rope_parameters=rope,
        )
    )
    positions = torch.arange(0, 200, 7)[None]
    expected = theirs(torch.zeros(1), positions)
    ours = Rope(head_config(rope=rope, max_position_embeddings=256))(positions, torch.float32)
    for mine, reference in zip(ours, expected, strict=True):
        assert torch.equal(mine[:, 0], reference)


@torch.inference_mode()
def test_wrong_parameters_change_the_logits() -> None:
    """What a loader could get wrong without an error of the network's own."""
    config, model = head_config(), deep()
    right = dense_logits(tiny_head(config), model, [*PROMPT, 3], 0)
    for changes in (
        {"rope": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope": LLAMA3},
        {"layer_ids": tuple(i + 1 for i in default_layer_ids(LAYERS))},
        {"norm_logits": False},
        {"norm_before_residual": True},
        {"rms_norm_eps": 1e-1},
    ):
        wrong = head_from(replace(config, **changes), random_state(config), torch.float32, CPU)  # type: ignore[arg-type]
        assert (dense_logits(wrong, model, [*PROMPT, 3], 0) - right).abs().max() > 1e-3
    recurrent = head_from(
        replace(config, norm_recurrent=True), random_state(config), torch.float32, CPU
    )
    below = [
        dense_logits(head, model, [*PROMPT, 3, 4], 1) for head in (tiny_head(config), recurrent)
    ]
    assert (below[0] - below[1]).abs().max() > 1e-3


@pytest.mark.parametrize("variant", ["eagle-1", "eagle-3"])
@torch.inference_mode()
def test_embeddings_stand_before_hidden_states_as_published(variant: str) -> None:
    """In what the first product reads: without weights for its first half no embedding makes a difference."""
    head = copy.deepcopy(tiny_head(VARIANTS[variant]))
    size, attention = head.config.hidden_size, head.layers[0].self_attn
    readers = (
        [head.fc]
        if variant == "eagle-1"
        else [attention.q_proj, attention.k_proj, attention.v_proj]
    )
    for layer in readers:
        layer.weight[:, :size] = 0.0
    hidden, other, embeddings = torch.randn(
        3, 1, 5, size, generator=torch.Generator().manual_seed(0)
    )
    where = torch.arange(5)[None], seen(head, 5)
    assert torch.equal(head(hidden, embeddings, *where), head(hidden, other, *where))
    assert not torch.equal(head(hidden, embeddings, *where), head(other, embeddings, *where))


def test_a_head_trains() -> None:
    """The serving module takes gradients and batches."""
    for version in (1, 3):
        config = head_config(version)  # type: ignore[arg-type]
        head = config.network()
        features = torch.randn(2, 9, config.num_features * 32)
        states = head(
            head.fuse(features), torch.randn(2, 9, 32), torch.arange(9).expand(2, 9), causal
        )
        logits = head.logits(states)
        (states if logits is None else logits).sum().backward()
        assert all(
            parameter.grad is not None for parameter in head.parameters() if logits is not None
        )
        assert head.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


# ---------------------------------------------------------------------------------------------------- agreement


def test_conventions_are_distinct_and_possible() -> None:
    assert conventions(head_config(), 32) == {
        "as read": (2, 16, 29),
        "as read, + 1": (3, 17, 30),
        "as read, - 1": (1, 15, 28),
    }
    found = conventions(head_config(layer_ids=(1, 15, 28)), 32)
    assert found["as read, + 1"] == (2, 16, 29)
    assert found["EAGLE, + 1"] == (3, 17, 30)
    assert (0, 14, 27) in found.values()
    assert conventions(head_config(layer_ids=(0, 5)), 6) == {"as read": (0, 5)}
    assert conventions(head_config(1), 6) == {"as read": (6,)}


def trained_head(model: PreTrainedModel, ids: tuple[int, ...], tokens: list[int]) -> EagleHead:
    """A head fitted to say the target's next token after each of `tokens` from these hidden states."""
    config = head_config(3, model, draft_vocab_size=VOCABULARY, layer_ids=ids)
    head = config.network()
    torch.manual_seed(0)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    features = torch.cat([out.hidden_states[i][0] for i in ids], -1).detach()
    wanted = out.logits[0, 1:].argmax(-1)
    embeddings = model.get_input_embeddings()(torch.tensor(tokens[1:])).detach()
    return fit(head, features[:-1], embeddings, wanted, steps=60)


def test_agreement_finds_the_right_layers() -> None:
    model = deep()
    tokens = torch.randint(VOCABULARY, (80,), generator=torch.Generator().manual_seed(2)).tolist()
    head = trained_head(model, (2, 3, 4), tokens)
    head.config = replace(head.config, layer_ids=(1, 2, 3))  # as if the ids counted otherwise
    measured = {found.name: found for found in one_step_agreement(head, CausalLM(model), [tokens])}
    read, right = measured["as read"], measured["as read, + 1"]
    assert right.layer_ids == (2, 3, 4)
    assert right.agreement > 0.9 > read.agreement
    assert right.surely_better_than(read)
    assert not read.surely_better_than(right)
    assert not right.surely_better_than(right)


def test_a_lucky_row_is_no_better_convention() -> None:
    some = torch.zeros(50, dtype=torch.bool)
    other = some.clone()
    other[3] = True
    assert not Convention("b", (1,), other).surely_better_than(Convention("a", (0,), some))
