"""`specengine chat`: turns, commands, Ctrl-C and what stays in the conversation."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specengine
from specengine import cycle
from specengine.cli import chat, main, terminal
from specengine.cli.commands import make_parser
from specengine.errors import InputError
from specengine.models.native import NativeLM
from tests.cli.streams import Terminal, pipe_in


def turns(folder: str, *texts: str, **options: Any) -> list[str]:
    session = specengine.Engine.from_pretrained(folder, policy="plain").session()
    return [session.generate(text, **{"max_new_tokens": 12, **options}).text for text in texts]


CHAT = ["chat", "--max-new-tokens", "12", "--model"]


def test_chat_reads_a_turn_per_line(folder: str, capsys: Any, monkeypatch: Any) -> None:
    pipe_in(monkeypatch, "hello\n\nagain\n/reset\nhello\n/nonsense\n/help\n/quit\nnever read\n")
    assert main([*CHAT, folder]) == 0
    out, err = capsys.readouterr()
    first, second = turns(folder, "hello", "again")
    assert out == f"{first}\n{second}\n{first}\n"
    assert "starts over" in err
    assert "unknown command /nonsense" in err
    assert err.count("/quit or Ctrl-D ends") == 2


def test_a_message_may_begin_with_a_slash(folder: str, capsys: Any, monkeypatch: Any) -> None:
    pipe_in(monkeypatch, "//etc/hosts\n//\n")
    assert main([*CHAT, folder]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{answer}\n" for answer in turns(folder, "/etc/hosts", "/"))
    assert "unknown" not in err


def test_chat_passes_errors_on_when_piped(folder: str, capsys: Any, monkeypatch: Any) -> None:
    pipe_in(monkeypatch, "x" * 3000 + "\n")
    assert main([*CHAT, folder]) == 2
    assert "specengine: error: prompt" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _without_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "has_toolkit", lambda: False)
    monkeypatch.setattr(terminal, "cache_dir", lambda: tmp_path / "cache")


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    """A terminal where these lines are typed; exceptions are keys such as Ctrl-C and Ctrl-D."""
    waiting: Iterator[str | BaseException] = iter([*lines, EOFError()])

    def typed(prompt: str = "") -> str:
        line = next(waiting)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set max-new-tokens 3", "max_new_tokens 3"),
        (
            "/set max_new_tokens 0",
            "error: max_new_tokens: got 0, accepted a whole number, 1 or more",
        ),
        (
            "/set max_new_tokens many",
            "error: max_new_tokens: got 'many', accepted a value of type int",
        ),
        ("/set max_new_tokens", "max_new_tokens as by default"),
        ("/set coupled off", "coupled False"),
        ("/set coupled perhaps", "error: coupled: got 'perhaps', accepted True or False"),
        ("/set temprature 1", "error: set: unknown option 'temprature'; did you mean temperature?"),
        ("/set system Be short.", "system Be short."),
        ("/set", "max_new_tokens 12"),
        ("/set", "names: system, max_new_tokens, temperature"),
        ("/save", "error: save: name a file"),
        ("/load nowhere.json", "error: load: there is no file nowhere.json"),
        ("/stats", "Nothing was answered yet."),
        ("/stat", "unknown command /stat; did you mean /stats?"),
    ],
)
def test_commands(folder: str, capsys: Any, monkeypatch: Any, line: str, said: str) -> None:
    type_in(monkeypatch, line)
    assert main([*CHAT, folder]) == 0
    assert said in capsys.readouterr().err


def test_options_that_were_set_hold_for_later_answers(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    type_in(
        monkeypatch,
        "hello",
        "/set max_new_tokens 3",
        "/set stop no",
        "/set stop nor",
        "/reset",
        "hello",
    )
    assert main([*CHAT, folder]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(turns(folder, "hello")[0])
    assert turns(folder, "hello", max_new_tokens=3)[0] in out
    assert "stop ['no', 'nor']" in err


def test_a_system_message_is_changed_in_place(folder: str, monkeypatch: Any) -> None:
    engine = specengine.Engine.from_pretrained(folder)
    parsed = make_parser().parse_args(["chat", "--system", "one"])
    talk = chat.Chat(engine, parsed, None, interactive=False)
    talk.session.messages.append({"role": "user", "content": "hello"})
    talk._command("/set", "system two")
    assert [message["content"] for message in talk.session.messages] == ["two", "hello"]
    talk._command("/set", "system")
    assert [message["content"] for message in talk.session.messages] == ["hello"]


def test_statistics_have_plain_decoding_beside_them(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    type_in(monkeypatch, "hello", "/stats")
    assert main([*CHAT, folder]) == 0
    err = capsys.readouterr().err
    assert re.search(
        r"all answers +12 tokens, [\d.]+ per second after the first; plain decoding would make",
        err,
    )
    assert err.count("Speculation ") == 2, "and at the end of the conversation"
    assert err.splitlines()[-1].startswith("Speculation ")


def test_a_conversation_is_kept_and_goes_on(
    folder: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    type_in(monkeypatch, "hello", f"/save {file}")
    assert main([*CHAT, folder]) == 0
    assert f"2 messages are in {file}" in capsys.readouterr().err
    first, second = turns(folder, "hello", "again")
    assert [message["content"] for message in json.loads(file.read_text())["messages"]] == [
        "hello",
        first,
    ]
    type_in(monkeypatch, f"/load {file}", "again", f"/save {file}")
    assert main([*CHAT, folder]) == 0
    assert capsys.readouterr().out.splitlines()[0] == second
    assert len(json.loads(file.read_text())["messages"]) == 4


@pytest.mark.parametrize(
    "content", ["a letter", "[]", '{"messages": [1]}', '{"messages": [{"role": "user"}]}']
)
def test_other_files_are_left_alone(
    folder: str, capsys: Any, monkeypatch: Any, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(content)
    type_in(monkeypatch, "hello", f"/save {file}", f"/load {file}")
    assert main([*CHAT, folder]) == 0
    assert file.read_text() == content
    err = capsys.readouterr().err
    assert f"error: save: {file} is there and holds no conversation" in err
    assert f"error: load: {file} holds no conversation" in err


def test_several_lines_are_one_message(folder: str, capsys: Any, monkeypatch: Any) -> None:
    type_in(monkeypatch, '"""hello', "  there", 'again"""', '"""one"""')
    assert main([*CHAT, folder]) == 0
    first, second = turns(folder, "hello\n  there\nagain", "one")
    assert capsys.readouterr().out == f"{first}\n{second}\n\n"


def test_answers_are_drawn_as_markdown_where_asked(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    pytest.importorskip("rich")
    type_in(monkeypatch, "hello")
    assert main([*CHAT, folder, "--markdown"]) == 0
    drawn = capsys.readouterr().out
    assert "".join(drawn.split()) == "".join(turns(folder, "hello")[0].split())


def test_chat_in_a_terminal(folder: str, capsys: Any, monkeypatch: Any) -> None:
    type_in(monkeypatch, "hello", KeyboardInterrupt(), "x" * 3000, "again")
    assert main([*CHAT, folder]) == 0
    out, err = capsys.readouterr()
    first, second = turns(folder, "hello", "again")
    assert out == f"{first}\n{second}\n\n"
    assert "Ctrl-C stops" in err
    assert "specengine: error: prompt" in err  # and the conversation went on


@pytest.mark.parametrize(
    ("module", "name"), [(cycle, "walk"), (chat, "write")], ids=["in the engine", "in output"]
)
def test_ctrl_c_stops_the_answer_and_the_session_goes_on(
    folder: str, capsys: Any, monkeypatch: Any, module: Any, name: str
) -> None:
    real, calls = getattr(module, name), []

    def interrupted_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(module, name, interrupted_once)
    type_in(monkeypatch, "hello", "/reset", "hello")
    assert main([*CHAT, folder, "--policy", "plain"]) == 0
    out, err = capsys.readouterr()
    (whole,) = turns(folder, "hello")
    part, _, rest = out.partition("\n")
    assert whole.startswith(part)
    assert len(part) < len(whole)
    assert rest == f"{whole}\n\n"
    assert "(stopped, " in err


def test_a_stopped_answer_stays_in_the_conversation(
    folder: str, monkeypatch: Any, capsys: Any
) -> None:
    real, calls = chat.write, []

    def write(text: str) -> None:
        calls.append(text)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(text)

    monkeypatch.setattr(chat, "write", write)
    talk = of(folder)
    talk._answer("hello")
    assert [message["role"] for message in talk.session.messages] == ["user", "assistant"]
    assert talk.session.messages[1]["content"] == "".join(calls[:2])
    talk._answer("again")
    assert len(talk.session.messages) == 4


def of(folder: str, *words: str) -> chat.Chat:
    engine = specengine.Engine.from_pretrained(folder)
    parsed = make_parser().parse_args(["chat", "--max-new-tokens", "12", *words])
    return chat.Chat(engine, parsed, None, interactive=False)


def test_an_answer_that_was_cut_goes_on(folder: str, capsys: Any) -> None:
    talk = of(folder)
    talk._answer("hello")
    assert "(cut; continue with /more; 12 tokens, " in capsys.readouterr().err
    talk._command("/more")
    (whole,) = turns(folder, "hello", max_new_tokens=24)
    assert [message["content"] for message in talk.session.messages] == ["hello", whole]
    assert talk.cut, "and on"
    talk._command("/undo")
    with pytest.raises(InputError, match=r"more: the last answer was not cut"):
        talk._command("/more")


@pytest.mark.parametrize("command", ["/more", "/continue"])
@pytest.mark.parametrize("stop_at", [2, 5])
def test_a_stopped_answer_goes_on_where_it_was(
    folder: str, capsys: Any, monkeypatch: Any, command: str, stop_at: int
) -> None:
    real, calls = chat.write, []

    def write(text: str) -> None:
        calls.append(text)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        real(text)

    monkeypatch.setattr(chat, "write", write)
    talk = of(folder, "--policy", "plain")
    talk._answer("hello")
    assert "(stopped, continue with /more; " in capsys.readouterr().err
    begun = talk.session.messages[1]["content"]
    (whole,) = turns(folder, "hello", max_new_tokens=24)
    assert whole.startswith(begun)
    assert 0 < len(begun) < len(whole)
    talk._command("/set", "max_new_tokens 24")
    talk._command(command)
    assert talk.session.messages[1]["content"].startswith(whole)
    talk._answer("again")
    assert len(talk.session.messages) == 4


def test_an_answer_that_was_stopped_before_its_first_text_does_not_go_on(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    talk = of(folder)
    talk._answer("hello")
    cut = talk.cut
    with monkeypatch.context() as patched:
        patched.setattr(specengine.engine.TextGeneration, "_advance", interrupted)
        talk._command("/more")
        assert talk.cut == cut, "the cut answer still goes on"
        talk._answer("again")
    assert "(stopped, 0 tokens, " in capsys.readouterr().err
    assert len(talk.session.messages) == 2
    with pytest.raises(InputError, match=r"more: the last answer was not cut"):
        talk._command("/more")


def test_an_answer_without_a_limit_ends_where_it_repeats_itself(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(chat, "LOOP_TOKENS", 24)
    monkeypatch.setattr(chat, "MAX_PERIOD", 6)
    talk = of(folder, "--policy", "plain")
    assert not talk._loops([7] * 99), "a limit was asked for"
    talk.arguments.max_new_tokens = None
    assert talk._loops([1, 2, 3] * 8)
    assert not talk._loops([1, 2, 3] * 7), "too short"
    assert not talk._loops([*([1, 2, 3] * 8), 4])
    assert not talk._loops(list(range(24)))
    same = {"sequence_bias": [[[65], 90.0]]}
    monkeypatch.setattr(talk, "_options", lambda: {"max_new_tokens": 400, **same})
    talk._answer("hello")
    repeats = (
        r"\(stopped, as the last 24 tokens repeat themselves, continue with /more; \d\d tokens"
    )
    assert re.match(repeats, capsys.readouterr().err)
    first = talk.session.messages[1]["content"]
    talk._command("/more")
    more = talk.session.messages[1]["content"]
    (whole,) = turns(folder, "hello", max_new_tokens=400, **same)
    assert whole.startswith(more)
    assert len(first) < len(more) < len(whole)


def test_turns_are_answered_again_and_taken_back(folder: str, capsys: Any) -> None:
    talk = of(folder, "--system", "Be short.")
    talk._answer("hello")
    first = [dict(message) for message in talk.session.messages]
    talk._answer("again")
    talk._command("/undo")
    assert "taken back: 'again'" in capsys.readouterr().err
    assert talk.session.messages == first
    talk._command("/retry")
    assert talk.session.messages == first, "greedy"
    talk._command("/undo")
    assert [message["role"] for message in talk.session.messages] == ["system"]
    with pytest.raises(InputError, match=r"retry: there is no message yet"):
        talk._command("/retry")


def test_an_answer_is_cut_by_the_context_alone_unless_asked(folder: str) -> None:
    talk = of(folder)
    assert talk._options()["max_new_tokens"] == 12
    talk._command("/set", "max_new_tokens")
    assert talk._options()["max_new_tokens"] == 2048


@pytest.mark.parametrize("end", chat.ENDS)
def test_the_ends_of_a_conversation(folder: str, capsys: Any, monkeypatch: Any, end: str) -> None:
    type_in(monkeypatch, end, "never read")
    assert main([*CHAT, folder]) == 0
    assert capsys.readouterr().out == ""


def test_a_long_prompt_is_said_to_be_read(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    talk = of(folder)
    talk._answer("hello")
    assert "reading" not in capsys.readouterr().err
    talk._answer("x" * 300)
    assert re.search(r"reading 3\d\d tokens\r\x1b\[K\(", capsys.readouterr().err)
    talk._reset("")
    talk._answer("y" * 300)
    assert re.search(r"reading 3\d\d tokens", capsys.readouterr().err), "counted anew"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_terminal_shows_how_much_of_a_long_prompt_is_read(
    folder: str, capsys: Any, monkeypatch: Any, command: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(terminal, "UPDATE_SECONDS", 0.01)
    monkeypatch.setattr("specengine.models.native.lm.PREFILL_ROWS", 128)
    of(folder, "--policy", "plain")._answer("x")  # costs are measured, which runs the model too
    capsys.readouterr()
    real = NativeLM.run

    def slow(self: NativeLM, *batches: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return real(self, *batches, **options)

    monkeypatch.setattr(NativeLM, "run", slow)
    if command == "chat":
        of(folder, "--policy", "plain")._answer("x" * 300)
    else:
        words = ["generate", "x" * 300, "--model", folder, "--policy", "plain"]
        assert main([*words, "--max-new-tokens", "2"]) == 0
    err = capsys.readouterr().err
    shares = list(map(int, re.findall(r"reading 3\d\d tokens: (\d+)%", err)))
    assert shares == sorted(shares)
    assert {0, 100} < set(shares), "and some between"
    assert "tokens: 100%\r\x1b[K" in err, "the line is gone"


def test_lines_are_broken_between_words(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    talk = of(folder)
    talk._command("/exitt")
    talk._answer("hello")
    talk._stats("")
    lines = capsys.readouterr().err.split("\n")
    assert max(map(len, lines)) <= 40
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    talk._command("/exitt")
    whole = capsys.readouterr().err
    assert whole.count("\n") == 1
    assert " ".join(lines).startswith(" ".join(whole.split()))
