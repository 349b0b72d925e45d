"""Outputs that cannot hold the text, outputs without a reader, and input files that begin with a mark."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specengine.cli import main, terminal
from specengine.errors import InputError
from specengine.files import read_text
from tests.cli.streams import PROMPT, expected, pipe_in
from tests.toy import tiny

MARK = b"\xef\xbb\xbf"
WORDS = ["a", "b", "é", "✓", "\N{GRINNING FACE}", "└"]


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens are letters that few encodings hold."""
    path = tmp_path_factory.mktemp("strange")
    core = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(WORDS)}, merges=[]))
    core.decoder = decoders.Fuse()
    template = "{{ messages[-1]['content'] }}"
    PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template).save_pretrained(path)
    tiny(seed=1, vocab_size=len(WORDS), max_position_embeddings=128).save_pretrained(path)
    return str(path)


def output(monkeypatch: pytest.MonkeyPatch, encoding: str) -> io.BytesIO:
    raw = io.BytesIO()
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    )
    return raw


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "utf-8"])
@pytest.mark.parametrize(
    "command",
    [["generate", "a"], ["generate", "a", "--stream"], ["generate", "a", "--show-draft"], ["chat"]],
    ids=" ".join,
)
def test_what_an_output_cannot_hold_is_replaced(
    encoding: str, command: list[str], strange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = output(monkeypatch, encoding)
    pipe_in(monkeypatch, "a\n")
    assert main([*command, "--model", strange, "--max-new-tokens", "12"]) == 0
    wanted = expected(strange, "a", raw=True, max_new_tokens=12)
    assert set(wanted) - set("ab")
    assert (
        raw.getvalue().decode(encoding)
        == wanted.encode(encoding, "replace").decode(encoding) + os.linesep
    )


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_json_is_whole_in_any_encoding(
    encoding: str, strange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = output(monkeypatch, encoding)
    assert (
        main(["generate", "a", "--raw", "--model", strange, "--max-new-tokens", "12", "--json"])
        == 0
    )
    assert json.loads(raw.getvalue().decode(encoding))["text"] == expected(
        strange, "a", raw=True, max_new_tokens=12
    )


@pytest.mark.parametrize("encoding", ["ascii", "cp437"])
def test_tables_trees_and_reports_fit_any_output(
    encoding: str, strange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--model", strange, "--max-new-tokens", "6", "--raw"]
    trace, report = str(tmp_path / "t.jsonl"), str(tmp_path / "r.json")
    for command in (
        ["generate", "a", "--trace", trace, *given],
        ["trace", trace],
        ["check", "é✓", "--policy", "eagle", "--draft", "ngram", "--out", report, "--json", *given],
        ["check", "é✓", "--policy", "eagle", "--draft", "ngram", *given],
        ["doctor", "--inspect", "--model", strange],
    ):
        raw = output(monkeypatch, encoding)
        assert main(command) == 0
        sys.stdout.flush()
        assert raw.getvalue().decode(encoding)
    assert json.loads(Path(report).read_text(encoding="utf-8"))["comparisons"]


def test_surrogates_in_a_text_are_written_too(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = output(monkeypatch, "utf-8")
    terminal.prepare()
    terminal.write("a\ud83d\n")
    print(terminal.as_json({"text": "\ud83d"}))
    assert raw.getvalue() == b'a?\n{"text": "\\ud83d"}\n'.replace(b"\n", os.linesep.encode())
    assert json.loads(terminal.as_json("é\udc00", "utf-8")) == "é\udc00"


def test_closed_streams_are_empty_ones(
    strange: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["generate", "a", "--raw", "--model", strange, "--max-new-tokens", "4"]) == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--model", strange]) == 2


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_reader_that_has_gone_ends_it_quietly(closed: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [
        sys.executable,
        "-c",
        "import sys; from specengine.cli import main; sys.exit(main(sys.argv[1:]))",
    ]
    read, write = os.pipe()
    os.close(read)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {
        closed: write
    }
    argument = "--help" if closed == "stdout" else "--nonsense"
    done = subprocess.run([*command, "generate", argument], env=environment, timeout=120, **streams)
    os.close(write)
    assert b"Traceback" not in (done.stderr or b"") + (done.stdout or b"")


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_an_error_that_nobody_reads_keeps_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    assert main(["check", "--prompts", str(tmp_path / "none.txt")]) == 2


# ---- marks


def test_texts_are_read_without_their_mark(tmp_path: Path) -> None:
    file = tmp_path / "text"
    for data, text in (
        (MARK + "é\r\nb\n".encode(), "é\nb\n"),
        (MARK, ""),
        (b"", ""),
        (b"a\rb", "a\nb"),
        (MARK + MARK + b"a", "\ufeffa"),
        ("a\u2028b".encode(), "a\u2028b"),
    ):
        file.write_bytes(data)
        assert read_text(file) == text
    for encoding in ("utf-16", "utf-16-be", "utf-32"):
        file.write_bytes(
            ("\ufeff" if encoding == "utf-16-be" else "").encode("utf-16-be")
            + "hi".encode(encoding)
        )
        with pytest.raises(ValueError, match=r"it is UTF-(16|32), save it as UTF-8"):
            read_text(file)
    file.write_bytes("é".encode("cp1252"))
    with pytest.raises(ValueError, match="it is not UTF-8: unexpected end of data at byte 0"):
        read_text(file)


@pytest.mark.parametrize("given", [["-"], []])
def test_a_mark_on_standard_input_is_none_of_the_prompt(
    given: list[str], folder: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, f"\ufeff{PROMPT}\n")
    assert main(["generate", *given, "--model", folder, "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == expected(folder, max_new_tokens=8)


def test_a_mark_in_front_of_a_conversation(
    folder: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, f"\ufeff{PROMPT}\n/quit\n")
    assert main(["chat", "--model", folder, "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == expected(folder, max_new_tokens=8)


def test_files_of_prompts_may_begin_with_a_mark(folder: str, tmp_path: Path, capsys: Any) -> None:
    lines, text, out = tmp_path / "p.jsonl", tmp_path / "p.txt", tmp_path / "o.jsonl"
    lines.write_bytes(MARK + b'{"prompt": "hi"}\r\n{"prompt": "yo"}\r\n')
    text.write_bytes(MARK + b"hi\r\nyo\r\n")
    given = ["--model", folder, "--max-new-tokens", "4"]
    assert main(["batch", str(lines), "--out", str(out), *given]) == 0
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == [
        expected(folder, prompt, max_new_tokens=4) for prompt in ("hi", "yo")
    ]
    for file in (lines, text):
        assert main(["check", "--prompts", str(file), "--policy", "plain", "--json", *given]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [row["prompt"] for row in report["comparisons"]] == ["hi", "yo"]
    text.write_bytes("hi".encode("utf-16"))
    assert main(["check", "--prompts", str(text), *given]) == 2
    assert "it is UTF-16, save it as UTF-8" in capsys.readouterr().err


def test_schemas_and_grammars_may_begin_with_a_mark(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    from specengine.request.options import GenerationOptions

    GenerationOptions.check({"json_schema": '\ufeff{"enum": [1]}'})
    GenerationOptions.check({"grammar": '\ufeffstart: "a"'})
    with pytest.raises(InputError, match="json_schema"):
        GenerationOptions.check({"json_schema": "\ufeff"})
