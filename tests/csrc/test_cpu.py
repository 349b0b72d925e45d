"""csrc/cpu on its own, by csrc/tests/cpu_test.cpp: every instruction set of this machine against double precision.

Built with the sanitizers for memory and undefined behaviour and, its threads, with the one for data races; with clang,
and for aarch64, whose vectors are others, where there are the tools.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
# as setup.py has them, but for -O3: the sanitizers see more at -O1
FLAGS = [
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Werror",
]
# the headers of gcc 12 for AVX512 begin with values that nobody set
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
# ASan sees what is left out of UBSan here, and building takes a fifth less
MEMORY = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,vptr,object-size",
    "-fno-sanitize-recover",
]
RACES = ["-fsanitize=thread"]
THREADS_ONLY = ("blocks", "packed", "naive", "toys", "threads_test")

GCC, CLANG, CROSS = (
    shutil.which("g++"),
    shutil.which("clang++"),
    shutil.which("aarch64-linux-gnu-g++"),
)
EMULATOR = shutil.which("qemu-aarch64")


def sources(program: str) -> list[str]:
    kernels, parts = (
        sorted((CSRC / "cpu").glob("isa_*.cpp")),
        sorted((CSRC / "tests" / "cpu").glob("*.cpp")),
    )
    if program == "cpu_threads_test":
        parts = [part for part in parts if part.stem in THREADS_ONLY]
    return [str(path) for path in (*kernels, *parts, CSRC / "tests" / f"{program}.cpp")]


def build(folder: Path, compiler: str, flags: list[str], program: str = "cpu_test") -> str:
    """Build a program with the instruction sets that run here; the others are read for their warnings alone."""
    built = str(folder / program)
    pytest.importorskip("setuptools")
    setup = runpy.run_path(str(CSRC.parent / "setup.py"))
    setup["list_formats"](str(folder), str(CSRC))
    command = [compiler, *FLAGS, *flags, f"-I{CSRC}", f"-I{folder}"]
    used = setup["run_here"](sources(program)) if compiler in (GCC, CLANG) else sources(program)
    ends = [[*used, "-o", built]]
    if unused := set(sources(program)) - set(used):
        ends.insert(0, ["-fsyntax-only", *unused])
    for end in ends:
        done = subprocess.run([*command, *end], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return built


def passes(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "all checks passed" in done.stdout


def require(sanitizer: list[str], folder: Path) -> str:
    """The compiler; skips the test where it or the sanitizer's library is missing, or where that does not start."""
    if GCC is None:
        pytest.skip("needs g++ on the path")
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() {}\n")
    done = subprocess.run(
        [GCC, *sanitizer, str(source), "-o", str(program)], capture_output=True, text=True
    )
    if done.returncode == 0:
        done = subprocess.run([str(program)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"g++ {sanitizer[0]} does not work here: {done.stderr.strip()[:200]}")
    return GCC


@pytest.mark.slow
def test_memory_and_undefined_behaviour(tmp_path: Path) -> None:
    passes(build(tmp_path, require(MEMORY, tmp_path), MEMORY))


@pytest.mark.slow
def test_data_races(tmp_path: Path) -> None:
    passes(build(tmp_path, require(RACES, tmp_path), RACES, "cpu_threads_test"))


if CLANG:

    @pytest.mark.slow
    def test_clang(tmp_path: Path) -> None:
        assert CLANG
        passes(build(tmp_path, CLANG, ["-Wno-unknown-warning-option"]))


@pytest.mark.slow
@pytest.mark.skipif(not (CROSS and EMULATOR), reason="needs aarch64-linux-gnu-g++ and qemu-aarch64")
def test_aarch64(tmp_path: Path) -> None:
    """Against the bits of order_test.cpp, too, which x86-64 has."""
    assert CROSS
    assert EMULATOR
    passes(EMULATOR, build(tmp_path, CROSS, ["-static"]), "without-forks")
