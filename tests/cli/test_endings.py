"""Ctrl-C at any moment, standard output that cannot be written, unusable caches, and dumb terminals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specengine.__main__ as process
from specengine import files
from specengine.cli import main, terminal
from specengine.errors import CacheFolderError
from tests.cli.streams import PROMPT, Terminal

ROOT = Path(__file__).parents[2]

INTERRUPTED = """
import importlib.abc, runpy, signal, sys

wanted = sys.argv.pop(1)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
runpy.run_module("specengine", run_name="__main__")
"""


def command(
    *words: str, unbuffered: bool = False, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"PYTHONUNBUFFERED": "1"} if unbuffered else {})
    return subprocess.run(
        [sys.executable, *words], env=environment, stderr=subprocess.PIPE, timeout=120, **options
    )


@pytest.mark.parametrize(
    "module", ["specengine.cli", "specengine.cli.parser", "specengine.cli.storage", "filelock"]
)
def test_ctrl_c_during_imports_is_no_traceback(module: str) -> None:
    done = command("-c", INTERRUPTED, module, "list", stdout=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("kind", ["cause", "context"])
def test_an_error_that_was_made_of_ctrl_c_is_ctrl_c(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken(arguments: Any) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("a module of C") from (error if kind == "cause" else None)

    monkeypatch.setattr("specengine.cli.storage.run_list", broken)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_in_a_callback_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr("signal.raise_signal", sent.append)
    monkeypatch.setattr("threading.Timer.start", lambda timer: timer.function(*timer.args))
    problem: Any = type("Problem", (), {"exc_type": KeyboardInterrupt})
    process._reported(problem)
    assert sent == [2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no full device")
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("words", ["--version", "batch --help", "list"])
def test_a_full_output_is_one_sentence(words: str, unbuffered: bool) -> None:
    with open("/dev/full", "wb") as full:
        done = command("-m", "specengine", *words.split(), unbuffered=unbuffered, stdout=full)
    said = b"specengine: error: standard output cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("words", ["--version", "batch --help", "list"])
def test_an_output_without_a_reader_is_quiet(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = command("-m", "specengine", *words.split(), stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


# ---- caches


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.fixture(params=["no home", "a file", "a loop"])
def unusable(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    place = tmp_path / "cache"
    if request.param == "no home":
        monkeypatch.delenv("SPECENGINE_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", _homeless)
    elif request.param == "a file":
        place.write_text("x")
    else:
        place.symlink_to(place)
    if request.param != "no home":
        monkeypatch.setenv("SPECENGINE_CACHE", str(place))
    return "HOME is not set" if request.param == "no home" else str(place)


def test_a_model_at_a_path_needs_no_cache(unusable: str, folder: str, capsys: Any) -> None:
    assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "2"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("specengine: note: nothing is kept from run to run: ")
    assert unusable in err
    assert "SPECENGINE_CACHE" in err


def test_the_default_model_says_what_it_needs(unusable: str, capsys: Any) -> None:
    assert main(["generate", PROMPT, "--offline"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert unusable in err
    assert "SPECENGINE_CACHE" in err


@pytest.mark.parametrize("words", [["list"], ["clean", "--yes"], ["doctor", "--inspect"]])
def test_what_looks_at_the_cache_expects_none(words: list[str], unusable: str, capsys: Any) -> None:
    assert main(words) in (0, 2)
    assert "--debug" not in capsys.readouterr().err


def test_a_cache_of_another_user_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    assert files.cache_problem() is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert files.cache_problem() == (
        f"the cache folder {tmp_path} cannot be used (Permission denied): set SPECENGINE_CACHE to another folder"
    )
    monkeypatch.setenv("SPECENGINE_CACHE", "~nobody-here/x")
    with pytest.raises(CacheFolderError, match="set SPECENGINE_CACHE"):
        files.cache_dir()


# ---- terminals


def test_lines_are_written_over_in_terminals_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert terminal.why_no_colours("stderr") is None
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.why_no_colours("stderr") is not None
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert terminal.why_no_colours("stderr") is not None
