"""The list of all commands and options, from the parsers."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import NamedTuple

from specengine.cli.commands import make_parser
from specengine.cli.parser import Parser

SHARING = 3  # commands that have an option before it counts as common


class _Entry(NamedTuple):
    """An option or argument as a line of the listing, and the title of its group."""

    group: str
    shown: str
    line: str


def listing() -> str:
    """Return the options that several commands share, then every command with those that it has alone."""
    by_command = {
        name: (_described(name, parser), _entries(parser))
        for name, parser in commands(make_parser(), "specengine")
    }
    common = _common([entries for _, entries in by_command.values()])
    paragraphs = ["### Common options"]
    for title, entries in common.items():
        paragraphs += [f"#### {title}", "\n".join(entry.line for entry in entries)]
    for name, (description, entries) in by_command.items():
        paragraphs += [f"### `{name}`", description, *_groups(entries, common)]
        paragraphs += _taken(entries, common)
    return "\n\n".join(paragraphs)


def _common(commands: list[list[_Entry]]) -> dict[str, list[_Entry]]:
    """Return, by group, the entries that SHARING commands have word for word; of the group Options, those of all."""
    counts = Counter(entry.line for entries in commands for entry in entries)
    first = {entry.line: entry for entries in reversed(commands) for entry in entries}
    common: dict[str, list[_Entry]] = {}
    for entry in (first[entry.line] for entries in commands for entry in entries):
        everywhere = counts[entry.line] == len(commands)
        if everywhere or (counts[entry.line] >= SHARING and entry.group != "Options"):
            shared = common.setdefault("All commands" if everywhere else entry.group, [])
            if entry not in shared:
                shared.append(entry)
    return common


def _groups(entries: list[_Entry], common: dict[str, list[_Entry]]) -> list[str]:
    """Return the paragraphs of the entries that are not common, group by group."""
    lines = {entry.line for shared in common.values() for entry in shared}
    groups: dict[str, list[str]] = {}
    for entry in entries:
        if entry.line not in lines:
            groups.setdefault(entry.group, []).append(entry.line)
    return [text for title, below in groups.items() for text in (f"*{title}*", "\n".join(below))]


def _taken(entries: list[_Entry], common: dict[str, list[_Entry]]) -> list[str]:
    """Return a line that links to the common options a command takes, and names those of a group that it lacks."""
    lines = {entry.line for entry in entries}
    links = []
    for title, shared in common.items():
        taken = [entry for entry in shared if entry.line in lines]
        if not taken or title == "All commands":
            continue
        lacking = [entry for entry in shared if entry not in taken]
        word, named = ("without", lacking) if len(lacking) < len(taken) else ("only", taken)
        names = f" ({word} {', '.join(f'`{entry.shown}`' for entry in named)})" if lacking else ""
        links.append(f"[{title.lower()}](#{title.lower().replace(' ', '-')}){names}")
    return [f"Common options: {', '.join(links)}."] if links else []


def commands(parser: Parser, name: str) -> list[tuple[str, Parser]]:
    """Return the parser, its modes and its subparsers by name, without those that only hold subparsers."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    own_entry = [(name, parser)] if not below or any(map(_is_own, parser._actions)) else []
    own_entry += [(f"{name} {flag}", mode) for flag, mode in parser.modes.items()]
    return own_entry + [
        entry
        for action in below
        for word, own in action.choices.items()
        for entry in commands(own, f"{name} {word}")
    ]


def _is_own(action: argparse.Action) -> bool:
    """Return whether an argument is the command's own: not help, not a subcommand, not an option of all commands."""
    everywhere = {"help", "debug"}
    return not isinstance(action, argparse._SubParsersAction) and action.dest not in everywhere


def _described(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the description of a command as a sentence. Raise ValueError if it has none."""
    if not parser.description:
        raise ValueError(f"{name}: it has no description")
    return _sentence(parser.description)


def _entries(parser: Parser) -> list[_Entry]:
    """Return what a command takes, without help, and without subcommands and modes, which have a heading each."""
    skipped = argparse._HelpAction | argparse._SubParsersAction
    titles = {"positional arguments": "Arguments", None: "Options"}
    return [
        _entry(titles.get(group.title, str(group.title).capitalize()), action, parser)
        for group in parser._action_groups
        for action in group._group_actions
        if not isinstance(action, skipped) and parser.modes.keys().isdisjoint(action.option_strings)
    ]


def _entry(group: str, action: argparse.Action, parser: argparse.ArgumentParser) -> _Entry:
    formatter = parser._get_formatter()
    shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    full = shown
    if action.option_strings and action.nargs != 0:
        full += " " + formatter._format_args(
            action, formatter._get_default_metavar_for_optional(action)
        )
    text = (action.help or "") % {"default": action.default, "prog": parser.prog}
    return _Entry(group, shown, f"- `{full}`" + (f": {_escaped(text)}" if text else ""))


def _sentence(text: str) -> str:
    return _escaped(text[:1].upper() + text[1:]).rstrip(".") + "."


def _escaped(text: str) -> str:
    """Escape characters that markdown would read as HTML."""
    return text.replace("<", "&lt;")
