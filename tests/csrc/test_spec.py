"""csrc/spec on its own: built with the sanitizers and compared with brute force by csrc/tests/spec_test.cpp."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("clang++")


def build_and_run(program: Path, *sources: Path) -> subprocess.CompletedProcess:
    flags = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover",
    ]
    built = subprocess.run(
        [COMPILER, *flags, f"-I{CSRC}", *map(str, sources), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++) on the path")
class TestSelfTest:
    def test_passes(self, tmp_path):
        parts = sorted((CSRC / "tests" / "spec").glob("*.cpp"))
        run = build_and_run(tmp_path / "spec_test", CSRC / "tests" / "spec_test.cpp", *parts)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "all checks passed" in run.stdout

    def test_sanitizers_are_on(self, tmp_path):
        """A select_best whose output buffer is one short must not go unnoticed."""
        source = tmp_path / "short_buffer.cpp"
        source.write_text(
            '#include "spec/tree.hpp"\n'
            "int main() {\n"
            "  const std::vector<float> values{-1.0f, -2.0f, -3.0f};\n"
            "  std::vector<int64_t> out(2);\n"
            "  spec::select_best(values.data(), 3, 3, out.data());\n"
            "}\n"
        )
        run = build_and_run(tmp_path / "short_buffer", source)
        assert run.returncode != 0
        assert "AddressSanitizer" in run.stderr
