"""specengine generate: answer one prompt."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from specengine.cli import given
from specengine.cli.colours import DraftColours, PlainText
from specengine.cli.terminal import as_json, say, why_no_colours, write
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.files import read_text
from specengine.records import GenerationResult, StreamPiece
from specengine.request.options import GenerationOptions


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and (arguments.stream or arguments.show_draft):
        arguments.parser.error("--json prints one object at the end; leave out --stream and --show-draft")
    text = given.read_prompt(arguments.prompt)
    prompt = given.as_prompt(given.messages(arguments), text, raw=arguments.raw)
    prediction = _read("prediction", arguments.prediction)
    asked = {name: _read(name, getattr(arguments, name)) for name in ("json_schema", "grammar")}
    constraint = {name: text for name, text in asked.items() if text is not None}
    GenerationOptions.check(constraint)
    options = given.generation_options(arguments) | constraint
    engine = given.load_engine(arguments)
    generation = engine.stream(prompt, prediction=prediction, **options)
    given.note_idle_options(arguments, generation)
    with given.open_trace(arguments, engine) as trace, given.follow(generation, trace) as pieces:
        if arguments.json:
            deque(pieces, maxlen=0)
        else:
            try:
                _print_answer(pieces, _view(arguments, engine), stream=arguments.stream)
            except KeyboardInterrupt:
                if arguments.stream:
                    write("\n")
                    say(f"(stopped)\n{generation.stats.report()}")
                raise
    if arguments.json:
        print(as_json(_as_json(generation.run())))
    else:
        say(generation.stats.report())
    return 0


def _read(field: str, file: Path | None) -> str | None:
    try:
        return None if file is None else read_text(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{field}: {file} cannot be read ({error})") from error


def _as_json(result: GenerationResult) -> dict[str, object]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "stats": result.stats.to_dict(),
    }


def _view(arguments: argparse.Namespace, engine: Engine) -> PlainText | DraftColours:
    if not arguments.show_draft:
        return PlainText()
    reason = why_no_colours()
    if reason:
        say(f"specengine: note: --show-draft prints without colours, because {reason}")
        return PlainText()
    say(DraftColours.LEGEND)
    return DraftColours(engine)


def _print_answer(pieces: Iterable[StreamPiece], view: PlainText | DraftColours, *, stream: bool) -> None:
    texts = []
    for piece in pieces:
        texts.append(view.paint(piece))
        if stream:
            write(texts.pop())
    write("".join(texts) + "\n")
