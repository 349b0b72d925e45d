"""The list of all commands and options, from the parsers."""

from __future__ import annotations

import argparse

from specengine.cli.commands import make_parser


def listing() -> str:
    """Return every command with its description and its groups of options."""
    return "\n\n".join(
        text
        for name, parser in commands(make_parser(), "specengine")
        for text in _command(name, parser)
    )


def commands(
    parser: argparse.ArgumentParser, name: str
) -> list[tuple[str, argparse.ArgumentParser]]:
    """Return the parser and its subparsers with their full names, without those that only hold subparsers."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    own_entry = [(name, parser)] if not below or any(map(_is_own, parser._actions)) else []
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


def _command(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """Return the paragraphs of a command. Raise ValueError if it has no description."""
    if not parser.description:
        raise ValueError(f"{name}: it has no description")
    lines = [f"### `{name}`", _sentence(parser.description)]
    skipped = (
        argparse._HelpAction | argparse._SubParsersAction
    )  # each subcommand has a heading of its own
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, skipped)]
        if actions:
            title = {"positional arguments": "arguments"}.get(
                group.title or "", group.title or "options"
            )
            lines += [
                f"*{title.capitalize()}*",
                "\n".join(_line(action, parser) for action in actions),
            ]
    return lines


def _line(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    formatter = parser._get_formatter()
    shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        shown += " " + formatter._format_args(
            action, formatter._get_default_metavar_for_optional(action)
        )
    text = (action.help or "") % {"default": action.default, "prog": parser.prog}
    return f"- `{shown}`" + (f": {_escaped(text)}" if text else "")


def _sentence(text: str) -> str:
    return _escaped(text[:1].upper() + text[1:]).rstrip(".") + "."


def _escaped(text: str) -> str:
    """Escape characters that markdown would read as HTML."""
    return text.replace("<", "&lt;")
