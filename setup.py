"""Build what pyproject.toml cannot describe: the C++ extension, the CUDA library, kernels/ as specengine_kernels, and
as specengine_csrc what NVRTC compiles where the CUDA library is not built.

The CUDA library specengine/_cuda.so is built where nvcc is found (in CUDA_HOME/bin, else on the path) and somebody
wants it: SPECENGINE_CUDA=1 or CUDA_HOME is set, or the machine has an NVIDIA device. So an installation for a CPU does
not wait for it, even where nvcc is on the path. SPECENGINE_CUDA=0 leaves it out. SPECENGINE_SANITIZE=1 builds the
extensions with the sanitizers for memory and undefined behaviour: `make test-sanitized`.

An extension that cannot be built is left out, with a word on stderr. SPECENGINE_STRICT_BUILD=1, as wheels are built
with, makes that an error.
"""

import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, LinkError, PlatformError

OPS, CPU, CUDA = "specengine._ops", "specengine._cpu", "specengine._cuda"

NOT_BUILT = {
    OPS: """
specengine: the C++ extension specengine._ops was not built:
    {error}
specengine works without it and gives the same results; building draft trees is slower.
To have it, install a C++17 compiler (Debian, Ubuntu: apt install g++; macOS: xcode-select --install;
Windows: the Visual Studio Build Tools) and install specengine again.
""",
    CPU: """
specengine: the C++ extension specengine._cpu was not built:
    {error}
specengine works without it, through Hugging Face's modules; a CPU then runs models at a third of the speed.
To have it, install g++ or clang with C++17 (Windows: clang-cl, which the Visual Studio Installer calls "C++ Clang
tools for Windows") and install specengine again.
""",
    CUDA: """
specengine: the CUDA library specengine/_cuda.so was not built:
    {error}
specengine works without it and gives the same results: NVRTC, which torch's CUDA wheels bring, compiles SALF's
queue when it is used.
To have it, install the CUDA toolkit 12.4 or later and g++, and install specengine again with SPECENGINE_CUDA=1;
SPECENGINE_CUDA=0 leaves it out.
""",
}

OPTIONAL = os.environ.get("SPECENGINE_STRICT_BUILD") != "1"
WINDOWS = sys.platform == "win32"

# A100; H100 and H200; and for what comes after them code that the driver compiles
CUDA_TARGETS = ["arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a", "arch=compute_90,code=compute_90"]

