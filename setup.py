"""What pyproject.toml cannot say: the C++ extension, and kernels/ as the package specengine_kernels."""

import sys
from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, LinkError, PlatformError

NOT_BUILT = """
specengine: the C++ extension specengine._expander was not built:
    {error}
specengine works without it and gives the same results; building draft trees is slower.
To have it, install a C++17 compiler (Debian, Ubuntu: apt install g++; macOS: xcode-select --install;
Windows: the Visual Studio Build Tools) and install specengine again.
"""


class OptionalBuildExt(build_ext):
    """Explains a missing compiler; setuptools carries on, because the extension is marked optional."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except (CCompilerError, CompileError, ExecError, LinkError, PlatformError) as error:
            print(NOT_BUILT.format(error=error), file=sys.stderr)
            raise


expander = Pybind11Extension(
    "specengine._expander",
    ["csrc/expander.cpp"],
    include_dirs=["csrc"],
    depends=sorted(glob("csrc/**/*.hpp", recursive=True)),
    cxx_std=17,
    extra_compile_args=[] if sys.platform == "win32" else ["-O3"],
    optional=True,
)

setup(
    packages=[*find_packages(include=["specengine", "specengine.*"]), "specengine_kernels"],
    # kernels/ has no __init__.py: with one it would hide Hugging Face's `kernels` wherever the root is on the path
    package_dir={"specengine_kernels": "kernels"},
    package_data={
        "specengine": ["py.typed", "**/*.safetensors", "**/*.json", "**/*.md", "trace/page.*"],
        "specengine_kernels": ["README.md"],
    },
    ext_modules=[expander],
    cmdclass={"build_ext": OptionalBuildExt},
)
