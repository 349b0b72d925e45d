"""Models and vocabularies that do not fit: refused by what they lack, before they are used."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine
from specengine.drafters.ngram import NGram
from specengine.errors import (
    CheckpointError,
    InputError,
    UnsupportedModelError,
)
from specengine.models.attention import ATTENTION
from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.models.own_cache import OwnCacheTarget
from tests.hostile.engines import PROMPT, check_usable, engine_of, model
from tests.toy import VOCABULARY, byte_tokenizer, policy_for, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_another_tokenizer_is_translated(tmp_path: Path) -> None:
    tiny("llama", vocab_size=VOCABULARY + 1).save_pretrained(tmp_path)
    byte_tokenizer(extra=("<|tool|>",)).save_pretrained(tmp_path)
    engine = Engine.from_pretrained(
        model(), str(tmp_path), tokenizer=byte_tokenizer(), offline=True
    )
    check_usable(engine)


def test_padded_vocabularies_are_accepted(tmp_path: Path) -> None:
    tiny("llama", seed=1, vocab_size=VOCABULARY + 60).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = Engine.from_pretrained(
        model(), str(tmp_path), tokenizer=byte_tokenizer(), offline=True
    )
    check_usable(engine)


def test_two_vocabularies_without_tokenizers_to_compare() -> None:
    with pytest.raises(InputError, match="draft: the vocabulary has 300 entries, the target's 260"):
        Engine.from_pretrained(model(), tiny("llama", vocab_size=300))


def refused(config: Any, make: Callable[[Any], PreTrainedModel], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        CausalLM(make(config))


def test_models_that_cannot_roll_back() -> None:
    common = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}
    message = "cannot roll back rejected draft tokens"
    mamba = transformers.MambaConfig(**common, state_size=4, expand=1, time_step_rank=4)
    refused(mamba, transformers.MambaForCausalLM, message)
    gemma = transformers.RecurrentGemmaConfig(
        **common, lru_width=32, num_attention_heads=4, intermediate_size=32
    )
    refused(gemma, transformers.RecurrentGemmaForCausalLM, message)
    hybrid = transformers.OlmoHybridConfig(
        **common,
        pad_token_id=0,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
    )
    refused(
        hybrid,
        transformers.OlmoHybridForCausalLM,
        f"{message} .recurrent state.; only a key-value cache",
    )
    lfm = transformers.Lfm2Config(
        **common, num_attention_heads=4, layer_types=["conv", "full_attention"]
    )

    def changed(config: Any) -> PreTrainedModel:
        model = transformers.Lfm2ForCausalLM(config)
        convolution: Any = model.model.layers[0].conv
        convolution.forward = convolution.forward
        return model

    refused(lfm, changed, f"{message} .convolution state.")


def test_models_of_other_kinds() -> None:
    t5 = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
    )
    refused(
        t5,
        transformers.T5ForConditionalGeneration,
        "encoder-decoder models are not supported, only causal LMs",
    )
    refused(
        None,
        lambda _: model().base_model,
        "has no language-model head, pass a ...ForCausalLM model",
    )
    bloom = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4)
    refused(bloom, transformers.BloomForCausalLM, "nodes of a tree cannot be placed by depth")
    mpt = transformers.MptConfig(vocab_size=99, d_model=32, n_layers=1, n_heads=4)
    refused(mpt, transformers.MptForCausalLM, "its forward reads no position_ids")
    falcon = transformers.FalconConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True
    )
    refused(
        falcon, transformers.FalconForCausalLM, "its positions follow from the order of the cache"
    )
    neo = transformers.GPTNeoConfig(
        vocab_size=99,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
    )
    refused(neo, transformers.GPTNeoForCausalLM, "its attention masks by cache slot")
    bert = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
    )
    refused(bert, transformers.BertForMaskedLM, "has no language-model head")


def test_keys_and_values_of_any_shape_fit_one_slab() -> None:
    mixed = tiny("llama", num_key_value_heads=4)
    attention = mixed.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = (
        torch.nn.Linear(32, 16, bias=False),
        torch.nn.Linear(32, 16, bias=False),
    )
    attention.num_key_value_groups = 2
    lm = CausalLM(mixed)
    assert lm.new_cache(1).layout.shapes == (((4, 8), (4, 8)), ((2, 8), (2, 8)))
    assert lm.new_cache(1).slab.shape == (2, 2, 1, 256, 32)
    ids = torch.tensor([PROMPT])
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    expected = mixed.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, len(PROMPT) :
    ].tolist()
    engine = Engine.from_pretrained(mixed, "ngram", policy_for("eagle"), backend="huggingface")
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == expected


def test_a_refused_draft_is_named_as_the_draft() -> None:
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1}
    config = transformers.MambaConfig(**common, state_size=4, expand=1, time_step_rank=4)
    with pytest.raises(UnsupportedModelError, match=r"^draft: MambaForCausalLM: cannot roll back"):
        Engine.from_pretrained(model(), transformers.MambaForCausalLM(config).eval())


WHOLE = "accepted a whole number, 1 to"
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "x"}, "'hidden_size' expected int, got str"),
    ({"hidden_size": 10**12}, f"config.json: hidden_size: got 1000000000000, {WHOLE} 1048576"),
    (
        {"num_attention_heads": 7},
        r"hidden size \(32\) is not a multiple of the number of attention heads",
    ),
    ({"num_attention_heads": 0}, "its config.json cannot be read .*modulo by zero"),
    ({"num_key_value_heads": 0}, f"num_key_value_heads: got 0, {WHOLE} 16384"),
    ({"num_hidden_layers": 10**9}, f"num_hidden_layers: got 1000000000, {WHOLE} 1024"),
    ({"num_hidden_layers": 1}, r"(unexpected|not used): .*model\.layers\.1\."),
    ({"num_hidden_layers": 3}, r"missing: .*model\.layers\.2\."),
    ({"vocab_size": 10}, r"of another shape: lm_head.weight \[260, 32\], not \[10, 32\]"),
    ({"vocab_size": 1 << 24}, "of another shape: lm_head.weight"),
    ({"intermediate_size": 1 << 24}, "of another shape: model.layers.0.mlp.down_proj.weight"),
    ({"head_dim": 0}, "head_dim: got 0"),
    ({"max_position_embeddings": -1}, "max_position_embeddings: got -1"),
    ({"max_position_embeddings": 1}, "the context in its config is 1, 2 or more"),
    ({"sliding_window": [1]}, r"sliding_window: got \[1\], accepted a whole number"),
    (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10,
                "original_max_position_embeddings": "x",
            }
        },
        "original_max_position_embeddings: got 'x', accepted a whole number",
    ),
    ({"sliding_window": -1}, "the sliding window in its config is -1, 1 or more"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan, accepted a number above 0"),
    (
        {"rope_parameters": {"rope_type": "zzz"}},
        "no model can be built from its config.json .KeyError: 'zzz'",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        "rope_theta: got 0, accepted a number, 1 to 1e",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
        "rope_theta: got 'x', accepted a number",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        "rope_theta: got None, accepted a number",
    ),
    ({"hidden_act": "zzz"}, "no model can be built from its config.json .KeyError: 'zzz'"),
    ({"layer_types": 5}, "its config.json cannot be read"),
    ({"dtype": "zzz"}, "its config.json cannot be read .*no attribute 'zzz'"),
    ({"dtype": {"x": 1}}, "dtype: got {'x': 1}, accepted the name of a torch.dtype"),
    (
        {"pad_token_id": 10**6},
        "no model can be built from its config.json .AssertionError: Padding_idx",
    ),
    ({"model_type": "zzz"}, "model type `zzz`"),
    ({"quantization_config": 5}, "its config.json cannot be read"),
    ({"text_config": True}, "text_config: got True, accepted an object"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, whose config.json tests overwrite."""
    folder = tmp_path_factory.mktemp("damaged")
    tiny("llama").save_pretrained(folder)
    (folder / "config.json").rename(folder / "whole.json")
    return folder


