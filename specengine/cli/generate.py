"""specengine generate: answer one prompt."""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from specengine.cli import arguments as shared
from specengine.cli.terminal import DraftColours, PlainText, say, why_no_colours, write
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.generation.outputs import GenerationResult, StreamPiece

HELP = "answer one prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads standard input, without its last line break"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--raw", action="store_true", help="take the prompt as it is, without the chat template")
    output.add_argument("--stream", action="store_true", help="print the answer piece by piece")
    output.add_argument("--show-draft", action="store_true", help="colour what the draft proposed, in a terminal")
    output.add_argument("--json", action="store_true", help="print one JSON object: answer, token ids and figures")
    parser.add_argument(
        "--prediction",
        type=Path,
        metavar="FILE",
        help="a text that much of the answer is expected to be, as a file that is to be changed a little; it makes the "
        "answer faster, never another one",
    )
    shared.add_trace_argument(output)
    shared.add_model_arguments(parser)
    shared.add_draft_arguments(parser)
    shared.add_generation_arguments(parser)
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and (arguments.stream or arguments.show_draft):
        arguments.parser.error("--json prints one object at the end; leave out --stream and --show-draft")
    text = shared.read_prompt(arguments.prompt)
    prompt = shared.as_prompt(shared.messages(arguments), text, raw=arguments.raw)
    prediction = _read(arguments.prediction)
    engine = shared.load_engine(arguments)
    generation = engine.stream(prompt, prediction=prediction, **shared.generation_options(arguments))
    shared.note_idle_options(arguments, generation)
    with shared.open_trace(arguments, engine) as trace, shared.follow(generation, trace) as pieces:
        if arguments.json:
            deque(pieces, maxlen=0)
        else:
            _print_answer(pieces, _view(arguments, engine), stream=arguments.stream)
    if arguments.json:
        print(json.dumps(_as_json(generation.run()), ensure_ascii=False, allow_nan=False))
    else:
        say(generation.stats.report())
    return 0


def _read(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prediction: {file} cannot be read ({error})") from error


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
