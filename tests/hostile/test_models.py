"""Models and vocabularies that do not fit: refused by what they lack, before they are used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine
from specengine.drafters.ngram import NGram
from specengine.errors import InputError, TokenizerMismatchError, UnsupportedModelError
from specengine.modeling.attention import ATTENTION
from specengine.modeling.causal_lm import CausalLM
from specengine.targets.huggingface import HuggingFaceTarget
from tests.hostile.engines import PROMPT, check_usable, engine_of, model
from tests.toy import VOCABULARY, byte_tokenizer, policy_for, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_mismatched_tokenizers(tmp_path: Path) -> None:
    tiny("llama", vocab_size=VOCABULARY + 1).save_pretrained(tmp_path)
    byte_tokenizer(extra=("<|tool|>",)).save_pretrained(tmp_path)
    with pytest.raises(TokenizerMismatchError, match=r"differs from the target's in 1 of 260 tokens \('<|tool|>'"):
        Engine.from_pretrained(model(), str(tmp_path), tokenizer=byte_tokenizer(), offline=True)


def test_padded_vocabularies_are_accepted(tmp_path: Path) -> None:
    tiny("llama", seed=1, vocab_size=VOCABULARY + 60).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = Engine.from_pretrained(model(), str(tmp_path), tokenizer=byte_tokenizer(), offline=True)
    check_usable(engine)


def test_two_vocabularies_without_tokenizers_to_compare() -> None:
    with pytest.raises(InputError, match="draft: its vocabulary has 300 entries, the target's 260"):
        Engine.from_pretrained(model(), tiny("llama", vocab_size=300))


def refused(config: Any, make: Callable[[Any], PreTrainedModel], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        CausalLM(make(config))


def test_models_that_cannot_roll_back() -> None:
    common = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}
    message = "cannot roll back rejected draft tokens"
    mamba = transformers.MambaConfig(**common, state_size=4, expand=1, time_step_rank=4)
    refused(mamba, transformers.MambaForCausalLM, message)
    gemma = transformers.RecurrentGemmaConfig(**common, lru_width=32, num_attention_heads=4, intermediate_size=32)
    refused(gemma, transformers.RecurrentGemmaForCausalLM, message)
    hybrid = transformers.Qwen3NextConfig(
        **common,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
        layer_types=["linear_attention", "full_attention"],
    )
    refused(hybrid, transformers.Qwen3NextForCausalLM, f"{message} .linear_attention.*only models whose whole state")


def test_models_of_other_kinds() -> None:
    t5 = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    refused(t5, transformers.T5ForConditionalGeneration, "encoder-decoder models are not supported, only causal LMs")
    refused(None, lambda _: model().base_model, "has no language-model head, pass a ...ForCausalLM model")
    bloom = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4)
    refused(bloom, transformers.BloomForCausalLM, "nodes of a tree cannot be placed by depth")
    mpt = transformers.MptConfig(vocab_size=99, d_model=32, n_layers=1, n_heads=4)
    refused(mpt, transformers.MptForCausalLM, "only models whose forward reads position_ids are supported")
    falcon = transformers.FalconConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True
    )
    refused(falcon, transformers.FalconForCausalLM, "its positions follow from the order of the cache")
    neo = transformers.GPTNeoConfig(
        vocab_size=99, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    refused(neo, transformers.GPTNeoForCausalLM, "its attention masks by cache slot")
    bert = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    refused(bert, transformers.BertForMaskedLM, "has no language-model head")


def test_models_whose_keys_and_values_do_not_fit_one_slab() -> None:
    latent = transformers.DeepseekV3Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_routed_experts=2,
    )
    refused(latent, transformers.DeepseekV3ForCausalLM, r"keys have \d+ channels and values \d+; they must agree")
    mixed = tiny("llama", num_key_value_heads=4)
    attention = mixed.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = torch.nn.Linear(32, 16, bias=False), torch.nn.Linear(32, 16, bias=False)
    attention.num_key_value_groups = 2
    refused(None, lambda _: mixed, "its layers keep keys and values of different shapes or on different devices")


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
        (IgnoresPositions, "does not honour a tree mask .a node's logits differ from those of its path alone"),
    ],
)
def test_a_model_that_does_not_honour_the_tree(kind: type[PreTrainedModel], message: str) -> None:
    torch.manual_seed(0)
    bad = kind(model().config).eval()
    bad.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModelError, match=message):
        Engine.from_pretrained(bad, "ngram")
    assert bad.config._attn_implementation == "sdpa"  # left as it was
    with pytest.raises(UnsupportedModelError, match=message):
        Engine.from_pretrained(model(), bad)


def test_a_second_engine_takes_over_a_model_as_the_first_left_it() -> None:
    assert engine_of().target.model.config._attn_implementation == ATTENTION
    check_usable(engine_of("chain"))
    check_usable(engine_of("fixed"))


def test_half_precision_runs_and_says_its_dtype() -> None:
    half = tiny("llama").to(torch.bfloat16)
    engine = Engine(HuggingFaceTarget(half), NGram(shortest=1), policy_for("eagle"))
    assert engine.target.cache.slab.dtype == torch.bfloat16
    assert len(engine.generate(PROMPT, max_new_tokens=30, temperature=0.8, seed=1).token_ids) == 30
