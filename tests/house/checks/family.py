import gguf
import numpy
import torch
from transformers import GlmConfig, GlmForCausalLM

from specengine import Engine
from specengine.checkpoints.gguf import tensor_names

torch.manual_seed(0)
config = GlmConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=None,
    eos_token_id=None,
    bos_token_id=None,
)
model = GlmForCausalLM(config).eval()
for weight in model.parameters():
    weight.data = weight.data.bfloat16().float()
prompt = [*range(20, 40), *range(20, 30)]
own = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[
    0, len(prompt) :
].tolist()

writer = gguf.GGUFWriter("glm.gguf", "chatglm")
for key, value in {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 8,
}.items():
    writer.add_uint32(f"chatglm.{key}", value)
writer.add_float32("chatglm.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
tensors = dict(model.named_parameters())
for name, (stored,) in tensor_names(config, tensors).items():
    writer.add_tensor(stored, tensors[name].detach().numpy().astype(numpy.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

for source, options in ((model, {}), ("glm.gguf", {"dtype": torch.float32})):
    engine = Engine.from_pretrained(source, "recycling", policy="fixed", **options)
    assert engine.target.backend.startswith("native"), engine.target.backend
    result = engine.generate(prompt, max_new_tokens=12)
    assert result.token_ids == own and result.stats.num_draft_tokens, (source, result, own)