# the sanitizers see more at -O1, and what they find ends the process; what torch and Python are made of has no types
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]
WATCHED = [*SANITIZERS, "-fno-omit-frame-pointer", "-g", "-O1"] if os.environ.get("SPECENGINE_SANITIZE") == "1" else []


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    if home:
        return shutil.which("nvcc", path=os.path.join(home, "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def cuda_is_wanted() -> bool:
    asked = os.environ.get("SPECENGINE_CUDA", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"SPECENGINE_CUDA: got {asked!r}, accepted 0, 1 or unset")
    if asked or not sys.platform.startswith("linux"):
        return asked == "1"
    has_device = os.path.exists("/dev/nvidiactl") or os.path.exists("/proc/driver/nvidia/version")
    return nvcc() is not None and (has_device or bool(os.environ.get("CUDA_HOME")))


def nvcc_command(compiler: str, sources: list[str], library: str, include: str = "csrc") -> list[str]:
    """Builds the library; one thread per core and target. The CUDA runtime is linked in, and no symbol of it shows."""
    targets = [flag for target in CUDA_TARGETS for flag in ("-gencode", target)]
    host = ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra", "-Xlinker", "--exclude-libs,ALL"]
    return [
        compiler,
        "-O3",
        "-std=c++17",
        *targets,
        "-t",
        "0",
        *host,
        "-shared",
        f"-I{include}",
        *sources,
        "-o",
        library,
    ]


def list_formats(folder: str, csrc: str = "csrc") -> None:
    """Write the headers that list csrc/cpu/formats and integers, below a folder where the compiler looks for headers.

    So a weight format is one file, named after it, and stands in no list.
    """
    headers = {"formats.hpp": ""}
    for kind in ("formats", "integers"):
        names = sorted(path.stem for path in Path(csrc, "cpu", kind).glob("*.inl"))
        each = " ".join(f"each({name})" for name in names)
        headers["formats.hpp"] += f"#define CPU_{kind.upper()}(each) {each}\n"
        headers[f"{kind}.inl"] = "\n".join(f'#include "cpu/{kind}/{name}.inl"' for name in names) + "\n"
    Path(folder, "cpu").mkdir(parents=True, exist_ok=True)
    for header, text in headers.items():
        Path(folder, "cpu", header).write_text(text)


class OptionalBuildExt(build_ext):
    """Explains a missing compiler; setuptools carries on, because the extensions are marked optional."""

    def get_ext_filename(self, fullname):
        *folders, name = fullname.split(".")  # setuptools asks with and without the package
        if name == CUDA.rpartition(".")[2]:
            return os.path.join(*folders, f"{name}.so")  # no module of Python, so not named like one
        return super().get_ext_filename(fullname)

    def build_extension(self, ext):
        try:
            if ext.name == CUDA:
                self.build_cuda(ext)
            else:
                if ext.name == CPU:
                    list_formats(self.build_temp)
                    ext.include_dirs.append(self.build_temp)
                    if WINDOWS:
                        take_clang_cl(self.compiler)
                super().build_extension(ext)
        except (CCompilerError, CompileError, ExecError, LinkError, PlatformError) as error:
            print(NOT_BUILT[ext.name].format(error=error), file=sys.stderr)
            raise

    def build_cuda(self, ext):
        compiler, library = nvcc(), Path(self.get_ext_fullpath(ext.name))
        if compiler is None:
            raise ExecError("nvcc was found neither in CUDA_HOME/bin nor on the path")
        newest = max(os.path.getmtime(file) for file in [*ext.sources, *ext.depends])
        if not self.force and library.exists() and library.stat().st_mtime > newest:
            return
        library.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(nvcc_command(compiler, ext.sources, str(library)), capture_output=True, text=True)
        if done.returncode != 0:
            raise CompileError((done.stdout + done.stderr).strip()[-2000:])


def take_clang_cl(compiler: Any) -> None:
    """Let setuptools' compiler of Windows compile with clang-cl: csrc/cpu has vectors that cl does not know."""
    found = shutil.which("clang-cl")
    if found is None:
        raise CompileError("clang-cl was not found on the path, and cl does not compile csrc/cpu")
    if not compiler.initialized:
        compiler.initialize()
    compiler.cc = found


def flags_of_forward() -> list[str]:
    """Return the flags of csrc/cpu.

    A compiler that fuses products and sums chooses which; kernels say it themselves, so that all choose alike.
    """
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno"]
    return [f"/clang:{flag}" for flag in flags] if WINDOWS else [*flags, "-pthread", *WATCHED]


def for_an_index(readme: str) -> str:
    """Return the README for a page that holds nothing else: its pictures, comments and relative links are left out.

    What was a link stays as its text.
    """
    text = re.sub(r"<!--.*?-->\n*", "", readme, flags=re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


def extensions() -> list[Extension]:
    headers = sorted(glob("csrc/**/*.hpp", recursive=True))
    cuda = [Extension(CUDA, sorted(glob("csrc/*.cu")), depends=headers, optional=OPTIONAL)] if cuda_is_wanted() else []
    try:
        from pybind11.setup_helpers import Pybind11Extension  # here, so that tests can read this file without it
    except ImportError as error:  # never under pip, which brings it
        for name in (OPS, CPU):
            print(NOT_BUILT[name].format(error=error), file=sys.stderr)
        return cuda
    ops = Pybind11Extension(
        OPS,
        ["csrc/ops_binding.cpp", *sorted(glob("csrc/ops/*.cpp"))],
        include_dirs=["csrc"],
        depends=headers,
        cxx_std=17,
        extra_compile_args=[] if WINDOWS else ["-O3", *WATCHED],
        extra_link_args=WATCHED,
        optional=OPTIONAL,
    )
    forward = Pybind11Extension(
        CPU,
        ["csrc/cpu_binding.cpp", *sorted(glob("csrc/cpu/isa_*.cpp"))],
        include_dirs=["csrc"],
        depends=[*headers, *sorted(glob("csrc/cpu/*/*.inl"))],
        cxx_std=17,
        extra_compile_args=flags_of_forward(),
        extra_link_args=[] if WINDOWS else ["-pthread", *WATCHED],
        optional=OPTIONAL,
    )
    return [ops, forward, *cuda]


if __name__ == "__main__":
    setup(
        long_description=for_an_index(Path("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
        packages=[*find_packages(include=["specengine", "specengine.*"]), "specengine_kernels", "specengine_csrc"],
        # kernels/ has no __init__.py: with one it would hide Hugging Face's `kernels` wherever the root is on the path
        package_dir={"specengine_kernels": "kernels", "specengine_csrc": "csrc"},
        package_data={
            "specengine": [
                "py.typed",
                "**/*.safetensors",
                "**/*.json",
                "**/*.md",
                "trace/page.*",
                "serve/page/*",
                "benchmark/**/*.jsonl",
            ],
            "specengine_kernels": ["README.md"],
            "specengine_csrc": ["best_first.cu", "spec/*.hpp"],
        },
        exclude_package_data={"specengine_csrc": ["*.cpp", "cpu/*", "cpu/*/*", "ops/*", "tests/*", "tests/*/*"]},
        ext_modules=extensions(),
        cmdclass={"build_ext": OptionalBuildExt},
    )
