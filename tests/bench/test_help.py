"""Tests that every parser of the measurements formats its help, subcommands included."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.build import command_line
from docs.build.command_line import commands
from specengine.cli.parser import Parser

ROOT = Path(command_line.__file__).parents[2]
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for folder in ("bench", "docs", "research")
    for file in (ROOT / folder).rglob("*.py")
    if "ArgumentParser(" in file.read_text() and '__name__ == "__main__"' in file.read_text()
)


class Parsing(Exception):
    """A parser that is about to parse."""


def parser_of(module: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Return what the module's `main` parses its command line with."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Parsing(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(Parsing) as found:
        importlib.import_module(module).main()
    parser: argparse.ArgumentParser = found.value.args[0]
    return parser


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                yield from below(own)


def test_the_measurements_are_found() -> None:
    known = {
        "bench.report",
        "bench.cpu.__main__",
        "docs.build.__main__",
        "research.replay",
        "research.ltd.__main__",
    }
    assert known <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_help_is_formatted(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for parser in below(parser_of(module, monkeypatch)):
        assert parser.format_help().startswith("usage:")


def test_a_percent_sign_in_a_help_is_seen() -> None:
    parser = argparse.ArgumentParser()
    parser.add_subparsers().add_parser("run").add_argument("--costs", help="70 % of it")
    with pytest.raises((TypeError, ValueError)):
        [one.format_help() for one in below(parser)]


# ---- what is drawn of a command line


def test_a_command_with_commands_below_it_keeps_its_own_options() -> None:
    parser = Parser(prog="tool", description="a tool")
    child = parser.add_subparsers().add_parser("one", description="a command")
    child.add_argument("--own")
    child.add_subparsers().add_parser("two", description="a command below")
    child.add_mode("--other", lambda mode: None, "a command in its place")
    assert [name for name, _ in commands(parser, "tool")] == [
        "tool one",
        "tool one --other",
        "tool one two",
    ]
