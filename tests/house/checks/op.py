import setup
import setuptools
import torch

extension = setup.extensions()[0]
assert "csrc/ops/leaves.cpp" in extension.sources
# the others would take a minute
extension.sources = ["csrc/ops_binding.cpp", "csrc/ops/leaves.cpp"]
extension.extra_compile_args = ["-O0", "-std=c++17"]
setuptools.setup(
    ext_modules=[extension],
    packages=[],
    long_description="",
    script_args=["-q", "build_ext", "--inplace"],
)

from specengine import ops
from specengine.errors import InputError
from specengine.ops.leaves import leaves

assert ops.backends()["leaves"].name == "cpp"
random = torch.Generator().manual_seed(0)
for size in range(1, 40):
    parents = torch.tensor(
        [-1, *(int(torch.randint(node, (1,), generator=random)) for node in range(1, size))]
    )
    live = torch.tensor([size - size // 4], dtype=torch.int32)
    found, meant = leaves(parents, live), ops.by_meaning(leaves, parents, live)
    assert found.alive().tolist() == meant.alive().tolist(), (parents, found, meant)
try:
    leaves(parents.int(), live)
except InputError as error:
    assert str(error).startswith("parents: got int32"), error
else:
    raise AssertionError("int32 parents were taken")