@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize(
    ("changes", "message"),
    DAMAGED,
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_a_damaged_config_is_refused_by_what_is_wrong(
    changes: dict[str, Any], message: str, backend: str | None, saved: Path
) -> None:
    raw = json.loads((saved / "whole.json").read_text()) | changes
    (saved / "config.json").write_text(json.dumps(raw))
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message):
        Engine.from_pretrained(str(saved), "none", offline=True, backend=backend)


def with_tensors(folder: Path, model: PreTrainedModel, shapes: dict[str, list[int]]) -> str:
    """A folder of this model, its file with more tensors."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(shape) for name, shape in shapes.items()}, file)
    return str(folder)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_parts_that_the_config_leaves_out_are_refused(prefix: str, tmp_path: Path) -> None:
    """Without its biases, or a layer, another model would answer; `prefix`: saved with its head, and without."""
    whole = tiny("llama", tie_word_embeddings=True)
    more = {f"{prefix}layers.1.self_attn.q_proj.bias": [32], "vision.patch.weight": [4]}
    folder = with_tensors(tmp_path, whole if prefix else whole.model, more)
    with pytest.raises(
        CheckpointError, match=r"unexpected: (model\.)?layers\.1\.self_attn\.q_proj\.bias$"
    ):
        Engine.from_pretrained(folder, "none", offline=True, backend="huggingface")


def test_what_is_no_part_of_the_answer_may_be_in_the_file(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=4)
    more = {
        "transformer.h.0.attn.bias": [1, 1, 4, 4],
        "transformer.h.0.attn.masked_bias": [1],
        "score.weight": [2, 32],
    }
    folder = with_tensors(tmp_path / "gpt2", transformers.GPT2LMHeadModel(config), more)
    assert (
        Engine.from_pretrained(folder, "none", offline=True)
        .generate([1, 2], max_new_tokens=1)
        .token_ids
    )
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": [4], "mtp.fc.weight": [32, 64]}
    folder = with_tensors(tmp_path / "llama", tiny("llama"), more)
    engine = Engine.from_pretrained(folder, "none", offline=True, backend="huggingface")
    assert engine.generate([1, 2], max_new_tokens=1).token_ids


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, "[]", "{", "\ud800".encode("utf-8", "surrogatepass")]
)
def test_a_config_that_is_no_object_is_refused(text: str | bytes, saved: Path) -> None:
    (saved / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=f"{saved}/config.json: "):
        Engine.from_pretrained(str(saved), "none", offline=True)


class IgnoresTheMask(transformers.LlamaForCausalLM):
    """Sees every token before a node, whatever mask it is given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **rest: Any) -> Any:  # type: ignore[override]
        for name in ("tree", "attention_mask"):
            rest.pop(name, None)
        return super().forward(input_ids, position_ids=position_ids, **rest)


