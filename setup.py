"""Build what pyproject.toml cannot describe: the C++ extensions, kernels/ as specengine_kernels, and as specengine_csrc
what NVRTC compiles on a GPU.

SPECENGINE_CPU=0 leaves the forward on CPUs out, which takes longest. As many files are compiled at once as there are
processors and gigabytes of free memory; SPECENGINE_JOBS=1 compiles one at a time. SPECENGINE_SANITIZE=1 builds the
extensions with the sanitizers for memory and undefined behaviour: `make test-sanitized`.

In place, as `pip install -e .` builds, only the fastest instruction sets that this machine runs and portable code are
compiled, with SPECENGINE_ALL_SETS=1 all that it runs, for tests and comparisons; a wheel has all.

An extension that cannot be built is left out, with a word on stderr. SPECENGINE_STRICT_BUILD=1, as wheels are built
with, makes that an error.
"""

import locale
import os
import re
import shutil
import sys
from glob import glob
from importlib.util import find_spec
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import CCompilerError, CompileError, ExecError, LinkError, PlatformError

OPS, CPU = "specengine._ops", "specengine._cpu"

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
}

OPTIONAL = os.environ.get("SPECENGINE_STRICT_BUILD") != "1"
WINDOWS = sys.platform == "win32"

# the sanitizers see more at -O1, and what they find ends the process; what torch and Python are made of has no types
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]
WATCHED = (
    [*SANITIZERS, "-fno-omit-frame-pointer", "-g", "-O1"]
    if os.environ.get("SPECENGINE_SANITIZE") == "1"
    else []
)


def cpu_is_wanted() -> bool:
    asked = os.environ.get("SPECENGINE_CPU", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"SPECENGINE_CPU: got {asked!r}, accepted 0, 1 or unset")
    return asked != "0"


BYTES_PER_JOB = 1 << 30  # of memory; the largest file, csrc/cpu_binding.cpp, takes 0.9 GB


def jobs() -> int:
    """Return how many files of an extension are compiled at once: SPECENGINE_JOBS, else one per processor.

    Without SPECENGINE_JOBS, no more than fit into free memory.
    """
    chosen = os.environ.get("SPECENGINE_JOBS", "")
    if chosen:
        if not chosen.isdecimal() or int(chosen) < 1:
            raise SystemExit(f"SPECENGINE_JOBS: got {chosen!r}, accepted a whole number, 1 or more")
        return int(chosen)
    has_affinity = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(processors, free_memory() // BYTES_PER_JOB))


def free_memory() -> int:
    """Return the bytes of memory that new processes may take, as Linux tells; of other systems, all there is."""
    limits = [int(line) - int(used) for line, used in cgroup_memory()]
    try:
        available = re.search(
            r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE
        )
    except OSError:
        available = None
    if available is not None:
        limits.append(int(available[1]) * 1024)
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=BYTES_PER_JOB)


def cgroup_memory() -> list[tuple[str, str]]:
    """Return the limit on this container's memory and what is used of it, in bytes as text; empty without a limit."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            texts = Path(limit).read_text().strip(), Path(used).read_text().strip()
        except OSError:
            continue
        return [texts] if all(text.isdecimal() for text in texts) else []
    return []


def compile_at_once(compiler: Any, most: int) -> None:
    """Let setuptools' compiler, which takes one file after the other, run up to `most` processes for all extensions."""
    one_by_one, pool = compiler.compile, ThreadPool(most)

    def compile_all(sources: list[str], **options: Any) -> list[str]:
        # the bindings, which take longest, are the last by name and the first to begin
        compiled = pool.map(lambda source: one_by_one([source], **options), sources[::-1], 1)
        return [file for files in compiled[::-1] for file in files]

    compiler.compile = compile_all


