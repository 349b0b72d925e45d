"""`--show-draft`: colours that add up to the answer, or the reason why there are none."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from specengine.cli import generate, main, terminal
from specengine.records import StreamPiece
from tests.cli.streams import ANSI, PROMPT, expected


@pytest.mark.parametrize("stream", [[], ["--stream"]])
@pytest.mark.parametrize("stop", [[], ["--stop", "AA"]])
def test_show_draft_colours_add_up_to_the_answer(
    folder: str, capsys: Any, monkeypatch: Any, stream: list[str], stop: list[str]
) -> None:
    # auto drafts where measured costs are such that it pays
    options = ["--model", folder, "--max-new-tokens", "120", "--policy", "eagle", *stop]
    assert main(["generate", PROMPT, *options]) == 0
    plainly = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["generate", PROMPT, *options, "--show-draft", *stream]) == 0
    out, err = capsys.readouterr()
    assert ANSI.sub("", out) == plainly
    assert terminal.OWN in out
    assert terminal.DRAFTED in out or stop
    assert generate.DraftColours.LEGEND in err


class Letters:
    """Two bytes make an é; any other token is itself."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")


def test_draft_colours_by_token() -> None:
    e_acute = list("é".encode())
    view = generate.DraftColours(type("Holder", (), {"tokenizer": Letters()}))  # type: ignore[arg-type]
    pieces = [
        ("ab", [97, 98], 1),  # a drafted, b the target's own
        ("", e_acute[:1], 0),  # half a character is held back
        ("éc", [e_acute[1], 99], 2),
        ("d", [100, 101, 102], 3),  # cut after d
    ]
    drafted, own, reset = terminal.DRAFTED, terminal.OWN, terminal.RESET
    painted = [view.paint(_piece(*piece)) for piece in pieces]
    assert painted == [
        f"{drafted}a{reset}{own}b{reset}",
        "",
        f"{drafted}é{reset}{drafted}c{reset}",
        f"{drafted}d{reset}",
    ]


def _piece(text: str, tokens: list[int], accepted: int) -> Any:
    cycle = type("OneCycle", (), {"tokens": tokens, "accepted": accepted})
    return StreamPiece(text, cycle)  # type: ignore[arg-type]


def test_draft_colours_show_what_the_end_leaves_over() -> None:
    view = generate.DraftColours(type("Holder", (), {"tokenizer": Letters()}))  # type: ignore[arg-type]
    broken = "\N{REPLACEMENT CHARACTER}"
    assert ANSI.sub("", view.paint(_piece("a" + broken, [97, 0xC3], 0))) == "a" + broken


@pytest.mark.parametrize(
    ("variable", "value", "tty", "reason"),
    [
        ("NO_COLOR", "1", True, "NO_COLOR"),
        ("TERM", "dumb", True, "dumb"),
        ("TERM", "xterm", False, "not a terminal"),
    ],
)
def test_show_draft_says_why_there_are_no_colours(
    folder: str, capsys: Any, monkeypatch: Any, variable: str, value: str, tty: bool, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    assert (
        main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "20", "--show-draft"]) == 0
    )
    out, err = capsys.readouterr()
    assert out == expected(folder) + "\n"
    assert "--show-draft prints without colours" in err
    assert reason in err
