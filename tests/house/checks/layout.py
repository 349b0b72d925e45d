import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from specengine import Engine
from specengine.checkpoints.eagle import load_head, save_head
from specengine.errors import CheckpointError
from specengine.models.eagle import EagleConfig

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97}
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        **sizes,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
).eval()
head = EagleConfig(
    version=3,
    **sizes,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    target_hidden_size=32,
    draft_vocab_size=97,
    layer_ids=(1, 2, 3),
)
official, lantern = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
save_head(head, head.network().state_dict(), official)

block = {
    "width": 32,
    "mlp_width": 48,
    "heads": 4,
    "kv_heads": 2,
    "vocabulary": 97,
    "reads_after": [0, 1, 2],
}
(lantern / "config.json").write_text(json.dumps({"lantern": block}))
tensors = {
    name.replace("midlayer.", "block."): tensor
    for name, tensor in load_file(official / "model.safetensors").items()
}
tensors = {name.replace("self_attn.", "attention."): tensor for name, tensor in tensors.items()}
attention = [tensors.pop(f"block.attention.{name}_proj.weight") for name in "qkv"]
save_file(
    tensors | {"block.attention.qkv.weight": torch.cat(attention)}, lantern / "model.safetensors"
)

# read as the same head
one, other = load_head(official), load_head(lantern)
assert other.config == one.config and other.state.keys() == one.state.keys()
assert all(torch.equal(other.state[name], tensor) for name, tensor in one.state.items())
assert str(other.dialect) == "EAGLE-3, lantern layout, fields as lantern means them"

# drafts the same trees, and the answer is that of plain decoding
prompt = [*range(20, 40), *range(20, 30)]
plain = Engine.from_pretrained(model, policy="plain").generate(prompt, max_new_tokens=12)
results = [
    Engine.from_pretrained(model, draft=str(folder), policy="fixed", lookup=False).generate(
        prompt, max_new_tokens=12
    )
    for folder in (official, lantern)
]
assert results[0].token_ids == results[1].token_ids == plain.token_ids
assert results[0].stats.num_draft_tokens == results[1].stats.num_draft_tokens > 0

# a head without the fused tensor is refused by the names of all that it lacks
save_file(tensors, lantern / "model.safetensors")
try:
    load_head(lantern)
    raise SystemExit("a head without its attention was loaded")
except CheckpointError as error:
    assert "missing" in str(error) and "q_proj" in str(error), error
