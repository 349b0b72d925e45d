"""specengine generate: answer one prompt."""

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from specengine.cli import given
from specengine.cli.terminal import DRAFTED, OWN, RESET, as_json, say, why_no_colours, write
from specengine.engine import Engine
from specengine.records import StreamPiece
from specengine.request.options import GenerationOptions
from specengine.request.text import Decoder, TextStream


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and (arguments.stream or arguments.show_draft):
        arguments.parser.error(
            "--json prints one object at the end; leave out --stream and --show-draft"
        )
    text = given.read_prompt(arguments.prompt)
    prompt = given.as_prompt(given.messages(arguments), text, raw=arguments.raw)
    prediction = given.read_option("prediction", arguments.prediction)
    constraint = {
        name: given.read_option(name, file)
        for name in ("json_schema", "grammar")
        if (file := getattr(arguments, name))
    }
    GenerationOptions.check(constraint)
    options = given.generation_options(arguments) | constraint
    engine = given.recipe(arguments).load()
    generation = engine.stream(prompt, prediction=prediction, **options)
    given.note_idle_options(arguments, generation)
    with given.open_trace(arguments, engine) as trace, given.follow(generation, trace) as pieces:
        if arguments.json:
            deque(pieces, maxlen=0)
        else:
            try:
                _print_answer(
                    pieces, view(engine, draft=arguments.show_draft), stream=arguments.stream
                )
            except KeyboardInterrupt:
                if arguments.stream:
                    write("\n")
                    say(f"(stopped)\n{generation.stats.report()}")
                raise
    if arguments.json:
        result = generation.run()
        print(
            as_json(
                {
                    "text": result.text,
                    "token_ids": result.token_ids,
                    "finish_reason": result.finish_reason,
                    "seed": result.seed,
                    "stats": result.stats.to_dict(),
                }
            )
        )
    else:
        say(generation.stats.report())
    return 0


Paint = Callable[[StreamPiece], str]


def view(engine: Engine, *, draft: bool) -> Paint:
    """Return how pieces are printed: with the draft's colours, after their legend, where they are asked for."""
    reason = why_no_colours()
    if draft and reason:
        say(f"specengine: note: --show-draft prints without colours, because {reason}")
    if reason or not draft:
        return attrgetter("text")
    say(DraftColours.LEGEND)
    return DraftColours(engine).paint


def _print_answer(pieces: Iterable[StreamPiece], paint: Paint, *, stream: bool) -> None:
    texts = []
    for piece in pieces:
        texts.append(paint(piece))
        if stream:
            write(texts.pop())
    write("".join(texts) + "\n")


class DraftColours:
    """Shows which text the draft proposed and the target accepted, and which the target added itself."""

    LEGEND = f"{DRAFTED}accepted draft tokens{RESET}, {OWN}the target's own tokens{RESET}"

    def __init__(self, engine: Engine) -> None:
        self._texts = TextStream(Decoder(engine.tokenizer))
        # characters, without and with those that the stream holds back
        self._pushed = self._length = 0
        self._spans: list[tuple[int, str]] = []  # characters still to come, and their colour

    def paint(self, piece: StreamPiece) -> str:
        """Return the piece's text with its colours. Without the colours the text is the same."""
        cycle = piece.cycle
        for index, token in enumerate(cycle.tokens):
            colour = DRAFTED if index < cycle.accepted else OWN
            before = self._length
            self._pushed += len(self._texts.push([token]))
            # which may become a character later
            waits = self._texts.rest.rstrip("\N{REPLACEMENT CHARACTER}")
            self._length = max(before, self._pushed + len(waits))
            self._spans.append((self._length - before, colour))
        return "".join(f"{colour}{text}{RESET}" for text, colour in self._split(piece.text) if text)

    def _split(self, text: str) -> Iterator[tuple[str, str]]:
        colour = OWN
        while self._spans and text:
            length, colour = self._spans.pop(0)
            if length > len(text):
                self._spans.insert(0, (length - len(text), colour))
            yield text[:length], colour
            text = text[length:]
        yield text, colour  # half a character that the end of the answer left over
