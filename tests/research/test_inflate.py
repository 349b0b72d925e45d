"""research.inflate: a small model inside a large shape says what it said, and so does its draft head."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from research.inflate import Inflated, inflate
from research.inflate.__main__ import main
from research.inflate.places import layer_places, place_heads
from research.inflate.plan import plan_for
from research.inflate.shape import SHAPES, AttentionShape, Shape, parse_shape
from specengine import policies
from specengine.checkpoints import embedded
from specengine.checkpoints.eagle import load_head, save_head
from specengine.drafters.eagle import EagleDraft
from specengine.engine import Engine
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.eagle import EagleConfig, causal, head_from
from specengine.models.huggingface import HuggingFaceTarget
from specengine.records import Cycle
from tests.heads import LAYERS, LLAMA3, YARN, deep, fit
from tests.toy import CPU, VOCABULARY, head_config, random_state, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [*range(40, 64)]

# groups of 2 in groups of 2; head size and vocabulary grow
WIDE = Shape(60, 9, 6, 3, 100, 300, head_dim=16)
# groups of 2 in groups of 4; copies of copies
WIDER_GROUPS = Shape(96, 7, 12, 3, 48, 700, head_dim=8)
NARROW_GROUPS = Shape(128, 6, 4, 4, 64, 260)  # each key-value head stands twice; head size 32
GROWN = (WIDE, WIDER_GROUPS, NARROW_GROUPS)


def small(**changes: Any) -> PreTrainedModel:
    model = deep(**changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return model


def inflated(
    model: PreTrainedModel,
    shape: Shape,
    config: EagleConfig | None = None,
    dtype: Any = torch.float32,
    **options: Any,
) -> Inflated:
    state = None if config is None else random_state(config)
    return inflate(model, config, state, shape, dtype, CPU, **options)


def error(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())


@torch.inference_mode()
def run(model: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits [tokens, vocabulary] and hidden states [tokens, hidden size]."""
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0], tuple(state[0] for state in out.hidden_states)


# ---------------------------------------------------------------------------------------------------- the target


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in the model's own dtype, where transformers computes them in float32: so float64 proves the algebra."""

    def forward(norm: Any, states: Tensor) -> Tensor:
        return rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("extra_tokens", ["copies", "silent"])
@pytest.mark.parametrize("shape", GROWN)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_logits_are_equal(
    shape: Shape, extra_tokens: Any, dtype: torch.dtype, tolerance: float
) -> None:
    model = small(rms_norm_eps=0.05).to(dtype)
    large = inflated(model, shape, dtype=dtype, extra_tokens=extra_tokens).model
    expected, found = run(model, PROMPT)[0], run(large, PROMPT)[0]
    assert large.dtype is dtype
    assert error(found[:, :VOCABULARY], expected) < tolerance
    # of a token and its copies rounding chooses, which differs between CPUs
    assert torch.equal(found[:, :VOCABULARY].argmax(-1), expected.argmax(-1))
    assert error(found.amax(-1), expected.amax(-1)) < tolerance
    if extra_tokens == "silent":
        assert (found[:, VOCABULARY:] < -(2.0**19)).all()
        assert error(found.softmax(-1)[:, :VOCABULARY], expected.softmax(-1)) < tolerance


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"rope_parameters": LLAMA3},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
    ],
    ids=["biases", "tied", "llama3", "no groups", "one group"],
)
def test_any_llama(changes: dict[str, Any]) -> None:
    model = small(**changes).double()
    large = inflated(model, Shape(56, 9, 8, 4, 100, 300, head_dim=24), dtype=torch.float64).model
    # 24 is no power of two times 8, so that frequencies differ by a rounding of their own
    assert error(run(large, PROMPT)[0][:, :VOCABULARY], run(model, PROMPT)[0]) < 1e-5
    large = inflated(model, Shape(56, 9, 8, 4, 100, 300, head_dim=16), dtype=torch.float64).model
    assert error(run(large, PROMPT)[0][:, :VOCABULARY], run(model, PROMPT)[0]) < 1e-12
    assert not large.config.tie_word_embeddings


@pytest.mark.sliced(1)
@pytest.mark.parametrize("shape", GROWN)
def test_greedy_and_sampled_answers_are_equal(shape: Shape) -> None:
    model = small()
    plain = Engine(HuggingFaceTarget(model), None, None)
    sampling = {"do_sample": True, "temperature": 1.5, "seed": 3}
    for extra_tokens, options in (("copies", {}), ("silent", {}), ("silent", sampling)):
        engine = Engine(
            HuggingFaceTarget(inflated(model, shape, extra_tokens=extra_tokens).model), None, None
        )
        expected = plain.generate(PROMPT, max_new_tokens=40, **options).token_ids
        assert engine.generate(PROMPT, max_new_tokens=40, **options).token_ids == expected