def list_formats(folder: str, csrc: str = "csrc") -> None:
    """Write the headers that list csrc/cpu/formats and integers, below a folder where the compiler looks for headers.

    So a weight format is one file, named after it, and stands in no list.
    """
    headers = {"formats.hpp": ""}
    for kind in ("formats", "integers"):
        names = sorted(path.stem for path in Path(csrc, "cpu", kind).glob("*.inl"))
        each = " ".join(f"each({name})" for name in names)
        headers["formats.hpp"] += f"#define CPU_{kind.upper()}(each) {each}\n"
        headers[f"{kind}.inl"] = (
            "\n".join(f'#include "cpu/{kind}/{name}.inl"' for name in names) + "\n"
        )
    Path(folder, "cpu").mkdir(parents=True, exist_ok=True)
    for header, text in headers.items():
        Path(folder, "cpu", header).write_text(text)


def in_units(sources: list[str], count: int, folder: str) -> list[str]:
    """Write files that include the sources, `count` at most, and return them: each reads what they share once."""
    units = []
    for unit in range(min(count, len(sources))):
        file = Path(folder, f"unit_{unit}.cpp")
        included = [Path(source).relative_to("csrc").as_posix() for source in sources[unit::count]]
        text = "".join(f'#include "{source}"\n' for source in included)
        if not file.exists() or file.read_text() != text:  # else it would be compiled anew
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        units.append(str(file))
    return units


def run_here(sources: list[str], cpuinfo: str = "/proc/cpuinfo") -> list[str]:
    """Return the sources without instruction sets that this machine has not; all where Linux does not tell.

    The sets of a build are those whose files it has: the fastest of them that a CPU runs is used.
    """
    try:
        told = re.search(r"^flags\s*:(.*)", Path(cpuinfo).read_text(), re.MULTILINE)
    except OSError:
        told = None
    if told is None:
        return sources
    has = set(told[1].replace("_", "").split())
    return [source for source in sources if required_flags(source) <= has]


def fastest(sources: list[str]) -> list[str]:
    """Return the sources without instruction sets that another one of the same products goes beyond, but portable ones.

    Products are of integers, of pairs of bfloat16, or of floats, which the other two do not replace.
    """
    required = {source: required_flags(source) for source in sources}

    def products(source: str) -> tuple[bool, bool]:
        return "integer" in source, "avx512bf16" in required[source]

    return [
        source
        for source in sources
        if not required[source]
        or not any(
            required[source] < required[other] and products(source) == products(other)
            for other in sources
        )
    ]


def required_flags(source: str) -> set[str]:
    """Return what a file is compiled for, as CPU_ISA_BEGIN says; nothing for a file that every CPU runs."""
    region = re.search(r'CPU_ISA_BEGIN\("(.*)"\)', Path(source).read_text(encoding="utf-8"))
    return set(region[1].replace("-", "").split(",")) if region else set()


class OptionalBuildExt(build_ext):
    """Explains a missing compiler; setuptools carries on, because the extensions are marked optional."""

    def run(self):
        if self.inplace or self.editable_mode:
            for extension in self.extensions:
                extension.sources = run_here(extension.sources)
                if os.environ.get("SPECENGINE_ALL_SETS") != "1":
                    extension.sources = fastest(extension.sources)
        super().run()

    def build_extensions(self):
        most = 1 if WINDOWS else jobs()
        for extension in self.extensions:
            if extension.name == OPS:  # pybind11 takes half of the time of its small files
                extension.depends += extension.sources
                extension.sources = in_units(extension.sources, most, self.build_temp)
        files = sum(len(extension.sources) for extension in self.extensions)
        print(
            f"specengine: compiling {files} files, {most} at a time, about 15 s of a processor each",
            flush=True,
        )
        if most > 1:
            compile_at_once(self.compiler, most)
            self.parallel = len(self.extensions)
        super().build_extensions()

    def build_extension(self, ext):
        try:
            if ext.name == CPU:
                list_formats(self.build_temp)
                ext.include_dirs.append(self.build_temp)
                if WINDOWS:
                    take_clang_cl(self.compiler)
            super().build_extension(ext)
        except (CCompilerError, CompileError, ExecError, LinkError, PlatformError) as error:
            print(NOT_BUILT[ext.name].format(error=error), file=sys.stderr)
            raise


