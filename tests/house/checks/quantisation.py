import sys

import gguf
import numpy
import setup
import setuptools
import torch
from transformers import LlamaConfig

extension = setup.extensions()[1]
assert "csrc/cpu/isa_integer_portable.cpp" in extension.sources
# optimised, or with the other sets of instructions, it would take minutes
extension.sources = [
    "csrc/cpu_binding.cpp",
    "csrc/cpu/isa_portable.cpp",
    "csrc/cpu/isa_integer_portable.cpp",
]
extension.extra_compile_args.append("-O0")
extension.optional = False
assert "specengine._cpu" not in sys.modules
setuptools.setup(
    ext_modules=[extension],
    packages=[],
    long_description="",
    script_args=["-q", "build_ext", "--inplace", "--force"],
    cmdclass={"build_ext": setup.OptionalBuildExt},
)

from specengine import Engine
from specengine.checkpoints.gguf import tensor_names
from specengine.models.configs import layer_template

writer = gguf.GGUFWriter("model.gguf", "llama")
for key, value in {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}.items():
    writer.add_uint32(f"llama.{key}", value)
writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
config = LlamaConfig(
    vocab_size=96,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
shapes, random = layer_template(config), numpy.random.default_rng(0)
for name, (stored,) in tensor_names(config, shapes).items():
    numbers = random.standard_normal(shapes[name], numpy.float32) / 8
    kind = gguf.GGMLQuantizationType.F32
    if numbers.ndim == 2:
        kind = gguf.GGMLQuantizationType.TQ2_0
        numbers = gguf.quants.quantize(numbers, kind)
    if stored == "token_embd.weight":
        embeddings = torch.from_numpy(gguf.quants.dequantize(numbers, kind))
    writer.add_tensor(stored, numbers, raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

engine = Engine.from_pretrained("model.gguf", "recycling", policy="fixed", numerics="integer")
assert ", integer, " in engine.target.backend and engine.target.backend.endswith(
    "weights as tq2_0)"
)
assert torch.equal(engine.target.lm.embed(torch.arange(96)), embeddings)
prompt = [*range(20, 40), *range(20, 30)]
plain = Engine.from_pretrained("model.gguf", policy="plain", numerics="integer").generate(
    prompt, max_new_tokens=12
)
result = engine.generate(prompt, max_new_tokens=12)
assert result.token_ids == plain.token_ids and result.stats.num_draft_tokens, result