def test_copies_change_what_is_sampled_and_tie_with_their_originals() -> None:
    model = small()
    large = inflated(model, WIDER_GROUPS).model
    logits = run(large, PROMPT)[0]
    half = VOCABULARY // 2
    for copy in range(VOCABULARY, 700):
        original = half + (copy - VOCABULARY) % half
        assert torch.allclose(logits[:, copy], logits[:, original], rtol=1e-6)
        assert torch.equal(
            large.model.embed_tokens.weight[copy], large.model.embed_tokens.weight[original]
        )
    assert error(logits.softmax(-1)[:, :VOCABULARY], run(model, PROMPT)[0].softmax(-1)) > 0.1


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("shape", GROWN)
def test_hidden_states_stand_at_the_renumbered_ids(shape: Shape) -> None:
    model = small().double()
    states, large = (
        run(model, PROMPT)[1],
        run(inflated(model, shape, dtype=torch.float64).model, PROMPT)[1],
    )
    places = [*layer_places(LAYERS, shape.layers), shape.layers]
    assert len(large) == shape.layers + 1
    for mine, place in zip(states, places, strict=True):
        assert error(large[place][:, :32], mine) < 1e-12
        assert not large[place][:, 32:].any()


def test_layers_are_placed_evenly_and_in_order() -> None:
    assert layer_places(3, 3) == [0, 1, 2]
    assert layer_places(2, 5) == [0, 2]
    places = layer_places(30, 32)
    assert [places[i] for i in (0, 2, 15, 27, 29)] == [0, 2, 16, 28, 30]


