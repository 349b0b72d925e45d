"""Quantised models by name on a pretended device: int8 rows, and blocks of files that are not unpacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from bench import random_gguf
from specengine import Engine, ops
from specengine.errors import InputError, UnsupportedModelError
from specengine.models import fused
from specengine.models.twins import QuantizedLinear
from specengine.ops import _registry
from tests import toy
from tests.checkpoints.gguf_files import write_model
from tests.checkpoints.quantized_folders import awq, fp8, written
from tests.graphs import pretended
from tests.graphs.engines import PROMPT
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*tokenizer"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
MATRICES = 7  # of a layer
SERVED = (*fused.OPS, "cached_attention", "packed_linear")


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the meanings of a layer's ops stand for kernels, and models go to the pretended device."""
    kernels = {name: partial(ops.by_meaning, ops.OPS[name]) for name in SERVED}
    monkeypatch.setattr(
        _registry, "_loaded", lambda key: {"triton": kernels, "reference": ops.OPS}.get(key, {})
    )
    choose(monkeypatch, "triton")

    def to(model: nn.Module, place: Any) -> nn.Module:
        return nn.Module.to(model, place) if place is torch.bfloat16 else pretended.moved(model)

    monkeypatch.setattr(PreTrainedModel, "to", to)
    with pretended.cuda():
        yield


def engine(name: Path, *parts: Any, **options: Any) -> Engine:
    more = {"device": "cuda", "offline": True, "lookup": False, **options}
    return Engine.from_pretrained(str(name), *parts, **more)


def kinds(model: nn.Module) -> list[type]:
    known = (nn.Linear, QuantizedLinear)
    return [type(layer) for layer in model.modules() if type(layer) in known]


def check(name: Path, tokens: int = 12, **options: Any) -> tuple[Engine, list[int]]:
    """Return a drafting engine and its answer, which is that of plain decoding; both run as graphs."""
    plain = engine(name, None, "plain", **options).generate(PROMPT, max_new_tokens=tokens)
    drafting = engine(name, "ngram", "eagle", **options)
    result = drafting.generate(PROMPT, max_new_tokens=tokens)
    assert result.token_ids == plain.token_ids
    assert drafting.target.captured
    assert not result.stats.notes
    return drafting, result.token_ids


def test_int8_of_a_folder(tmp_path: Path) -> None:
    model = toy.tiny("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    whole = sum(weight.nbytes for weight in model.parameters())
    drafting, _ = check(tmp_path, quantize="int8")
    lm = drafting.target.lm  # type: ignore[union-attr]
    assert kinds(lm.model) == [QuantizedLinear] * (2 * MATRICES + 1)
    embeddings = model.get_input_embeddings().weight.nbytes
    assert lm.weight_bytes < embeddings + 0.6 * (whole - embeddings)
    assert model.dtype is lm.dtype


def test_int8_answers_as_plain_decoding(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", kind="f16")
    drafting, _ = check(path, quantize="int8")
    lm = drafting.target.lm  # type: ignore[union-attr]
    assert kinds(lm.model) == [QuantizedLinear] * (2 * MATRICES + 1)
    assert lm.modules == "fused, merged products"


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", pytest.param("q5_0", marks=pytest.mark.slow)])
def test_blocks_of_a_file(kind: str, tmp_path: Path) -> None:
    """They give what the file's numbers give, unpacked."""
    path = write_model(tmp_path / "model.gguf", "qwen2", kind=kind)
    drafting, tokens = check(path)
    lm = drafting.target.lm  # type: ignore[union-attr]
    assert kinds(lm.model) == [QuantizedLinear] * (2 * MATRICES + 1)
    assert lm.modules == "fused, merged products"
    unpacked = engine(path, None, "plain", dtype="float32")
    assert set(kinds(unpacked.target.model)) == {nn.Linear}  # type: ignore[union-attr]
    assert unpacked.generate(PROMPT, max_new_tokens=4).token_ids == tokens[:4]


def test_int8_takes_what_is_not_packed(tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_up.weight": ("q4_1", (96, 64))}
    path = write_model(tmp_path / "model.gguf", kind="q4_0", tensors=tensors)
    assert kinds(engine(path, None, "plain").target.model).count(nn.Linear) == 1  # type: ignore[union-attr]
    drafting, _ = check(path, quantize="int8")
    assert set(kinds(drafting.target.model)) == {QuantizedLinear}  # type: ignore[union-attr]


@pytest.mark.parametrize("form", [awq, fp8])
def test_codes_of_a_quantised_folder(form: Callable[[], Any], tmp_path: Path) -> None:
    written(tmp_path, *form(), head_dim=16)  # groups of 64 inputs are whole
    drafting, _ = check(tmp_path)
    assert kinds(drafting.target.model).count(QuantizedLinear) == 2 * MATRICES  # type: ignore[union-attr]


def test_what_cannot_be_quantised_says_so(tmp_path: Path) -> None:
    model = toy.tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"quantize: .*experts.* of more dimensions"):
        engine(tmp_path, None, "plain", quantize="int8")
    with pytest.raises(InputError, match="quantize: the native forward was asked for"):
        Engine.from_pretrained(pretended.moved(toy.tiny("llama")), quantize="int8")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_file_of_half_a_billion_weights_is_not_unpacked(tmp_path: Path) -> None:
    """Of Qwen2.5-0.5B's widths, in two of its layers; its words are fewer."""
    shape = {"hidden": 896, "inner": 4864, "layers": 2, "heads": (14, 2), "words": 4096}
    random_gguf.write(tmp_path / "model.gguf", "Q4_0", **shape)  # type: ignore[arg-type]
    drafting, _ = check(tmp_path / "model.gguf", tokens=6)
    lm = drafting.target.lm  # type: ignore[union-attr]
    matrices = 2 * (2 * 896 * 896 + 2 * 128 * 896 + 3 * 896 * 4864) + 4096 * 896
    embeddings, norms = 4096 * 896 * 2, 5 * 896 * 2
    assert lm.weight_bytes == matrices * 18 // 32 + embeddings + norms
