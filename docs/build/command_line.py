"""The command line's options as the parsers have them."""

from __future__ import annotations

import argparse

from specengine.cli.arguments import make_parser


def listing() -> str:
    """Every command in its order: usage, what it is for, a list per group of options."""
    return "\n\n".join(
        text for name, parser in commands(make_parser(), "specengine") for text in _command(name, parser)
    )


def commands(parser: argparse.ArgumentParser, name: str) -> list[tuple[str, argparse.ArgumentParser]]:
    """Return this parser and those below it by their whole names, without parsers that only lead to others."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    found = [(name, parser)] if not below or any(map(_is_own, parser._actions)) else []
    return found + [
        entry for action in below for word, own in action.choices.items() for entry in commands(own, f"{name} {word}")
    ]


def _is_own(action: argparse.Action) -> bool:
    """Return whether this is an argument of the command itself: no help, no command below, no option of every one."""
    everywhere = {"help", "debug"}
    return not isinstance(action, argparse._SubParsersAction) and action.dest not in everywhere


def _command(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """Return the paragraphs of a command; ValueError where nothing says what it is for."""
    if not parser.description:
        raise ValueError(f"{name}: it has no description")
    lines = [f"### `{name}`", _sentence(parser.description)]
    left_out = argparse._HelpAction | argparse._SubParsersAction  # each command has a heading of its own
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, left_out)]
        if actions:
            title = {"positional arguments": "arguments"}.get(group.title or "", group.title or "options")
            lines += [f"*{title.capitalize()}*", "\n".join(_line(action, parser) for action in actions)]
    return lines


def _line(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    formatter = parser._get_formatter()
    shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        shown += " " + formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    text = (action.help or "") % {"default": action.default, "prog": parser.prog}
    return f"- `{shown}`" + (f": {_escaped(text)}" if text else "")


def _sentence(text: str) -> str:
    return _escaped(text[:1].upper() + text[1:]).rstrip(".") + "."


def _escaped(text: str) -> str:
    """Without what markdown would take for HTML."""
    return text.replace("<", "&lt;")
