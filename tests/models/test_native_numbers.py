"""The native forward's logits against each family's own, in float32, bfloat16, and from packed GGUF blocks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from specengine.checkpoints import embedded
from specengine.checkpoints.pretrained import open_native
from specengine.models.extension import WITH_PAIRS, kinds_of
from specengine.models.native import NativeLM, from_model
from specengine.ops.tree import TokenTree
from tests.models.native_engines import INSTRUCTION_SETS, forced, native_lm, needs_extension
from tests.models.native_variants import (
    PROMPT,
    VARIANTS,
    half_of,
    model_of,
    native_logits,
    own_logits,
    tree_of,
    write_gguf,
)
from tests.toy import VOCABULARY, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
# those that run float32
WITH_VECTORS = [name for name in INSTRUCTION_SETS if name not in WITH_PAIRS]
PACKED = [kind for kind in kinds_of("bfloat16") if kind.startswith("q")] if INSTRUCTION_SETS else []
TREE = tree_of(VOCABULARY)


@cache
def exact(variant: str) -> Tensor:
    """Return what the model's own modules compute, token by token where they have another way for several at once.

    That other way of the gated delta rule is further from float64 than both.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            modeling_qwen3_5,
            "torch_chunk_gated_delta_rule",
            modeling_qwen3_5.torch_recurrent_gated_delta_rule,
        )
        return own_logits(model_of(variant), PROMPT, TREE)


