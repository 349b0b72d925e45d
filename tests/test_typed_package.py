"""The package says that it is typed: its mark is in the wheel and the source distribution, and users' files pass."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
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


def mypy(folder: Path, text: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Return what mypy says of a file; more: its options, by default those that find the checkout."""
    pytest.importorskip("mypy")
    (folder / "user.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        *more,
        "user.py",
    ]
    environment = os.environ | {"MYPY_CACHE_DIR": str(folder.parent / "cache")}
    environment |= {"PYTHONPATH": ""} if more else {"MYPYPATH": str(ROOT)}
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


SCRIPT = """
import specengine
from specengine import Engine
engine = Engine.from_pretrained()
reveal_type(engine.generate("Hi", max_new_tokens=8, **{"temperature": 0.5}))
reveal_type(engine.generate("Hi").text)
reveal_type(engine("Hi"))
reveal_type(engine.generate_many(["Hi"]))
reveal_type(engine.stream("Hi"))
reveal_type([piece.text for piece in engine.stream("Hi")])
reveal_type(engine.session().generate("Hi"))
reveal_type(specengine.generate("Hi"))
reveal_type(engine.generate("Hi", return_dict_in_generate=True))
"""
RESULT = "specengine.records.GenerationResult"
REVEALED = [
    RESULT,
    "str",
    RESULT,
    f"list[{RESULT}]",
    "specengine.engine.generation.TextGeneration",
    "list[str]",
    RESULT,
    RESULT,
    "specengine.records.SpeculativeOutput",
]


def copy_of_the_sources(folder: Path) -> Path:
    for name in ("specengine", "kernels", "csrc"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def build(folder: Path, *command: str) -> None:
    nothing = shutil.which("false") or "false"  # no compiler: the extensions are optional
    environment = os.environ | {"CC": nothing, "CXX": nothing, "SPECENGINE_JOBS": "1"}
    subprocess.run(
        [sys.executable, "setup.py", "-q", *command],
        cwd=folder,
        env=environment,
        check=True,
        stdout=2,
    )


@pytest.mark.slow
def test_an_editable_install_shows_type_checkers_what_calls_return(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    pytest.importorskip("pybind11")
    copied = copy_of_the_sources(tmp_path / "copy")
    build(copied, "editable_wheel", "--dist-dir", "dist")
    (wheel,) = (copied / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = next(
        file
        for name in ("bin/python", "Scripts/python.exe")
        if (file := tmp_path / "venv" / name).exists()
    )
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site.stdout.strip())
    code = "import specengine, specengine_kernels as kernels; print(specengine.__file__, kernels.__path__[0])"
    places = subprocess.run(
        [python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert places == [str(copied / "specengine" / "__init__.py"), str(copied / "kernels")]
    (tmp_path / "user").mkdir()
    done = mypy(tmp_path / "user", SCRIPT, "--python-executable", str(python))
    shown = re.findall(r'Revealed type is "(?:builtins\.)?(.*)"', done.stdout)
    assert [text.replace("builtins.", "") for text in shown] == REVEALED, done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.slow
def test_the_mark_is_in_the_wheel_and_in_the_source_distribution(tmp_path: Path) -> None:
    copied = copy_of_the_sources(tmp_path / "copy")
    build(copied, "build_py", "--build-lib", "wheel")
    build(copied, "sdist", "--formats=gztar", "--dist-dir", "dist")
    assert (copied / "wheel" / "specengine" / "py.typed").is_file()
    (archive,) = (copied / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as members:
        assert [name for name in members.getnames() if name.endswith("/specengine/py.typed")]


def test_the_mark_is_there_as_the_classifier_promises() -> None:
    assert (ROOT / "specengine" / "py.typed").read_bytes() == b""
    assert "Typing :: Typed" in (ROOT / "pyproject.toml").read_text()
    assert '"py.typed",' in (ROOT / "setup.py").read_text()