class IgnoresPositions(transformers.LlamaForCausalLM):
    """Places every token by its slot, whatever position it is given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **rest: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, **rest)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (IgnoresTheMask, "does not honour a tree mask .a node's logits change with its sibling"),
        (
            IgnoresPositions,
            "does not honour a tree mask .a node's logits differ from those of its path alone",
        ),
    ],
)
def test_a_model_that_does_not_honour_the_tree_runs_its_paths(
    kind: type[PreTrainedModel], message: str
) -> None:
    config = model().config  # which may be made here, by numbers drawn
    torch.manual_seed(0)
    bad = kind(config).eval()
    bad.set_attn_implementation("sdpa")
    engine = Engine.from_pretrained(bad, "ngram", tokenizer=byte_tokenizer())
    assert isinstance(engine.target, OwnCacheTarget)
    assert re.search(
        f"^trees are verified path by path on its own cache: .*{message}", engine.target.notes[0]
    )
    check_usable(engine)
    assert bad.config._attn_implementation == "sdpa"  # left as it was
    with pytest.raises(UnsupportedModelError, match=f"^draft: .*{message}"):
        Engine.from_pretrained(model(), bad)


def test_a_second_engine_finds_a_model_as_the_first_one_found_it() -> None:
    assert engine_of().target.model.config._attn_implementation != ATTENTION
    check_usable(engine_of("chain"))
    check_usable(engine_of("fixed"))


def test_half_precision_runs_and_says_its_dtype() -> None:
    half = tiny("llama").to(torch.bfloat16)
    engine = Engine(HuggingFaceTarget(half), NGram(shortest=1), policy_for("eagle"))
    assert engine.target.cache.slab.dtype == torch.bfloat16
    assert len(engine.generate(PROMPT, max_new_tokens=30, temperature=0.8, seed=1).token_ids) == 30