@pytest.mark.sliced(11)
@pytest.mark.parametrize("instructions", WITH_VECTORS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_are_those_of_the_models_own_modules(
    variant: str, instructions: str
) -> None:
    ours = native_logits(native_lm(model_of(variant), instructions), PROMPT, TREE)
    assert (ours - exact(variant)).abs().max() <= 2e-6 * len(PROMPT) * exact(variant).abs().max()


@pytest.mark.parametrize("instructions", WITH_VECTORS)
def test_logits_far_above_the_soft_cap_are_those_of_tanh(instructions: str) -> None:
    """At 6 to 10 times the cap tanh is up to 1.2e-5 below 1, which float32 tells apart."""
    plain = native_logits(
        native_lm(tiny("gemma4_text", final_logit_softcapping=None), instructions), PROMPT, TREE
    )
    cap = float(plain.abs().max()) / 10
    capped = native_logits(
        native_lm(tiny("gemma4_text", final_logit_softcapping=cap), instructions), PROMPT, TREE
    )
    far = (plain.abs() > 6 * cap) & (plain.abs() < 9 * cap)
    assert far.sum() > 20
    wanted = torch.tanh(plain.double() / cap) * cap
    assert ((capped - wanted).abs() <= 2e-7 * cap).all()


def errors(logits: Tensor, variant: str) -> Tensor:
    """Return the errors of all logits, as shares of their spread."""
    return ((logits - exact(variant)).abs() / exact(variant).std()).flatten()


SEVERAL = [name for name in VARIANTS if "groups" not in name or name[-1] in "37"]


@cache
def errors_of_transformers() -> Tensor:
    return torch.cat(
        [errors(own_logits(half_of(variant), PROMPT, TREE), variant) for variant in SEVERAL]
    )


def not_worse(ours: Tensor, theirs: Tensor) -> bool:
    mean, highest = float(ours.mean()), float(ours.quantile(0.99))
    return mean <= float(theirs.mean()) and highest <= float(theirs.quantile(0.99))


@pytest.mark.slow
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_bfloat16_is_no_further_from_float32_than_transformers_is(instructions: str) -> None:
    found = [
        errors(native_logits(native_lm(half_of(variant), instructions), PROMPT, TREE), variant)
        for variant in SEVERAL
    ]
    assert not_worse(torch.cat(found), errors_of_transformers())


@pytest.mark.slow
def test_the_control_another_model_is_further_away() -> None:
    other = errors(native_logits(native_lm(half_of("llama yarn")), PROMPT, TREE), "llama linear")
    assert not not_worse(other / 5, errors_of_transformers())


# ---------------------------------------------------------------------------------------------------- GGUF


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def packed(path: Path, instructions: str) -> NativeLM:
    with forced(instructions):
        return NativeLM(open_native(str(path)).source, numerics="bfloat16")


@pytest.mark.sliced(4)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_blocks_give_the_bits_of_the_converted_model(
    kind: str, architecture: str, folder: Path
) -> None:
    path = write_gguf(
        folder / f"{architecture}-{kind}.gguf", architecture, kind, tied=architecture == "qwen3"
    )
    converted = open_native(str(path)).source.model()
    assert converted.dtype is torch.bfloat16
    tree = tree_of(converted.config.vocab_size)
    for instructions in INSTRUCTION_SETS if architecture == "llama" else INSTRUCTION_SETS[:1]:
        lm = packed(path, instructions)
        ours = native_logits(lm, PROMPT, tree)
        assert (lm.stored, lm.instruction_set) == (kind, instructions)
        assert ours.isfinite().all()
        assert torch.equal(ours, native_logits(native_lm(converted, instructions), PROMPT, tree))
        tokens = torch.arange(0, 260, 7)
        assert torch.equal(lm.embed(tokens), converted.get_input_embeddings()(tokens).float())


def test_a_file_in_float32_is_the_converted_models_numbers(folder: Path) -> None:
    path = write_gguf(folder / "float32.gguf", "llama", "q4_1")
    source = open_native(str(path), dtype=torch.float32).source
    lm, model = NativeLM(source), source.model()
    assert (lm.stored, model.dtype) == ("f32", torch.float32)
    tree = tree_of(model.config.vocab_size)
    ours, theirs = native_logits(lm, PROMPT, tree), own_logits(model, PROMPT, tree)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    converted = open_native(str(path)).source.model()
    for name, weight in model.named_parameters():
        other = converted.get_parameter(name)
        assert torch.equal(
            weight if weight.ndim > 1 else weight.bfloat16(),
            other.to(weight if weight.ndim > 1 else other),
        )


# ---------------------------------------------------------------------------------------------------- default model

TEXT = (
    "A river is a natural stream of fresh water that flows on land or inside caves towards another body of water at a "
    "lower elevation, such as an ocean, a lake, or another river."
)


ROWS = 24  # of the text's end that are compared


@torch.inference_mode()
def last_rows(model: PreTrainedModel, text: list[int]) -> Tensor:
    return model(torch.tensor([text]), logits_to_keep=ROWS).logits[0].float()


def native_last_rows(lm: NativeLM, text: list[int]) -> Tensor:
    chain = TokenTree.root(text[-ROWS], ROWS)
    for parent, token in enumerate(text[-ROWS + 1 :]):
        chain.add(torch.tensor([parent]), torch.tensor([token]), torch.tensor([0.0]))
    return native_logits(lm, text[:-ROWS], chain)


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_by_both_forwards(default_model_path: Path) -> None:
    text = AutoTokenizer.from_pretrained(default_model_path)(TEXT)["input_ids"]
    reference = AutoModelForCausalLM.from_pretrained(default_model_path, dtype=torch.float32)
    wanted = last_rows(reference, text)
    ours = native_last_rows(from_model(reference), text)
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    del reference
    half = AutoModelForCausalLM.from_pretrained(default_model_path, dtype=torch.bfloat16)
    theirs, ours = (
        (last_rows(half, text) - wanted).abs(),
        (native_last_rows(from_model(half), text) - wanted).abs(),
    )
    assert ours.mean() <= theirs.mean()
    assert np.quantile(ours, 0.99) <= np.quantile(theirs, 0.99)


@pytest.mark.model
def test_the_default_models_file_gives_the_bits_of_its_conversion(default_model_path: Path) -> None:
    prompt = AutoTokenizer.from_pretrained(default_model_path)(TEXT)["input_ids"]
    file, tree = (
        NativeLM(open_native(str(embedded.gguf())).source, numerics="bfloat16"),
        tree_of(40_000),
    )
    assert set(file.stored.split(", ")) <= set(PACKED)
    ours = native_logits(file, prompt, tree)
    folder = NativeLM(open_native(str(default_model_path)).source)
    assert (file.dtype, folder.dtype, folder.stored) == (torch.bfloat16, torch.bfloat16, "bf16")
    assert torch.equal(ours, native_logits(folder, prompt, tree))
