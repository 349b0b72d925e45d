"""The package says that it is typed: its mark is in the wheel and the source distribution, and users' files pass."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USER = """
from collections.abc import Callable, Iterator

from specengine import Cycle, Drafter, Engine, GenerationResult, Session, SpecEngineError, Stats, StreamPiece
from specengine import TreePolicy, generate


def answers(prompts: list[str]) -> list[str]:
    engine: Engine = Engine.from_pretrained(None, "ngram", "chain", dtype="float32")
    results: list[GenerationResult] = engine.generate_many(prompts, parallel=2, max_new_tokens=8)
    return [result.text for result in results]


def pieces(engine: Engine) -> Iterator[str]:
    piece: StreamPiece
    for piece in engine.stream("Hello", max_new_tokens=8):
        yield piece.text


def talk(engine: Engine) -> int:
    session: Session = engine.session()
    try:
        session.generate("Hello")
    except SpecEngineError as error:
        print(error)
    made: Callable[..., object] = engine.as_custom_generate()
    print(made, generate("Hello", max_new_tokens=1))
    return len(session.messages)


def facts(cycle: Cycle, stats: Stats, draft: Drafter, policy: TreePolicy) -> tuple[list[int], int]:
    print(draft, policy)
    return cycle.tokens, stats.num_generated_tokens
"""


def mypy(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mypy")
    (folder / "user.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "user.py",
    ]
    environment = os.environ | {
        "MYPYPATH": str(ROOT),
        "MYPY_CACHE_DIR": str(folder.parent / "cache"),
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_users_file_passes_strictly(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    done = mypy(tmp_path / "user", USER)
    assert done.returncode == 0, done.stdout + done.stderr
    done = mypy(tmp_path / "user", USER.replace("-> list[str]:", "-> list[bytes]:"))
    assert "List comprehension has incompatible type" in done.stdout


@pytest.mark.slow
def test_the_mark_is_in_the_wheel_and_in_the_source_distribution(tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    for name in ("specengine", "kernels", "csrc"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
        shutil.copytree(ROOT / name, copied / name, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, copied / name)
    for command in (
        ["build_py", "--build-lib", "wheel"],
        ["sdist", "--formats=gztar", "--dist-dir", "dist"],
    ):
        environment = os.environ | {"SPECENGINE_CUDA": "0"}
        subprocess.run(
            [sys.executable, "setup.py", "-q", *command],
            cwd=copied,
            env=environment,
            check=True,
            stdout=2,
        )
    assert (copied / "wheel" / "specengine" / "py.typed").is_file()
    (archive,) = (copied / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as members:
        assert [name for name in members.getnames() if name.endswith("/specengine/py.typed")]


def test_the_mark_is_there_as_the_classifier_promises() -> None:
    assert (ROOT / "specengine" / "py.typed").read_bytes() == b""
    assert "Typing :: Typed" in (ROOT / "pyproject.toml").read_text()
    assert '"py.typed",' in (ROOT / "setup.py").read_text()
