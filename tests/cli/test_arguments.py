"""Tests that arguments are parsed without torch and transformers, by the same lists as the engine's."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from specengine import drafters, policies, registry
from specengine.cli import main, parser as shared
from specengine.cli.commands import COMMANDS, make_parser
from specengine.cli.train_arguments import as_typed
from specengine.errors import declared_in
from specengine.train.classifier.options import ClassifierOptions, CollectOptions
from specengine.train.draft.options import Loss, TrainOptions
from specengine.train.text import SynthesisOptions

OPTIONS = (SynthesisOptions, TrainOptions, Loss, CollectOptions, ClassifierOptions)
OF_COMMAND = {
    "data": (SynthesisOptions,),
    "draft": (TrainOptions, Loss),
    "classifier": (CollectOptions, ClassifierOptions),
}


# ---- no torch


def imported_by(*given: str) -> tuple[int, list[str]]:
    """Exit status, and which of the slow packages were imported, of a process of its own."""
    code = f"""
import json, sys
from specengine.cli import main
try:
    status = main({list(given)!r})
except SystemExit as stop:
    status = stop.code
slow = [name for name in ("torch", "transformers", "numpy", "specengine.engine") if name in sys.modules]
print("\\n" + json.dumps([status, slow]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, slow = json.loads(done.stdout.splitlines()[-1])
    return status, slow


@pytest.mark.sliced(8)
@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("--help", 0),
        ("--version", 0),
        ("", 2),
        ("nonsense", 2),
        ("generate --policy nonsense x", 2),
        ("generate --dtype int3 x", 2),
        *((f"{command} --help", 0) for command in COMMANDS),
        *((f"train {what} --help", 0) for what in OF_COMMAND),
    ],
)
def test_help_and_mistakes_import_nothing_slow(given: str, status: int) -> None:
    assert imported_by(*given.split()) == (status, [])


def test_a_trace_is_shown_without_torch(tmp_path: Path) -> None:
    tree = {"tokens": [1, 2], "texts": ["a", "b"], "parents": [-1, 0], "probabilities": [1.0, 0.5]}
    cycle = {
        "path_probabilities": [1.0, 0.5],
        "kept": [0, 1],
        "accepted": [0, 1],
        "committed": [2, 3],
        "passes": 1,
    }
    seconds = dict.fromkeys(("draft", "policy", "verify", "walk", "commit", "model", "total"), 0.0)
    records = [
        {"record": "trace", "format": 1, "model": "m", "draft": "d", "policy": "p", "versions": {}},
        {"record": "query", "prompt": "a", "prompt_tokens": [1], "seed": None},
        {
            "record": "cycle",
            **tree,
            **cycle,
            "committed_texts": ["b", "c"],
            "text": "bc",
            "seconds": seconds,
        },
        {"record": "end", "finish_reason": "length", "stats": {}},
    ]
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert imported_by("trace", str(file)) == (0, [])
    assert imported_by("trace", str(file), "--html", str(tmp_path / "page.html")) == (0, [])


@pytest.mark.parametrize(
    "words",
    [
        "batch p.jsonl --out =",
        "batch = --out o.jsonl",
        "check --out =",
        "bench --out =",
        "bench report =",
        "generate hi --trace =",
        "trace t.jsonl --html =",
        "serve --learn =",
        "train draft = --hours 1",
    ],
)
def test_an_empty_path_is_refused(words: str, capsys: Any) -> None:
    """As of a variable of the shell that is not set; it would mean the working folder."""
    with pytest.raises(SystemExit) as caught:
        main([word.removeprefix("=") for word in words.split()])
    assert caught.value.code == 2
    assert "got an empty name, accepted a path" in capsys.readouterr().err


# ---- lists that stand twice


def test_choices_are_those_of_the_engine() -> None:
    assert list(shared.POLICIES) == policies.names()
    assert registry.names("specengine.drafters") == drafters.names()


# ---- options of trainings


@pytest.mark.parametrize("of", OPTIONS)
def test_every_option_says_what_it_means(of: Any) -> None:
    assert is_dataclass(of)
    meanings = {name: declared.help or "" for name, declared in declared_in(of).items()}
    assert all(meanings.values())
    for field in fields(of):
        if field.type in ("int", "float", "tuple[int, ...]", "float | None"):
            rule = (
                r"\d or more|above 0|\d to (below )?\d|\d to batch_tokens|0 to expansions|0 or less"
            )
            assert re.search(rule, meanings[field.name]), (
                f"{field.name}: nothing is said of what is accepted"
            )


@pytest.mark.parametrize("command", OF_COMMAND)
def test_help_lists_options_with_their_values(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["train", command, "--help"])
    out = capsys.readouterr().out
    keys = re.findall(r"^  (\w+)=(\S*)  ", out, re.MULTILINE)
    expected = [
        field.name for of in OF_COMMAND[command] for field in fields(of) if field.name != "name"
    ]
    assert [key for key, _ in keys] == expected
    of_all = [
        key
        for group in re.split(r"\n\n(?=options of -l)", out)
        for key in re.findall(r"^  (\w+)=", group, re.M)
    ]
    assert command == "draft" or len(of_all) == len(set(of_all)), "one key, one meaning"
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("value", "typed"),
    [(True, "true"), (None, "none"), ((1, 2), "1,2"), (0.5, "0.5"), ("adam", "adam")],
)
def test_values_are_shown_as_they_are_typed(value: Any, typed: str) -> None:
    assert as_typed(value) == typed


# ---- help


def test_every_command_formats_its_help_and_says_what_each_argument_is() -> None:
    parsers = list(every_parser(make_parser()))
    assert len(parsers) > len(COMMANDS)
    for parser in parsers:
        assert parser.format_help().startswith("usage: specengine")
        assert parser.description
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), (
                f"{parser.prog}: {action.dest}"
            )


def every_parser(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    yield from getattr(parser, "modes", {}).values()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from every_parser(below)