def test_query_heads_keep_their_key_value_head() -> None:
    for small_heads, large_heads in (
        (AttentionShape(9, 3, 64), AttentionShape(32, 8, 128)),
        (AttentionShape(9, 3, 4), AttentionShape(12, 6, 4)),
        (AttentionShape(8, 1, 4), AttentionShape(8, 4, 12)),
    ):
        heads = place_heads(small_heads, large_heads)
        kept = dict(zip(heads.keys.places.tolist(), heads.keys.sources.tolist(), strict=True))
        size, group = large_heads.head_dim, large_heads.heads // large_heads.kv_heads
        assert len(set(heads.queries.places.tolist())) == small_heads.heads * small_heads.head_dim
        for place, source in zip(
            heads.queries.places.tolist(), heads.queries.sources.tolist(), strict=True
        ):
            head, channel = divmod(place, size)
            small_head, small_channel = divmod(source, small_heads.head_dim)
            small_kv = small_head // (small_heads.heads // small_heads.kv_heads)
            assert (
                kept[head // group * size + channel]
                == small_kv * small_heads.head_dim + small_channel
            )


def test_weights_that_cannot_be_felt_are_random() -> None:
    """Zeros would let a GPU run cooler and faster than the real model does."""
    large = inflated(small(), WIDE).model
    zero = {
        name: float((parameter == 0).float().mean()) for name, parameter in large.named_parameters()
    }
    for layer in range(WIDE.layers):
        for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            assert zero[f"model.layers.{layer}.{name}.weight"] < 0.5
    assert zero["lm_head.weight"] == 0
    again, other = inflated(small(), WIDE).model, inflated(small(), WIDE, seed=1).model
    assert torch.equal(again.lm_head.weight, large.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, large.lm_head.weight)


def test_sizes_are_as_asked() -> None:
    large = inflated(small(), WIDE, head_config(), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in large.model.parameters()} == {torch.bfloat16}
    heads = 6 * 16
    layer = 60 * (2 * heads + 2 * 48) + 3 * 60 * 100 + 2 * 60
    assert sum(p.numel() for p in large.model.parameters()) == 9 * layer + 2 * 300 * 60 + 60
    assert large.head_config is not None
    assert large.head_state is not None
    head = head_from(large.head_config, large.head_state, torch.bfloat16, CPU)
    # the attention reads twice the width, and one more norm
    wide = layer + 60 * (heads + 2 * 48) + 60
    assert sum(p.numel() for p in head.parameters()) == wide + 3 * 60 * 60 + 200 * 60 + 60


def test_the_default_model_and_its_head_fit_into_the_8b_shape() -> None:
    """With the parameters of Llama 3.1 8B; nothing is built."""
    folder = embedded.draft_head(embedded.NAME)
    assert folder is not None
    sizes = {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    }
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    config = LlamaConfig(**sizes, num_hidden_layers=30, vocab_size=49152, rope_parameters=rope)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    plan = plan_for(model, load_head(folder).config, SHAPES["8b"], torch.bfloat16, "copies")
    head_config = plan.head_config
    assert head_config is not None
    with torch.device("meta"):
        large, head = LlamaForCausalLM(plan.config), head_config.network()
    assert sum(parameter.numel() for parameter in large.parameters()) == 8_030_261_248
    layer = 3 * 4096**2 + 2 * 8192 * 1024 + 3 * 4096 * 14336
    fusion = 3 * 4096**2
    assert (
        sum(parameter.numel() for parameter in head.parameters())
        == fusion + layer + (32000 + 4) * 4096
    )
    assert (head_config.layer_ids, head_config.draft_vocab_size) == ((2, 16, 28), 32000)
    assert (plan.config.head_dim, head_config.head_dim) == (128, 128)


# ---------------------------------------------------------------------------------------------------- the head

DRAFTS_MORE = replace(WIDE, draft_vocab=220)
HEADS: dict[str, tuple[EagleConfig, Shape]] = {
    "eagle-3": (head_config(), WIDE),
    "more columns": (head_config(), DRAFTS_MORE),
    "whole vocabulary": (head_config(draft_vocab_size=VOCABULARY), WIDE),
    "narrow groups": (head_config(), NARROW_GROUPS),
    "layer ids": (head_config(layer_ids=(0, 1, 4)), WIDER_GROUPS),
    "llama3": (head_config(rope=LLAMA3), WIDE),
    "biases": (head_config(qkv_bias=True, o_bias=True, fc_bias=True), DRAFTS_MORE),
    "fc_norm": (head_config(fusion_norm="each", own_embeddings=True), DRAFTS_MORE),
    "input_norm": (head_config(fusion_norm="whole", norm_logits=False), DRAFTS_MORE),
    "recurrent norm": (head_config(norm_recurrent=True), WIDE),
    "residual norm": (head_config(norm_before_residual=True), WIDE),
    "own width": (head_config(hidden_size=24, own_embeddings=True), DRAFTS_MORE),
    "eagle-1": (head_config(1), WIDE),
    "eagle-1 with its own": (
        head_config(1, own_embeddings=True, fc_bias=True, qkv_bias=True),
        WIDE,
    ),
}


@torch.inference_mode()
def draft_logits(
    model: PreTrainedModel, config: EagleConfig, state: dict[str, Tensor]
) -> tuple[Tensor, Any]:
    """Log-probabilities and target ids, of the last row and of a node below it."""
    head = head_from(config, state, torch.float64, CPU)
    states = run(model, PROMPT)[1]
    features = torch.cat([states[i] for i in config.feature_ids(len(states) - 1)], -1)
    table = head.embed_tokens if config.own_embeddings else model.get_input_embeddings()
    embeddings = table(torch.tensor([*PROMPT[1:], 7, 8]))
    hidden = head.fuse(features)
    rows = []
    for _ in range(2):
        recurrent = head(
            hidden[None], embeddings[None, : len(hidden)], torch.arange(len(hidden))[None], causal
        )[0]
        logits = head.logits(recurrent[-1:])
        rows.append(model.get_output_embeddings()(recurrent[-1:]) if logits is None else logits)
        hidden = torch.cat([hidden, recurrent[-1:]])
    return torch.cat(rows).log_softmax(-1), head.target_ids()


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("name", HEADS)
def test_the_heads_log_probabilities_are_equal(name: str) -> None:
    config, shape = HEADS[name]
    model, state = small(rms_norm_eps=0.05).double(), random_state(config)
    config = replace(config, rms_norm_eps=0.01)
    large = inflate(model, config, state, shape, torch.float64, CPU, extra_tokens="silent")
    expected, expected_ids = draft_logits(model, config, state)
    assert large.head_config is not None
    assert large.head_state is not None
    found, ids = draft_logits(large.model, large.head_config, large.head_state)
    columns = config.draft_vocab_size
    assert error(found[:, :columns], expected) < 1e-12
    assert (found[:, columns:] < -(2.0**18)).all()
    if expected_ids is not None:
        assert torch.equal(ids[:columns], expected_ids)
        assert (ids[columns:] >= VOCABULARY).all()


def cycles(
    model: PreTrainedModel,
    config: EagleConfig,
    state: Any,
    tree: dict[str, int],
    prompt: Any = PROMPT,
    **options: Any,
) -> list[Cycle]:
    target = HuggingFaceTarget(model)
    engine = Engine(
        target,
        EagleDraft(head_from(config, state, model.dtype, CPU), target.lm),
        policies.make("eagle", **tree),
    )
    return [piece.cycle for piece in engine.stream(prompt, **options)]


def agreeing_state(config: EagleConfig, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state of a head fitted a little to the model's answer to PROMPT, so that it is right now and then."""
    answer = (
        Engine(HuggingFaceTarget(model), None, None).generate(PROMPT, max_new_tokens=40).token_ids
    )
    tokens, state = [*PROMPT, *answer], random_state(config)
    ids = state["d2t"] + torch.arange(len(state["d2t"]))
    # -100: is not drafted
    columns = torch.full((VOCABULARY,), -100).scatter_(0, ids, torch.arange(len(ids)))
    states = run(model, tokens)[1]
    features = torch.cat([states[i] for i in config.feature_ids(LAYERS)], -1)[:-2].clone()
    embeddings = model.get_input_embeddings()(torch.tensor(tokens[1:-1])).detach()
    head = head_from(config, state, torch.float32, CPU).requires_grad_(True)
    fit(head, features, embeddings, columns[tokens[2:]], steps=15, depth=3)
    return {name: tensor.detach() for name, tensor in head.state_dict().items()}


def assert_same_cycles(found: list[Cycle], expected: list[Cycle]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        size = len(theirs.tree)
        assert len(mine.tree) == size
        assert torch.equal(mine.tree.tokens[:size], theirs.tree.tokens[:size])
        assert torch.equal(mine.tree.parents[:size], theirs.tree.parents[:size])
        assert torch.allclose(
            mine.tree.path_log_probs[:size], theirs.tree.path_log_probs[:size], atol=1e-3
        )
        assert (mine.path, mine.tokens) == (theirs.path, theirs.tokens)


TREE = {"width": 4, "expansions": 3, "budget": 16}


@pytest.mark.sliced(3)
@pytest.mark.parametrize("extra_tokens", ["copies", "silent"])
@pytest.mark.parametrize("shape", [WIDE, DRAFTS_MORE, WIDER_GROUPS, NARROW_GROUPS])
def test_every_tree_and_every_accepted_path_is_the_same(shape: Shape, extra_tokens: Any) -> None:
    model = small()
    config = head_config(layer_ids=(1, 3, LAYERS - 1))
    state = agreeing_state(config, model)
    large = inflate(model, config, state, shape, torch.float32, CPU, extra_tokens=extra_tokens)
    expected = cycles(model, config, state, TREE, max_new_tokens=40)
    accepted = [len(cycle.path) for cycle in expected]
    assert max(accepted) > 2
    assert min(accepted) == 1
    assert large.head_config is not None
    assert_same_cycles(
        cycles(large.model, large.head_config, large.head_state, TREE, max_new_tokens=40), expected
    )


def test_an_eagle_1_head_drafts_the_same_trees() -> None:
    model, config = small(), head_config(1)
    state = random_state(config)
    large = inflate(model, config, state, WIDE, torch.float32, CPU, extra_tokens="silent")
    assert large.head_config is not None
    found = cycles(large.model, large.head_config, large.head_state, TREE, max_new_tokens=20)
    assert_same_cycles(found, cycles(model, config, state, TREE, max_new_tokens=20))


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("24x9x6x3x100x300", "shape: hidden 24 is smaller than the model's 32"),
        ("56x5x7x7x100x300", "shape: layers 5 is smaller than the model's 6"),
        ("56x9x7x7x40x300", "shape: intermediate 40 is smaller than the model's 48"),
        ("56x9x7x7x100x200", "shape: vocab 200 is smaller than the model's 260"),
        (
            "60x9x6x3x100x300x12",
            "heads of 12 channels are no multiple of the model's 8, so rotary frequencies",
        ),
        (
            "60x9x3x3x100x300x16",
            "2 groups of 2 query heads need 4 key-value heads with up to 1 query heads each",
        ),
        ("32x6x4x2x48x260x8x210", "shape: draft vocabulary 210; from 200 to 200 is possible"),
        ("60x9x6x3x100x300x16x190", "shape: draft vocabulary 190; from 200 to 240 is possible"),
        ("32x6x4x2x48x300x8x210", "need a channel more than hidden 32"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        inflated(small(), parse_shape(shape), head_config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": True}, "normalises queries and keys"),
        ({"hidden_size": 24, "own_embeddings": True, "fusion_norm": "each"}, "two different eps"),
        ({"norm_recurrent": True}, "does not keep the constant channel"),
        ({"norm_before_residual": True}, "does not keep the constant channel"),
        ({"intermediate_size": 200}, "intermediate_size 100 is smaller than the head's 200"),
        (
            {"hidden_size": 64, "own_embeddings": True},
            "hidden_size 60 is smaller than the head's 64",
        ),
        (
            {"target_hidden_size": 48},
            "made for hidden size 48 and vocabulary 260, the model has 32 and 260",
        ),
        ({"rope": YARN, "head_dim": 8}, "the head's rotary frequencies depend on the head size"),
    ],
)
def test_heads_that_cannot_be_inflated_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, UnsupportedModelError), match=message):
        inflated(small(), DRAFTS_MORE, head_config(**changes))


def test_other_refusals() -> None:
    with pytest.raises(
        UnsupportedModelError, match="Qwen3ForCausalLM: only LlamaForCausalLM can be inflated"
    ):
        inflated(tiny("qwen3"), WIDE)
    with pytest.raises(InputError, match="the model's rotary frequencies depend on the head size"):
        inflated(small(rope_parameters=YARN), WIDE)
    with pytest.raises(InputError, match="an EAGLE-1 head reads the target's logits"):
        inflated(small(), WIDE, head_config(1))
    with pytest.raises(InputError, match="dtype: silent tokens and draft columns need the range"):
        inflated(small(), WIDE, dtype=torch.float16, extra_tokens="silent")
    with pytest.raises(InputError, match="extra_tokens: got 'loud', accepted copies, silent"):
        inflated(small(), WIDE, extra_tokens="loud")
    with pytest.raises(InputError, match="6 heads must be a multiple of 4 key-value heads"):
        Shape(60, 9, 6, 4, 100, 300)
    for text in ("7b", "56x9", "60x9x6x3x100x0", "axbxcxdxexf"):
        with pytest.raises(
            argparse.ArgumentTypeError, match="accepted: 8b, 135m, tiny and HIDDENx"
        ):
            parse_shape(text)


# ---------------------------------------------------------------------------------------------------- files


def test_the_command_writes_a_pair_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config = small(), head_config(layer_ids=(1, 3, LAYERS - 1))
    state = agreeing_state(config, model)
    model.save_pretrained(tmp_path / "small")
    save_head(config, state, tmp_path / "small-head")
    command = f"--model {tmp_path}/small --draft {tmp_path}/small-head --shape 60x9x6x3x100x300x16x220 --dtype float32"
    main([*command.split(), "--out", str(tmp_path / "large"), "--device", "cpu"])
    assert capsys.readouterr().err.endswith("B parameters\n")
    folder = tmp_path / "large"
    engine = Engine.from_pretrained(
        str(folder), str(folder / "head"), "eagle", policy_options=TREE, device="cpu", lookup=False
    )
    found = [piece.cycle for piece in engine.stream(PROMPT, max_new_tokens=20)]
    assert_same_cycles(found, cycles(model, config, state, TREE, max_new_tokens=20))
    assert load_head(folder / "head").config.layer_ids == (1, 4, 7)
    noted = json.loads((folder / "provenance.json").read_text())
    assert noted["shape"]["hidden"] == 60
    assert noted["model"] == "small"


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_and_its_head(default_model_path: Path) -> None:
    """In float32: wider, one layer more, silent tokens and columns; the same trees and the same paths."""
    model = AutoModelForCausalLM.from_pretrained(default_model_path, dtype=torch.float32)
    folder = embedded.draft_head(embedded.NAME)
    assert folder is not None
    config, state, _ = load_head(folder)
    shape = Shape(585, 31, 9, 3, 1544, 49200, head_dim=64, draft_vocab=12300)
    large = inflate(model, config, state, shape, torch.float32, CPU, extra_tokens="silent")
    assert large.head_config is not None
    assert large.head_config.layer_ids == (2, 15, 27)
    prompt = AutoTokenizer.from_pretrained(default_model_path).encode(
        "One, two, three, four, five,"
    )
    tree = {"width": 3, "expansions": 2, "budget": 8}
    expected = cycles(model, config, state, tree, prompt, max_new_tokens=6)
    assert max(len(cycle.path) for cycle in expected) > 1
    found = cycles(large.model, large.head_config, large.head_state, tree, prompt, max_new_tokens=6)
    assert_same_cycles(found, expected)
