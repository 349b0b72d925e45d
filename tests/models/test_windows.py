"""Sliding windows: each row of a tree sees the last positions alone, in whatever slots they stand."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specengine import Engine
from specengine.errors import UnsupportedModelError
from specengine.models.attention import attend_near, dense, note_places, prompt_mask
from specengine.models.configs import window_of
from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.models.kv_cache import Rows
from specengine.models.refusals import NoTreesError
from specengine.ops.tree import TokenTree
from specengine.request.prompts import CONTEXT_SOURCES
from tests.toy import near_copy, policy_for, random_tree, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOW = 16
HALF = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}


def generated(
    model: PreTrainedModel, prompt: list[int], count: int, *, cached: bool = True
) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, "use_cache": cached}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, len(prompt) :
    ].tolist()


@pytest.mark.sliced(3)
@pytest.mark.parametrize("length", [4, 15, 16, 17, 70])
@pytest.mark.parametrize(
    ("family", "changes"), [("mistral", {"sliding_window": WINDOW}), ("qwen2", HALF)]
)
def test_answers_go_on_past_the_window(family: str, changes: dict[str, Any], length: int) -> None:
    model, prompt = tiny(family, **changes), [(7 * i * i) % 250 + 1 for i in range(length)]
    expected = generated(model, prompt, 40)
    assert (
        Engine.from_pretrained(model, policy="plain").generate(prompt, max_new_tokens=40).token_ids
        == expected
    )
    engine = Engine.from_pretrained(model, near_copy(family, **changes), policy_for("eagle"))
    answer = engine.generate(prompt, max_new_tokens=40)
    assert answer.token_ids == expected
    assert answer.stats.num_accepted_draft_tokens > 10
    assert (
        engine.generate(prompt, max_new_tokens=40, seed=1, temperature=1.0).token_ids
        == (
            Engine.from_pretrained(model, policy="plain").generate(
                prompt, max_new_tokens=40, seed=1, temperature=1.0
            )
        ).token_ids
    )


def test_a_window_matters_to_these_models() -> None:
    prompt = [(7 * i * i) % 250 + 1 for i in range(70)]
    wide = tiny("mistral", sliding_window=None)
    assert generated(tiny("mistral", sliding_window=WINDOW), prompt, 40) != generated(
        wide, prompt, 40
    )


def rows_over(lm: CausalLM, tree: TokenTree, committed: int) -> Rows:
    cache = lm.new_cache(committed + 64)
    cache.length = committed
    rows = Rows.of(tree, cache.filled)
    note_places(cache, rows)
    return rows


def test_a_mask_is_by_position() -> None:
    lm, tree = CausalLM(tiny("mistral", sliding_window=WINDOW)), random_tree(3, 12, 90)
    rows = rows_over(lm, tree, 40)
    mask, depths = dense(rows, WINDOW), tree.depths.tolist()
    for node in range(12):
        path = {40 + above for above in range(12) if int(tree.ancestors[node, 0]) >> above & 1}
        position = 40 + depths[node]
        seen = {slot for slot in range(40) if slot > position - WINDOW}
        seen |= {slot for slot in path if 40 + depths[slot - 40] > position - WINDOW}
        assert set(mask[node].nonzero()[:, 0].tolist()) == seen
    assert torch.equal(
        prompt_mask(5, 40, torch.device("cpu"), WINDOW).sum(1), torch.full((5,), WINDOW)
    )


def test_masks_without_a_host_read_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tree = CausalLM(tiny("mistral", sliding_window=WINDOW)), random_tree(5, 20, 90)
    rows = rows_over(lm, tree, 50)
    torch.manual_seed(0)
    query, keys, values = torch.randn(4, 20, 8), torch.randn(2, 256, 8), torch.randn(2, 256, 8)
    near = attend_near(query, keys, values, rows, 0.3, WINDOW)
    monkeypatch.setattr("specengine.models.attention.ops.is_free", lambda count: False)
    torch.testing.assert_close(attend_near(query, keys, values, rows, 0.3, WINDOW), near)


def test_padding_reads_no_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers store the keys of live rows alone; NaN in the slots of padding would pass through a mask."""
    lm, tree = CausalLM(tiny("mistral", sliding_window=WINDOW)), random_tree(5, 20, 90)
    rows = rows_over(lm, tree, 50)
    torch.manual_seed(0)
    query, keys, values = torch.randn(4, 24, 8), torch.randn(2, 256, 8), torch.randn(2, 256, 8)
    expected = attend_near(query[:, :20], keys, values, rows, 0.3, WINDOW)
    parts = (
        torch.cat([part, part.new_zeros(4, *part.shape[1:])])
        for part in (rows.tokens, rows.positions, rows.words)
    )
    padded = Rows(*parts, rows.slot, rows.prefix, rows.live)
    padded.places = rows.places
    keys[:, 70:] = values[:, 70:] = torch.nan
    monkeypatch.setattr("specengine.models.attention.ops.is_free", lambda count: False)
    found = attend_near(query, keys, values, padded, 0.3, WINDOW)
    torch.testing.assert_close(found[:, :20], expected)
    assert not found.isnan().any()


