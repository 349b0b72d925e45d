"""GGUF files of architectures without a family: transformers' own reader loads them, or the refusal says which are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as written
import pytest
import torch
from transformers import NemotronConfig, NemotronForCausalLM, PreTrainedModel

from specengine import Engine
from specengine.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints.gguf_files import byte_level_vocabulary, finish
from tests.models.native_engines import plainly

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = byte_level_vocabulary()
COMMON = {
    "vocab_size": len(VOCABULARY["tokenizer.ggml.tokens"]),
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT = [*range(20, 40), *range(20, 30)]


def nemotron() -> tuple[PreTrainedModel, dict[str, Any]]:
    config = NemotronConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **COMMON,
    )
    keys = {
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    return NemotronForCausalLM(config), keys


def write(
    folder: Path, *, without: str = "", architecture: str = "nemotron"
) -> tuple[PreTrainedModel, Path]:
    torch.manual_seed(0)
    model, keys = nemotron()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    names = written.get_tensor_name_map(written.MODEL_ARCH.NEMOTRON, 2)
    path = folder / "model.gguf"
    writer = written.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    for key, value in VOCABULARY.items():
        add_value(writer, key, value)
    for name, tensor in model.named_parameters():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored and stored != without:
            # files have 1 + w
            writer.add_tensor(stored, (tensor + name.endswith("norm.weight")).detach().numpy())
    return model.eval(), finish(writer, path)


def add_value(writer: written.GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def test_answers_are_those_of_the_model(tmp_path: Path) -> None:
    model, path = write(tmp_path)
    engine = Engine.from_pretrained(
        str(path), "recycling", "fixed", dtype=torch.float32, offline=True
    )
    answer = engine.generate(PROMPT, max_new_tokens=20, eos_token_id=[])
    assert answer.token_ids == plainly(model, PROMPT, 20)
    assert answer.stats.num_draft_tokens
    assert "architecture 'nemotron'" in engine.target.backend
    assert engine.target.generation_config.eos_token_id == 0
    assert engine.tokenizer.decode(engine.tokenizer.encode("hello")) == "hello"
    assert engine.target.lm.model.dtype is torch.float32


def test_a_file_without_a_tensor_is_refused_and_never_answers_by_random_weights(
    tmp_path: Path,
) -> None:
    _, path = write(tmp_path, without="blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        Engine.from_pretrained(str(path), offline=True)


def test_architectures_that_nobody_reads_are_refused_by_name(tmp_path: Path) -> None:
    _, path = write(tmp_path, architecture="plm")
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'plm'; accepted in GGUF files: .*llama"
    ):
        Engine.from_pretrained(str(path), offline=True)
