"""quantize="int8": close to the model, from whatever its weights are stored as, and as exact over trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine import Engine
from specengine.checkpoints.pretrained import open_native
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.small_model import SmallModel
from specengine.errors import InputError, NumericalError, UnsupportedModelError
from specengine.models import extension
from specengine.models.eagle import head_from
from specengine.models.native import NativeHead, NativeLM, NativeTarget
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from tests.models.native_engines import INSTRUCTION_SETS, forced, native_lm, needs_extension
from tests.models.native_variants import (
    PROMPT,
    half_of,
    model_of,
    native_logits,
    own_logits,
    tree_of,
    write_gguf,
)
from tests.toy import CPU, VOCABULARY, head_config, policy_for, random_state, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
TREE = tree_of(VOCABULARY)
WAYS = [
    pytest.param(numerics, name, id=f"{numerics}-{name}")
    for numerics in ("bfloat16", "integer")
    for name in extension.instruction_sets(numerics)
]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.1}


@pytest.mark.sliced(8)
@pytest.mark.parametrize(("numerics", "instructions"), WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_int8_is_close(family: str, numerics: str, instructions: str) -> None:
    model = tiny(family, **WIDE)
    exact = own_logits(model, PROMPT, TREE)
    half = native_lm(model.to(torch.bfloat16), instructions)
    quantized = native_lm(model, instructions, quantize="int8", numerics=numerics)
    assert (quantized.numerics, quantized.instruction_set) == (numerics, instructions)
    error = (native_logits(quantized, PROMPT, TREE) - exact).abs().mean() / exact.std()
    assert 0 < error < 0.06
    assert quantized.stored == "i8"
    assert quantized.weight_bytes < 0.6 * half.weight_bytes


@pytest.mark.parametrize(("numerics", "instructions"), WAYS)
def test_a_nodes_bits_are_those_of_plain_decoding(numerics: str, instructions: str) -> None:
    target = NativeTarget(
        native_lm(half_of("qwen3"), instructions, quantize="int8", numerics=numerics)
    )
    logits = native_logits(target.lm, PROMPT, TREE)
    for node in range(0, TREE.size, 4):
        target.reset()
        target.prefill(PROMPT)
        for token in [int(TREE.tokens[0]), *TREE.path_tokens(node)]:
            alone = TokenTree.root(token)
            plain, _ = target.verify(alone)
            target.commit(alone, [0])
        assert torch.equal(logits[node], plain[0])


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_a_bfloat16_targets_head_is_kept_so(instructions: str) -> None:
    """Its logits are those of a head whose matrices are rounded to 255 values per output, not of the head itself."""
    model = tiny("llama", num_hidden_layers=6, **WIDE)
    lm = native_lm(model.to(torch.bfloat16), instructions)
    config = head_config(3, model, intermediate_size=192)
    state = {
        name: t.bfloat16() if t.is_floating_point() else t
        for name, t in random_state(config).items()
    }
    rounded = {name: by_output(t) if t.ndim == 2 else t for name, t in state.items()}
    heads = (
        NativeHead(config, state, lm),
        *(head_from(config, s, torch.float32, CPU) for s in (rounded, state)),
    )
    found = [head_logits(EagleDraft(head, lm)) for head in heads]
    scale = found[1].std()
    errors = [float((found[0] - other).abs().mean() / scale) for other in found[1:]]
    assert errors[0] < 0.03
    assert errors[0] < 0.8 * errors[1] < 0.1


def by_output(weight: Tensor) -> Tensor:
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.float() / step).round() * step


@torch.inference_mode()
def head_logits(drafter: EagleDraft) -> Tensor:
    """Return the logits of a root and of two levels below it."""
    target = NativeTarget(drafter.target)
    target.want(drafter.traits.features)
    target.reserve(64, 16)
    drafter.begin(list(PROMPT), target.prefill(list(PROMPT)))
    tree = TokenTree.root(7, 16)
    rows = [drafter.root(tree).logits]
    tree.graft([0, 0, 1], [9, 11, 30], [-1.0, -1.5, -2.0])
    rows += [drafter.step(tree, Nodes.of(torch.tensor(nodes))).logits for nodes in ([1, 2], [3])]
    return torch.cat(rows).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_of_a_file_are_quantized_as_the_converted_model_is(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    source = open_native(
        str(write_gguf(tmp_path / "model.gguf", "llama", "q4_1")), dtype=dtype
    ).source
    lm = NativeLM(source, quantize="int8")
    assert lm.stored == "i8"
    tree = tree_of(lm.vocab_size)
    converted = native_lm(source.model(), quantize="int8")
    assert torch.equal(native_logits(lm, PROMPT, tree), native_logits(converted, PROMPT, tree))


def test_what_is_not_a_number_stays_so() -> None:
    """As int8 it would be some number, and a token that no one may choose could be chosen."""
    with forced(None):
        plain = Engine(NativeTarget(native_lm(model_of("llama"), quantize="int8")), None, None)
    answer = plain.generate(PROMPT, max_new_tokens=12).token_ids
    for value in (float("nan"), float("inf")):
        spoiled = tiny("llama")
        spoiled.load_state_dict(model_of("llama").state_dict())
        with torch.no_grad():
            spoiled.lm_head.weight[answer[3], 5] = value
        engine = Engine(NativeTarget(native_lm(spoiled, quantize="int8")), None, None)
        found = engine.generate(PROMPT, max_new_tokens=40, temperature=2.0, seed=1).token_ids
        assert answer[3] not in found
        with torch.no_grad():
            spoiled.model.embed_tokens.weight[PROMPT[0], 2] = value
        with pytest.raises(
            NumericalError, match=f"at position {len(PROMPT)} are NaN or infinite throughout"
        ):
            engine.generate(PROMPT, max_new_tokens=4)


def test_a_quantized_engine_says_so_and_decodes_as_plainly_under_a_tree() -> None:
    model = half_of("llama")
    plain = Engine.from_pretrained(model, "none", quantize="int8")
    assert plain.target.backend.endswith("MB of weights as i8)")
    engine = Engine(plain.target, SmallModel(native_lm(model)), policy_for("eagle"))
    for options in ({}, {"temperature": 1.0, "seed": 4}):
        result = engine.generate(PROMPT, max_new_tokens=24, **options)
        assert result.token_ids == plain.generate(PROMPT, max_new_tokens=24, **options).token_ids
        assert result.stats.num_accepted_draft_tokens > 0


def test_a_draft_is_not_quantized_with_its_target() -> None:
    engine = Engine.from_pretrained(
        half_of("llama"), half_of("llama yarn"), quantize="int8", lookup=False
    )
    assert engine.target.lm.stored == "i8"
    assert engine.drafter.lm.stored == "bf16"


def test_where_it_cannot_be_had() -> None:
    model = half_of("llama")
    for value in ("int4", "int8 ", 8, True):
        with pytest.raises(InputError, match=f"quantize: got {value!r}, accepted int8 or none"):
            Engine.from_pretrained(model, "none", quantize=value)
        with pytest.raises(InputError, match=f"quantize: got {value!r}, accepted int8 or none"):
            native_lm(model, quantize=value)  # type: ignore[arg-type]
    asked = "quantize: the native forward was asked for, but "
    for options, reason in (
        ({"backend": "huggingface"}, "backend='huggingface' was asked for"),
        ({"graphs": True}, "graphs are made of the model's own modules"),
        ({"pack": True}, "pack= is an option of the Hugging Face backend"),
    ):
        with pytest.raises(InputError, match=asked + reason):
            Engine.from_pretrained(model, "none", quantize="int8", **options)
    with pytest.raises(
        UnsupportedModelError, match="native: model type gpt2, known are bamba, cohere, "
    ):
        Engine.from_pretrained(tiny("gpt2"), "none", quantize="int8")
