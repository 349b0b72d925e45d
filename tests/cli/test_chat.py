"""`specengine chat`: turns, commands, Ctrl-C and what stays in the conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

import specengine
from specengine import cycle
from specengine.cli import chat, main
from specengine.cli.commands import make_parser
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


def test_chat_in_a_terminal(folder: str, capsys: Any, monkeypatch: Any) -> None:
    type_in(monkeypatch, "hello", KeyboardInterrupt(), "x" * 3000, "again")
    assert main([*CHAT, folder]) == 0
    out, err = capsys.readouterr()
    first, second = turns(folder, "hello", "again")
    assert out == f"{first}\n{second}\n\n"
    assert "Ctrl-C stops" in err
    assert "specengine: error: prompt" in err  # and the conversation went on


@pytest.mark.parametrize(("module", "name"), [(cycle, "walk"), (chat, "write")], ids=["in the engine", "in output"])
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
    assert "(stopped)" in err


def test_a_stopped_answer_stays_in_the_conversation(folder: str, monkeypatch: Any, capsys: Any) -> None:
    made = specengine.Engine.from_pretrained(folder)
    session = made.session()
    real, calls = chat.write, []

    def write(text: str) -> None:
        calls.append(text)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(text)

    monkeypatch.setattr(chat, "write", write)
    parsed = make_parser().parse_args(["chat", "--max-new-tokens", "12"])
    chat._answer(session, "hello", parsed)
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    assert session.messages[1]["content"] == "".join(calls[:2])
    chat._answer(session, "again", parsed)
    assert len(session.messages) == 4
