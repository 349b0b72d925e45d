"""Llama, and what is stored as Llama: SmolLM2, older Mistral files, ..."""

from specengine.models.families import GGUF, Family

# llama.cpp turns neighbouring rows; its converter interleaves the halves (convert_hf_to_gguf.py: LlamaModel.permute).
FAMILY = Family(
    gguf=GGUF(
        "llama",
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
        pairs=("attn_q", "attn_k"),
    )
)
