"""`specengine` itself: errors on one line, exit statuses, the version."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specengine
from specengine import cycle
from specengine.cli import main
from tests.cli.streams import PROMPT


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--policy", "eagle", "-o", "wdth=3"],
            "unknown option 'wdth', known are width, expansions, budget",
        ),
        (["--policy", "eagle", "-o", "width=wide"], "expected int"),
        (["-o", "width=3"], "policy given by name"),
        (["--device", "abacus"], "device"),
        (["--temperature", "-1"], "temperature"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
    ],
)
def test_errors_are_one_line(folder: str, capsys: Any, given: list[str], message: str) -> None:
    assert main(["generate", PROMPT, "--model", folder, *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specengine: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_missing_model_is_one_line(capsys: Any) -> None:
    assert main(["generate", PROMPT, "--model", "/no/such/folder", "--offline"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["-o", "width"], "got 'width', expected key=value"),
        (["--max-new", "3"], "unrecognized arguments: --max-new"),
        (["--top-k", "many"], "argument --top-k: invalid int value"),
        (["--policy", "nonsense"], "argument --policy: unknown name 'nonsense', known are auto, "),
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3' (choose from "),
        (["--two\nlines"], "unrecognized arguments: --two lines"),
    ],
)
def test_malformed_arguments_are_one_line(capsys: Any, given: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", PROMPT, *given])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("specengine: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_text_that_is_no_unicode_is_one_line(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    for given, message in (
        (["-"], "standard input is not UTF-8"),
        (["caf\udce9"], "not Unicode text"),
    ):
        assert main(["generate", *given, "--model", folder, "--raw"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert message in err


def test_what_nobody_expected_is_one_line_and_a_traceback_on_demand(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("of another\nworld")

    monkeypatch.setattr(cycle, "walk", broken)
    assert main(["generate", PROMPT, "--model", folder]) == 70
    err = capsys.readouterr().err
    assert err.startswith("specengine: error: KeyError: ")
    assert err.count("\n") == 1
    assert "--debug" in err
    for given in (["--debug", "generate"], ["generate", "--debug"]):
        with pytest.raises(KeyError):
            main([*given, PROMPT, "--model", folder])


def test_options_are_checked_before_a_model_is_loaded(capsys: Any) -> None:
    for command in (["generate", PROMPT], ["chat"], ["check", PROMPT]):
        assert (
            main([*command, "--model", "/no/such/folder", "--offline", "--temperature", "-1"]) == 2
        )
        assert capsys.readouterr().err.startswith("specengine: error: temperature: got -1.0")


def test_who_waits_at_a_terminal_is_told_what_is_loading(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    given = ["generate", PROMPT, "--model", folder, "--draft", folder, "--max-new-tokens", "2"]
    assert main(given) == 0
    assert "Loading" not in capsys.readouterr().err, "a file or a pipe is told nothing"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "500")
    assert main(given) == 0
    assert capsys.readouterr().err.startswith(f"Loading {folder}, {folder}\n")
    assert main(["doctor", "--inspect", "--json"]) == 0
    assert "Loading" not in capsys.readouterr().err, "no model was named"


def test_ctrl_c_exits_with_130(folder: str, monkeypatch: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cycle, "walk", interrupted)
    assert main(["generate", PROMPT, "--model", folder]) == 130


def test_a_reader_that_has_gone_is_no_traceback(
    folder: str, monkeypatch: Any, tmp_path: Path
) -> None:
    class Gone(io.StringIO):
        def fileno(self) -> int:
            return file.fileno()

        def write(self, text: str) -> int:
            raise BrokenPipeError

    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", Gone())
        assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "2"]) == 1


@pytest.mark.parametrize("former", ["inspect", "calibrate", "demo", "learn"])
def test_names_of_commands_up_to_0_1_have_gone(former: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([former, "--help"])
    assert f"'{former}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        (["doctor", "--ops"], "--ops"),
        (["doctor", "--calibrate", "--ops"], "--ops"),
        (["bench", "--way", "auto", "--demo"], "--way auto"),
        (["bench", "--policy=plain"], "--policy=plain"),
    ],
)
def test_a_mode_has_arguments_of_its_own(words: list[str], unread: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"error: unrecognized arguments: {unread}" in capsys.readouterr().err


def test_version(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"specengine {specengine.__version__}\n"


def test_it_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["specengine", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("specengine", run_name="__main__")
    assert ended.value.code == 0
    assert specengine.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        (["train", "data"], "train.run_data"),
        (["train", "draft"], "train.run_draft"),
        (["train", "classifier", "--kind", "c2t", "--prompts", "p"], "train.run_classifier"),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
def test_who_stops_a_training_is_told_how_it_goes_on(
    given: list[str], runs: str, begun: bool, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def interrupted(arguments: Any) -> int:
        if begun:
            arguments.folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(f"specengine.cli.{runs}", interrupted)
    folder = tmp_path / "head"
    assert main([*given, str(folder)]) == 130
    told = capsys.readouterr().err
    if begun:
        assert (
            told
            == f"specengine: stopped; {folder} keeps what was done so far, and the same command goes on from there\n"
        )
    else:
        assert (
            told
            == f"specengine: stopped before anything was written to {folder}; the same command begins anew\n"
        )


def test_who_stops_a_measurement_is_told_only_where_it_is_kept(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def interrupted(arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("specengine.cli.bench.run", interrupted)
    (tmp_path / "run.jsonl").touch()
    assert main(["bench"]) == 130
    assert capsys.readouterr().err == ""
    assert main(["bench", "--out", str(tmp_path / "run.jsonl")]) == 130
    assert "run.jsonl keeps what was done so far" in capsys.readouterr().err


@pytest.mark.slow
def test_the_engine_imports_nothing_large_beside_transformers() -> None:
    """Whose models take four seconds of a processor; what comes with them here is to add little."""
    script = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel\n"
        "before = set(sys.modules); import specengine.cli.generate\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert set(done.stdout.split()) <= {"specengine", "transformers"}