def test_a_layer_that_keeps_its_window_to_itself_takes_the_dense_mask() -> None:
    model = tiny(
        "Qwen2Moe",
        name="Qwen2Moe",
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        **HALF,
    )
    lm = CausalLM(model)
    assert lm.attention == "dense mask"
    prompt = [(7 * i * i) % 250 + 1 for i in range(40)]
    engine = Engine.from_pretrained(model, "ngram", policy_for("eagle"))
    assert engine.generate(prompt, max_new_tokens=24).token_ids == generated(model, prompt, 24)


def test_strict_attention_ends_with_the_window() -> None:
    model = tiny("mistral", sliding_window=WINDOW)
    try:
        target = HuggingFaceTarget(model, strict=True)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    assert target.max_context == WINDOW
    assert target.notes == ["strict: the context ends with the model's sliding window of 16 tokens"]


def test_the_window_of_a_config() -> None:
    assert window_of(tiny("mistral", sliding_window=8).config) == 8
    assert window_of(tiny("mistral", sliding_window=None).config) is None
    assert window_of(tiny("qwen2", **HALF | {"layer_types": ["full_attention"] * 2}).config) is None
    assert issubclass(NoTreesError, UnsupportedModelError)


def test_a_native_model_is_not_cut_at_its_window() -> None:
    model = tiny("mistral", sliding_window=WINDOW)
    engine = Engine.from_pretrained(model, policy="plain")
    assert engine.target.max_context == 256
    assert engine.generate([1, 2, 3, 4], max_new_tokens=40).token_ids == generated(
        model, [1, 2, 3, 4], 40
    )


def test_a_native_model_ends_with_the_original_context_of_longrope_where_it_is_asked_for() -> None:
    factors = {
        "long_factor": [2.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": WINDOW,
    }
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    model = tiny(
        "phi3",
        rope_parameters=rope,
        original_max_position_embeddings=WINDOW,
        max_position_embeddings=64,
    )
    engine = Engine.from_pretrained(model, policy="plain")
    assert "native: LongRoPE beyond 16 tokens, in a context of 64" in engine.target.backend
    assert engine.generate([1, 2, 3, 4], max_new_tokens=40).token_ids == generated(
        model, [1, 2, 3, 4], 40, cached=False
    )  # in transformers 5.17 a cache's tokens are lost at the switch
    try:
        short = Engine.from_pretrained(model, policy="plain", backend="native")
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    answer = short.generate([1, 2, 3, 4], max_new_tokens=40)
    assert len(answer.token_ids) == 12
    assert answer.stats.notes == [
        "native: the context ends with LongRoPE's original 16 tokens; backend='huggingface' has all 64",
        "max_new_tokens: the answer ends with the context, 16 tokens of prompt and answer; "
        + CONTEXT_SOURCES,
    ]
