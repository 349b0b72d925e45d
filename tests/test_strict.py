"""Strict verification: a node's bits are those of plain decoding, whatever tree it stands in."""

import os
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine, ops, policies, reference
from specengine.drafters.small_model import SmallModel
from specengine.errors import InputError, UnsupportedModelError
from specengine.targets.huggingface import HuggingFaceTarget, strict_rows
from specengine.tree import TokenTree
from tests.toy import policy_for, random_tree, tiny

NAMES = [name for name in policies.names() if name not in ("plain", "specdecpp")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# ---------------------------------------------------------------------------------------------------- the op

attentions = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "shape": st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.sampled_from([4, 20, 64, 96])),
        "rows": st.integers(1, 9),
        "prefix": st.sampled_from([0, 1, 5, 63, 64, 65, 130]),
        "dtype": st.sampled_from(DTYPES),
    }
)


def inputs(seed: int, shape: tuple[int, int, int], rows: int, prefix: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    heads, groups, size = shape
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(heads * groups, rows, size, generator=draw).to(dtype)
    keys, values = torch.randn(2, heads, prefix + rows, size, generator=draw).to(dtype)
    mask = torch.rand(rows, prefix + rows, generator=draw) > 0.5
    mask[:, :prefix] = True
    return query, keys, values, mask


@pytest.fixture(params=["reference", "cpp"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpp" and "cpp" not in ops.backends()["strict_attention"].available:
        pytest.skip("the C++ extension is not built")
    monkeypatch.setitem(os.environ, ops.VARIABLE, request.param)
    return request.param


@pytest.mark.parametrize("name", ["reference", "cpp"])
@settings(deadline=None, max_examples=150)
@given(case=attentions)
def test_a_row_is_what_it_would_be_alone(name: str, case: dict) -> None:
    if name not in ops.backends()["strict_attention"].available:
        pytest.skip("the C++ extension is not built")
    run = reference.strict_attention if name == "reference" else ops.strict_attention
    query, keys, values, mask = inputs(**case)
    out = run(query, keys, values, mask, 0.3)
    for row in range(query.shape[1]):
        seen = mask[row]
        alone = run(query[:, row : row + 1], keys[:, seen], values[:, seen], None, 0.3)
        assert torch.equal(out[:, row : row + 1], alone)


@settings(deadline=None, max_examples=200)
@given(case=attentions)
def test_it_is_attention(case: dict) -> None:
    query, keys, values, mask = inputs(**case)
    heads = keys.shape[0]
    scores = torch.einsum("hgnd,hld->hgnl", query.double().view(heads, -1, *query.shape[1:]), keys.double()) * 0.3
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    expected = torch.einsum("hgnl,hld->hgnd", weights, values.double()).reshape(query.shape)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[query.dtype]
    for found in (
        ops.strict_attention(query, keys, values, mask, 0.3),
        reference.strict_attention(query, keys, values, mask, 0.3),
    ):
        assert found.dtype is query.dtype
        assert float((found.double() - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def test_what_a_row_does_not_see_cannot_reach_it(backend: str) -> None:
    query, keys, values, mask = inputs(1, (2, 2, 64), 3, 70, torch.float32)
    clean = ops.strict_attention(query, keys, values, mask, 0.1)
    hidden = ~mask.any(0)
    hidden[71] = True
    mask[:, 71] = False
    clean = ops.strict_attention(query, keys, values, mask, 0.1)
    keys[:, hidden], values[:, hidden] = float("nan"), float("inf")
    assert torch.equal(ops.strict_attention(query, keys, values, mask, 0.1), clean)


def test_a_row_that_sees_nothing_gives_zero(backend: str) -> None:
    query, keys, values, mask = inputs(1, (1, 2, 8), 2, 0, torch.float32)
    mask[:] = False
    assert not ops.strict_attention(query, keys, values, mask, 0.1).any()


def test_strided_inputs(backend: str) -> None:
    query, keys, values, mask = inputs(4, (3, 1, 20), 5, 9, torch.bfloat16)
    slab = torch.full((3, 40, 20), float("nan"), dtype=torch.bfloat16)
    slab[:, :14] = keys
    turned = values.transpose(1, 2).contiguous().transpose(1, 2)
    found = ops.strict_attention(query.transpose(0, 1).contiguous().transpose(0, 1), slab[:, :14], turned, mask, 0.2)
    assert torch.equal(found, ops.strict_attention(query, keys, values, mask, 0.2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, m: (q, k, v[:, 1:], m), "query"),
        (lambda q, k, v, m: (q, k.double(), v, m), "query"),
        (lambda q, k, v, m: (q, k, v, m.float()), "mask: bool"),
        (lambda q, k, v, m: (q, k, v, m[:, 1:]), "mask: bool"),
    ],
)
def test_wrong_inputs(change, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.strict_attention(*change(*inputs(0, (1, 1, 4), 2, 3, torch.float32)), 1.0)


# ---------------------------------------------------------------------------------------------------- the engine


# Whole vectors: a row's end would else be computed by other instructions in one forward than in another.
ROUND = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2}


@cache
def bfloat16(seed: int = 0) -> PreTrainedModel:
    return tiny("qwen3", seed=seed, **ROUND).to(torch.bfloat16)


def strict_target() -> HuggingFaceTarget:
    try:
        return HuggingFaceTarget(bfloat16(), strict=True)
    except UnsupportedModelError as error:
        pytest.skip(str(error))


@torch.inference_mode()
def verified(target: HuggingFaceTarget, prompt: list[int], tree: TokenTree) -> Tensor:
    target.reset()
    target.prefill(prompt)
    target.reserve(len(prompt), tree.size)
    return target.verify(tree)[0]


@torch.inference_mode()
def plain_logits(target: HuggingFaceTarget, prompt: list[int], path: list[int]) -> Tensor:
    """Logits behind the last token of `path`, decoded a token at a time."""
    target.reset()
    target.prefill(prompt)
    for token in path:
        tree = TokenTree.root(token)
        logits, _ = target.verify(tree)
        target.commit(tree, [0])
    return logits[0]


@pytest.mark.parametrize("seed", range(3))
def test_each_node_has_the_bits_of_plain_decoding(seed: int) -> None:
    target, prompt = strict_target(), [5, 9, 2, 31, 7, 12]
    tree = random_tree(seed, 40, 64, root=3)  # more than one forward holds
    logits = verified(target, prompt, tree)
    for node in range(0, tree.size, 3):
        assert torch.equal(logits[node], plain_logits(target, prompt, [3, *tree.path_tokens(node)]))


def test_the_control_without_it_has_other_bits() -> None:
    strict_target()  # where that cannot be had, there is nothing to compare
    target, prompt = HuggingFaceTarget(bfloat16()), [5, 9, 2, 31, 7, 12] * 20
    tree = random_tree(0, 24, 64, root=3)
    logits = verified(target, prompt, tree)
    same = [torch.equal(logits[n], plain_logits(target, prompt, [3, *tree.path_tokens(n)])) for n in range(24)]
    assert not all(same)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_answers_equal_plain_decoding_under_every_policy(name: str) -> None:
    target = strict_target()
    plain = Engine(target, None, None)
    draft = SmallModel(bfloat16(seed=1), target.vocab_size)
    engine = Engine(target, draft, policy_for(name))
    options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 10}
    assert engine.generate([1, 2, 3, 4], **options).token_ids == plain.generate([1, 2, 3, 4], **options).token_ids


def test_a_model_that_cannot_keep_it_is_refused() -> None:
    target = HuggingFaceTarget(bfloat16())
    target.lm._dense_mask = True
    with pytest.raises(UnsupportedModelError, match="strict: this model's attention runs with a dense mask"):
        strict_rows(target.lm)


@pytest.mark.model
def test_the_default_model() -> None:
    try:
        engine = Engine.from_pretrained(dtype="bfloat16", strict=True, policy="talon/cpu")
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    plain = Engine(engine.target, None, None, engine.tokenizer)
    prompt = "Name three rivers in France."
    assert engine.generate(prompt, max_new_tokens=16).token_ids == plain.generate(prompt, max_new_tokens=16).token_ids
