"""specengine chat: a conversation on the command line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from specengine.cli import given
from specengine.cli.commands import CHAT_COMMANDS
from specengine.cli.terminal import say, write
from specengine.engine import Engine, Session
from specengine.errors import InputError, SpecEngineError
from specengine.files import MARK
from specengine.trace import TraceWriter


def run(arguments: argparse.Namespace) -> int:
    interactive = sys.stdin.isatty()
    given.generation_options(arguments)  # which checks them before anything is loaded
    engine = given.load_engine(arguments)
    with given.open_trace(arguments, engine) as trace:
        _converse(engine, arguments, trace, interactive=interactive)
    return 0


def _converse(engine: Engine, arguments: argparse.Namespace, trace: TraceWriter | None, *, interactive: bool) -> None:
    session = engine.session(given.messages(arguments))
    if interactive:
        say(CHAT_COMMANDS)
    for line in _typed_lines() if interactive else _piped_lines():
        if line == "/quit":
            break
        if line == "/reset":
            session = engine.session(given.messages(arguments))
            say("The conversation starts over.")
        elif line == "/help":
            say(CHAT_COMMANDS)
        elif line.startswith("/") and not line.startswith("//"):
            say(f"unknown command {line.split()[0]}: {CHAT_COMMANDS}")
        elif line:
            try:
                _answer(session, line.removeprefix("/"), arguments, trace)
            except SpecEngineError as error:
                if not interactive:
                    raise
                say(f"specengine: error: {error}")


def _typed_lines() -> Iterator[str]:
    """Yield lines until Ctrl-D; Ctrl-C drops the line being typed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            say(f"\n{CHAT_COMMANDS}")


def _piped_lines() -> Iterator[str]:
    try:
        for number, line in enumerate(sys.stdin):
            yield (line if number else line.removeprefix(MARK)).strip()
    except UnicodeDecodeError as error:
        raise InputError(f"prompt: standard input is not UTF-8 ({error.reason}); write it as UTF-8") from error


def _answer(session: Session, text: str, arguments: argparse.Namespace, trace: TraceWriter | None = None) -> None:
    """Stream one answer. Ctrl-C stops it, and the text so far stays in the conversation."""
    turn = session.stream(text, **given.generation_options(arguments))
    if len(session.messages) <= 1:
        given.note_idle_options(arguments, turn)
    said: list[str] = []
    try:
        with given.follow(turn, trace) as pieces:
            for piece in pieces:
                said.append(piece.text)
                write(piece.text)
    except KeyboardInterrupt:
        turn.close()
        if turn.result is None and any(said):
            answer = {"role": "assistant", "content": "".join(said)}
            session.messages += [{"role": "user", "content": text}, answer]
        write("\n")
        say("(stopped)")
    else:
        write("\n")
    stats = turn.stats
    say(
        f"({stats.num_generated_tokens} tokens, {stats.tokens_per_second:.1f} per second, "
        f"acceptance length {stats.mean_acceptance_length:.2f})"
    )
