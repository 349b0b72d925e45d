"""The package says that it is typed: the mark is in the wheel and the source distribution."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_mark_is_in_the_wheel_and_in_the_source_distribution(tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    for name in ("specengine", "kernels", "csrc"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
        shutil.copytree(ROOT / name, copied / name, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, copied / name)
    for command in (["build_py", "--build-lib", "wheel"], ["sdist", "--formats=gztar", "--dist-dir", "dist"]):
        environment = os.environ | {"SPECENGINE_CUDA": "0"}
        subprocess.run([sys.executable, "setup.py", "-q", *command], cwd=copied, env=environment, check=True, stdout=2)
    assert (copied / "wheel" / "specengine" / "py.typed").is_file()
    (archive,) = (copied / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as members:
        assert [name for name in members.getnames() if name.endswith("/specengine/py.typed")]


def test_the_mark_is_there_as_the_classifier_promises() -> None:
    assert (ROOT / "specengine" / "py.typed").read_bytes() == b""
    assert "Typing :: Typed" in (ROOT / "pyproject.toml").read_text()
    assert '"py.typed",' in (ROOT / "setup.py").read_text()