class SearchedEditableWheel(editable_wheel):
    """Puts the checkout on the search path as well: mypy and pyright ask no import hook, which setuptools writes.

    It writes one because kernels/ and csrc/ are imported by other names. Folders of the checkout without an
    `__init__.py`, such as kernels/, hide no package that is installed.
    """

    def _select_strategy(self, *arguments: Any) -> Any:
        strategy = super()._select_strategy(*arguments)
        hook = getattr(strategy, "get_implementation", None)
        if hook is not None:  # else it writes a path, or links
            path = f"{Path.cwd()}\n".encode(locale.getencoding())
            strategy.get_implementation = lambda: [*hook(), ("__editable__.specengine.pth", path)]
        return strategy


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


def pybind11_of_torch() -> str | None:
    """Return the folder of the pybind11 headers that torch's wheels bring; None where there are none."""
    found = find_spec("torch")
    folder = Path(found.origin).parent / "include" if found is not None and found.origin else None
    return (
        str(folder)
        if folder is not None and (folder / "pybind11" / "pybind11.h").is_file()
        else None
    )


def with_headers(folder: str) -> Any:
    """Return the maker of an extension as pybind11's, with the headers in this folder."""

    def make(
        name: str, sources: list[str], *, include_dirs: list[str], cxx_std: int, **options: Any
    ) -> Extension:
        flags = [f"-std=c++{cxx_std}", "-fvisibility=hidden", *options.pop("extra_compile_args")]
        include = [*include_dirs, folder]
        return Extension(
            name, sources, include_dirs=include, extra_compile_args=flags, language="c++", **options
        )

    return make


def extensions() -> list[Extension]:
    headers = sorted(glob("csrc/**/*.hpp", recursive=True))
    try:
        from pybind11 import setup_helpers  # here, so that tests can read this file without it

        extension = setup_helpers.Pybind11Extension
    except ImportError as error:  # never under pip, which brings it
        if (headers_of_torch := pybind11_of_torch()) is None:
            for name in (OPS, CPU):
                print(NOT_BUILT[name].format(error=error), file=sys.stderr)
            return []
        extension = with_headers(headers_of_torch)
    ops = extension(
        OPS,
        ["csrc/ops_binding.cpp", *sorted(glob("csrc/ops/*.cpp"))],
        include_dirs=["csrc"],
        depends=headers,
        cxx_std=17,
        # comparisons raise no flag that is read: without them 256-bit vectors stay scalars
        extra_compile_args=[] if WINDOWS else ["-O3", "-fno-trapping-math", *WATCHED],
        extra_link_args=WATCHED,
        optional=OPTIONAL,
    )
    forward = extension(
        CPU,
        ["csrc/cpu_binding.cpp", *sorted(glob("csrc/cpu/isa_*.cpp"))],
        include_dirs=["csrc"],
        depends=[*headers, *sorted(glob("csrc/cpu/*/*.inl"))],
        cxx_std=17,
        extra_compile_args=flags_of_forward(),
        extra_link_args=[] if WINDOWS else ["-pthread", *WATCHED],
        optional=OPTIONAL,
    )
    return [ops, *([forward] if cpu_is_wanted() else [])]


if __name__ == "__main__":
    setup(
        long_description=for_an_index(Path("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
        packages=[
            *find_packages(include=["specengine", "specengine.*"]),
            "specengine_kernels",
            "specengine_csrc",
        ],
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
            "specengine_csrc": ["best_first.cu", "worth.cu", "spec/*.hpp"],
        },
        exclude_package_data={
            "specengine_csrc": ["*.cpp", "cpu/*", "cpu/*/*", "ops/*", "tests/*", "tests/*/*"]
        },
        ext_modules=extensions(),
        cmdclass={"build_ext": OptionalBuildExt, "editable_wheel": SearchedEditableWheel},
    )
