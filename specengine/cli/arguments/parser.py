"""A parser whose complaints are one line, and values that are checked while they are parsed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from specengine.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """Options are spelled out, mistakes end in one line, and `--debug` stands before or behind the command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        self.set_defaults(loads=_nothing)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, left = super().parse_known_args(args, namespace)
        if left:  # of this command: what stands behind it is its own
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            meant = next((text for word in left if (text := did_you_mean(word.partition("=")[0], flags))), "")
            self.error(f"unrecognized arguments: {' '.join(left)}{meant}")
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), [str(choice) for choice in action.choices or ()])
            raise

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


def one_of(known: Sequence[str], meanings: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A name, which a preset may follow: NAME or NAME/PRESET; with meanings, the one of a name alone."""

    def checked(text: str) -> str:
        name = text.partition("/")[0] if meanings is None else text
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"unknown name {name!r}, known are {', '.join(known)}{did_you_mean(name, known)}"
            )
        return text if meanings is None else meanings[name]

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
