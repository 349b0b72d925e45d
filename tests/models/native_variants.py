"""Tiny models of every kind that the native forward knows, and what their own modules compute."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specengine.models.native import NativeLM, NativeTarget
from specengine.ops.tree import TokenTree
from tests.checkpoints import gguf_files
from tests.heads import LLAMA3, YARN
from tests.toy import MINISTRAL, random_tree, tiny

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_SCALED = {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 128,
}
GEMMA4_EXPERTS = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn scaled": ("llama", {"rope_parameters": YARN_SCALED}),
    "llama other theta and epsilon": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 0.1},
    ),
    "llama sizes that fill no block": (
        "llama",
        {"hidden_size": 44, "intermediate_size": 50, "head_dim": 6},
    ),
    "llama one layer": ("llama", {"num_hidden_layers": 1}),
    "mistral": ("mistral", {}),
    "ministral3": ("ministral3", {}),
    "ministral3 soon": (
        "ministral3",
        {
            "rope_parameters": {
                **MINISTRAL,
                "original_max_position_embeddings": 7,
                "mscale_all_dim": 0.0,
            },
            "sliding_window": 12,
        },
    ),
    "mistral yarn": ("mistral", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 llama3": ("qwen3", {"rope_parameters": LLAMA3}),
    "mistral windows": ("mistral", {"sliding_window": 8}),
    "qwen2 windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "qwen3 windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 18,
            "layer_types": ["sliding_attention"] * 2,
        },
    ),
    "gemma": ("gemma", {}),
    "gemma heads apart": ("gemma", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "gemma3_text": ("gemma3_text", {}),
    "gemma3_text windows": ("gemma3_text", {"sliding_window": 7}),
    "gemma3_text linear": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": LINEAR}, "sliding_window": 20},
    ),
    "gemma4_text": ("gemma4_text", {}),
    "gemma4_text of own keys": (
        "gemma4_text",
        {"num_kv_shared_layers": 0, "final_logit_softcapping": None},
    ),
    "gemma4_text of one kind of heads": (
        "gemma4_text",
        {"global_head_dim": 8, "num_global_key_value_heads": None, "use_double_wide_mlp": False},
    ),
    "gemma4_text without inputs of layers": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_bias": True},
    ),
    "gemma4_text with experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gemma4_unified_text": ("gemma4_unified_text", {}),
    "phi3": ("phi3", {}),
    "phi3 windows": ("phi3", {"sliding_window": 9}),
    "phi3 part of a head": ("phi3", {"hidden_size": 64, "rope_parameters": PART}),
    "phi3 longrope": (
        "phi3",
        {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
    ),
    "muse_glimmer_text": ("muse_glimmer_text", {}),
    "muse_glimmer_text windows": (
        "muse_glimmer_text",
        {"sliding_window": 7, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "muse_glimmer_text of its layers": (
        "muse_glimmer_text",
        {"layer_types": None, "layer_rope_theta": None, "num_hidden_layers": 5},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3 windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    ),
    "granite": ("granite", {}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {}),
    "cohere2 windows": (
        "cohere2",
        {"sliding_window": 9, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "mlp_bias": True},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 plainer": (
        "deepseek_v3",
        {
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope_parameters": LINEAR,
        },
    ),
    "deepseek_v3 sizes": (
        "deepseek_v3",
        {
            "kv_lora_rank": 96,
            "qk_nope_head_dim": 40,
            "qk_rope_head_dim": 32,
            "v_head_dim": 34,
            "q_lora_rank": 50,
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True, "hidden_size": 64}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2 plainer": (
        "starcoder2",
        {"use_bias": False, "tie_word_embeddings": False, "sliding_window": None},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral windows": ("mixtral", {"sliding_window": 8}),
    "mixtral of one expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "mixtral of all experts": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe normed": ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "granitemoe": ("granitemoe", {}),
    "granitemoe biases": ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "glm4 biases": ("glm4", {"attention_bias": True, "tie_word_embeddings": True}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe plain": (
        "glm4_moe",
        {"use_qk_norm": False, "norm_topk_prob": False, "attention_bias": True},
    ),
    "glm4_moe of one group": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe alone": (
        "ernie4_5_moe",
        {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "use_bias": True},
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss windows": ("gpt_oss", {"sliding_window": 8, "head_dim": 32}),
    "gpt_oss yarn": (
        "gpt_oss",
        {
            "rope_parameters": {**YARN, "truncate": False},
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe tied": (
        "qwen3_moe",
        {"tie_word_embeddings": True, "norm_topk_prob": False, "attention_bias": True},
    ),
    "qwen3_moe sizes": (
        "qwen3_moe",
        {"moe_intermediate_size": 24, "decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "olmoe": ("olmoe", {}),
    "olmoe normed": ("olmoe", {"norm_topk_prob": True}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4 windows": ("exaone4", {"sliding_window": 10}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5 biases": ("ernie4_5", {"use_bias": True}),
    "lfm2": ("lfm2", {}),
    "lfm2 biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 5, "hidden_size": 40}),
    "lfm2 not adjusted": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm3": ("lfm3", {}),
    "lfm3 plainer": ("lfm3", {"use_sandwich_norm": False, "use_attention_gate": False}),
    "lfm3 wide heads": ("lfm3", {"head_dim": 18, "num_attention_heads": 6}),
    "qwen3_5_text": ("qwen3_5_text", {}),
    "qwen3_5_text wide": (
        "qwen3_5_text",
        {
            "initializer_range": 0.2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 48,
            "linear_num_key_heads": 1,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "bamba": ("bamba", {}),
    "bamba biases": (
        "bamba",
        {
            "attn_layer_indices": [0],
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_n_groups": 1,
        },
    ),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1 biases": (
        "falcon_h1",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 2,
        },
    ),
    "falcon_h1 norms": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_d_ssm": None, "tie_word_embeddings": True},
    ),
    "falcon_h1 gated before norms": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid dense": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "granitemoehybrid of attention": (
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h biases": (
        "nemotron_h",
        {
            "layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp"],
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
            "ssm_state_size": 12,
            "conv_kernel": 3,
            "mamba_head_dim": 48,
        },
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next other scores": (
        "qwen3_next",
        {
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "linear_num_value_heads": 6,
        },
    ),
    **{
        f"llama groups of {size}": (
            "llama",
            {"hidden_size": 16 * size, "num_attention_heads": 2 * size},
        )
        for size in range(1, 9)
    },
}
PROMPT = [*range(40, 62)]


@cache
def model_of(variant: str) -> PreTrainedModel:
    """Float32, with bfloat16 numbers as its weights; norms are random too."""
    family, changes = VARIANTS[variant]
    model = tiny(family, **changes)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                weight.uniform_(0.5, 1.5)
            if name.endswith((".D", ".A_log")):
                weight.normal_()
            elif name.endswith(".bias"):
                weight.normal_(std=0.3)
            weight.copy_(weight.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
            if name.endswith("layer_scalar"):
                buffer.copy_(buffer.uniform_(0.5, 1.5).bfloat16())
    return model


@cache
def half_of(variant: str) -> PreTrainedModel:
    """The same weights in bfloat16."""
    family, changes = VARIANTS[variant]
    model = tiny(family, **changes).to(torch.bfloat16)
    model.load_state_dict(model_of(variant).state_dict())
    return model


def tree_of(vocabulary: int, seed: int = 0, size: int = 21) -> TokenTree:
    return random_tree(seed, size, vocabulary, root=3 % vocabulary)


@torch.inference_mode()
def native_logits(lm: NativeLM, prompt: list[int], tree: TokenTree) -> Tensor:
    """Return the logits of each node of the tree after the prompt, float32 [nodes, vocabulary]."""
    target = NativeTarget(lm)
    target.prefill(prompt)
    return target.verify(tree)[0]


@torch.inference_mode()
def own_logits(model: PreTrainedModel, prompt: list[int], tree: TokenTree) -> Tensor:
    """The same by the model's own forward over each node's path, without a cache."""
    root = int(tree.tokens[0])
    paths = [torch.tensor([*prompt, root, *tree.path_tokens(node)]) for node in range(len(tree))]
    # attention is causal: what stands behind a path changes nothing
    ids = pad_sequence(paths, batch_first=True)
    logits = model(ids).logits
    return torch.stack(
        [row[len(path) - 1] for row, path in zip(logits, paths, strict=True)]
    ).float()


def write_gguf(
    path: Path,
    architecture: str,
    kind: str,
    *,
    tied: bool = False,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """A model whose rows are long enough for the blocks of 256, and more tensors."""
    hidden, inner, heads, key_heads, head = 256, 512, 4, 2, 64
    rows = {
        "attn_q.weight": (heads * head, hidden),
        "attn_k.weight": (key_heads * head, hidden),
        "attn_v.weight": (key_heads * head, hidden),
        "attn_output.weight": (hidden, heads * head),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    vectors = {"attn_norm.weight": hidden, "ffn_norm.weight": hidden}
    if architecture == "qwen2":
        vectors |= {f"attn_{part}.bias": rows[f"attn_{part}.weight"][0] for part in "qkv"}
    if architecture == "qwen3":
        vectors |= {"attn_q_norm.weight": head, "attn_k_norm.weight": head}
    words = gguf_files.byte_level_vocabulary()
    vocabulary = len(words["tokenizer.ggml.tokens"])
    tensors: dict[str, Any] = {
        "token_embd.weight": (kind, (vocabulary, hidden)),
        "output_norm.weight": ("f32", (hidden,)),
    }
    if not tied:
        tensors["output.weight"] = (kind, (vocabulary, hidden))
    for layer in range(gguf_files.LAYERS):
        tensors |= {f"blk.{layer}.{name}": (kind, shape) for name, shape in rows.items()}
        tensors |= {f"blk.{layer}.{name}": ("f32", (size,)) for name, size in vectors.items()}
    sizes = {"embedding_length": hidden, "feed_forward_length": inner, "rope.dimension_count": head}
    if architecture == "qwen3":
        sizes |= {"attention.key_length": head, "attention.value_length": head}
    return gguf_files.write_model(
        path,
        architecture,
        kind=kind,
        tied=tied,
        vocabulary=words,
        metadata={f"{architecture}.{key}": value for key, value in sizes.items()},
        tensors=tensors | dict(more or {}),
    )
