"""Every entry of transformers' mappings of causal LMs, and of those that read pictures too, as a tiny random model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

NAMES = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
VOCABULARY, WINDOW, MOST = 97, 16, 9_000_000
# Sizes by the field's name, for all that have such a field.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "n_inner": 48,
    "emb_dim": 32,
    "dim_model": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "dff": 48,
    "d_inner": 48,
    "dim_ff": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 1,
    "num_decoder_layers": 2,
    "num_encoder_layers": 1,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "dim_head": 8,
    "d_kv": 8,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_window": WINDOW,
    "attention_window_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "attention_chunk_size": WINDOW,
    "keep_window_size": WINDOW,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk_blocks": 2,
    "index_block_size": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "rel_extent": 32,
    "adapter_rank": 8,
    "shared_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
}

# Of encoders of pictures and sound.
ENCODERS: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "image_size": 28,
    "out_hidden_size": 32,
    "text_hidden_size": 32,
    "encoder_hidden_size": 32,
    "vision_hidden_size": 32,
    "projection_dim": 32,
    "projection_hidden_dim": 48,
    "projection_intermediate_size": 48,
    "projector_hidden_size": 48,
    "num_position_embeddings": 16,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def fields_of(kind: type[PretrainedConfig]) -> set[str]:
    """Return the names that a class of configs takes."""
    names: set[str] = set()
    for cls in kind.__mro__:
        names |= set(vars(cls).get("__annotations__", {}))
        names |= set(vars(cls).get("attribute_map", {}))
    return names


def sizes_for(
    kind: type[PretrainedConfig], own: dict[str, Any], sizes_by_name: dict[str, Any] = SIZES
) -> dict[str, Any]:
    """Return small sizes for a class of configs and for those in it."""
    known = fields_of(kind)
    sizes_of_kind = {name: value for name, value in sizes_by_name.items() if name in known}
    if parts := getattr(kind, "sub_configs", None):
        default = kind()
        for name in parts:
            if isinstance(part := getattr(default, name, None), PretrainedConfig):
                sizes = sizes_for(type(part), OWN.get(part.model_type, {}), sizes_by_name)
                sizes_of_kind[name] = {"model_type": part.model_type, **sizes}
    return sizes_of_kind | copy.deepcopy(own)  # transformers adds to rope_parameters


# Set these as well, by model type.
_LATENT = {"num_key_value_heads": 4}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_MIXED = {"num_hidden_layers": 4, "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL]}
_GEMMA3N = {"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2}
_GEMMA3N |= {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 8,
}
_GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": [_SLIDING, _SLIDING, _FULL],
    "global_head_dim": 16,
}
_GEMMA4 |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY}
OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": {"num_hidden_layers": 8, **_LATENT},
    "bamba": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
    },
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": [_SLIDING, _FULL],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (_SLIDING, _FULL)
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dots3_note": _LATENT,
    "dots3_note_text": _LATENT,
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _MIXED | _LATENT,
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", _FULL]},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "conv", _FULL],
        "num_dense_layers": 1,
    },
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", _FULL]},
    "longcat_flash": _LATENT,
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "minicpm3": _LATENT,
    "qwen3_5_moe_text": _MIXED,
    "qwen3_5_text": _MIXED,
    "qwen3_next": _MIXED,
    "qwen4_exp_text": {
        "num_hidden_layers": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "roformer": {"is_decoder": True},
    "moshi": {"sliding_window": 256},
    "nemotron_h": {"n_groups": 1},
    "prophetnet": {"num_encoder_layers": 2},
    "xlm": {"causal": True},
    "reformer": {
        "is_decoder": True,
        "num_buckets": 4,
        "hash_seed": 0,
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (16, 16),
    },
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9, "is_decoder": True},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "youtu": _LATENT,
    "zamba": {"num_hidden_layers": 4, "layer_types": [_LINEAR, "hybrid"] * 2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": [_LINEAR, "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}
_PARTS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
_MUSE = {"layer_types": [_SLIDING, _FULL], "layer_rope_theta": [1e4, 0]}
OWN |= {
    "cosmos3_edge_text": _PARTS,
    "ernie4_5_vl_moe_text": _PARTS | {"moe_intermediate_size": [24, 24]},
    "glm46v_text": _PARTS,
    "glm4v_text": _PARTS,
    "glm4v_moe_text": _PARTS | {"head_dim": 16},
    "glm_ocr_text": _PARTS,
    "glmga_text": _PARTS | {"head_dim": 16},
    "glm5_next_text": _MIXED
    | _LATENT
    | {"qk_rope_head_dim": 0, "qk_head_dim": 8, "index_kpool": 2, "index_topk": 8},
    "hunyuan_vl_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "xdrope_section": [1, 1, 1, 1],
        }
    },
    "mistral4": _LATENT | {"head_dim": 16, "qk_head_dim": 16},
    "mistral_large4_text": _LATENT | {"qk_head_dim": 16},
    "molmo2_vision": {"image_size": [28, 28], "num_hidden_layers": 3},
    "molmo2_adapter": {"vision_feature_layer": [0, 1], "text_hidden_size": 32},
    "muse_glimmer_text": _MUSE,
    "muse_spark_text": _MUSE | {"mlp_layer_types": ["dense", "sparse"], "moe_hidden_size": 16},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 16, 16]},
    "nemotron_h_omni": {"video_temporal_patch_size": 2},
    "radio": {"video_temporal_patch_size": 2},
    "paddleocr_vl_text": _PARTS,
    "qwen2_5_omni_text": _PARTS,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 4},
    # with a window, transformers' masks show all and its cache drops what is beyond; published ones have none
    "qwen3_omni_moe_text": {"sliding_window": None},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 4},
    "qwen2_5_vl_text": _PARTS,
    "qwen2_vl_text": _PARTS,
    "qwen2_vl_vision": {"hidden_size": 32},
}
DECODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
)
DECODERS += (
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
OWN |= {kind: OWN.get(kind, {}) | {"is_decoder": True} for kind in DECODERS}


def config_of(kind: str, **changes: Any) -> PretrainedConfig:
    """Return the tiny config of an entry of the mapping."""
    sizes = SIZES if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else SIZES | ENCODERS
    return CONFIG_MAPPING[kind](
        **sizes_for(CONFIG_MAPPING[kind], OWN.get(kind, {}) | changes, sizes)
    )


class NotMadeError(Exception):
    """Of this entry there is no tiny model: its config cannot be small, or needs a package that is not here."""


NOT_MADE = ("blt", "dots3_note", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant")
NOT_MADE += (
    "chameleon",
    "deepseek_ocr2",
    "evolla",
    "fast_vlm",
    "florence2",
    "granite4_vision",
    "janus",
    "perception_lm",
    "pi0",
)


def model_of(kind: str, **changes: Any) -> PreTrainedModel:
    """Return the tiny random float32 model of an entry of the mapping; NotMadeError."""
    if kind in NOT_MADE:
        raise NotMadeError(kind)
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config = config_of(kind, **changes)
    make = (AutoModelForCausalLM if causal else AutoModelForImageTextToText).from_config
    if kind in ("musicgen", "musicgen_melody"):
        config, make = config.decoder, getattr(transformers, NAMES[kind])._from_config
    with torch.device("meta"):
        size = sum(weight.numel() for weight in make(copy.deepcopy(config)).parameters())
    if size > MOST:
        raise ValueError(f"{kind} has {size} weights, {MOST} at most are tiny")
    torch.manual_seed(0)
    model = make(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and weight.std() < 0.1:
                weight.normal_(0, 0.3)
            elif weight.ndim == 1 and name.endswith("bias"):
                weight.normal_(std=0.1)
    model.generation_config.encoder_no_repeat_ngram_size = None
    return model.float()
