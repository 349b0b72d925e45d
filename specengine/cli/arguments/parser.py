"""A parser whose complaints are one line, and values that are checked while they are parsed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Options are spelled out, mistakes end in one line, and `--debug` stands before or behind the command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        self.set_defaults(loads=_nothing)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"specengine: error: {' '.join(message.split())} ({self.prog} --help shows what is accepted)\n")


def _nothing(arguments: argparse.Namespace) -> None:
    return None


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected key=value")
    return key, value


def part(text: str) -> tuple[int, int]:
    """I/N as (I - 1, N)."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected I/N with I from 1 to N")
    return int(index) - 1, int(count)


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """A name, which a preset may follow: NAME or NAME/PRESET."""

    def checked(text: str) -> str:
        name = text.partition("/")[0]
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown name {name!r}, known are {', '.join(known)}")
        return text

    return checked


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_options(parser: argparse.ArgumentParser, short: str, name: str) -> None:
    """A repeatable KEY=VALUE whose keys the end of the help lists."""
    parser.add_argument(
        short,
        f"--{name}",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="repeatable; listed below",
    )
