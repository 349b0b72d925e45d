"""specengine chat: a conversation on the command line."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specengine.cli import given, learn
from specengine.cli.commands import CHAT_COMMANDS
from specengine.cli.terminal import Markdown, has_toolkit, say, typed, write
from specengine.cli.verdict import Seen, break_even, known_costs, verdict
from specengine.engine import Engine, TextGeneration
from specengine.errors import (
    Declaration,
    InputError,
    SpecEngineError,
    did_you_mean,
    install_command,
    require_input,
    shown,
)
from specengine.files import MARK, atomic, read_object, writing
from specengine.records import Stats
from specengine.request.declared import flags
from specengine.request.text import Decoder
from specengine.trace import TraceWriter

ENDS = ["/quit", "/exit", "/bye", "/q"]
# of an answer that loops: the tokens that repeat, and the longest period
LOOP_TOKENS, MAX_PERIOD = 256, 64
TRUTHS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def run(arguments: argparse.Namespace) -> int:
    given.generation_options(arguments)  # which checks them before anything is loaded
    recipe = given.recipe(arguments)
    engine = recipe.load()
    with (
        learn.beside(recipe, lambda: not engine.is_busy),
        given.open_trace(arguments, engine) as trace,
    ):
        Chat(engine, arguments, trace, interactive=sys.stdin.isatty()).run()
    return 0


class Chat:
    """A conversation, and the commands that change it."""

    def __init__(
        self,
        engine: Engine,
        arguments: argparse.Namespace,
        trace: TraceWriter | None,
        *,
        interactive: bool,
    ) -> None:
        self.engine, self.arguments, self.trace, self.interactive = (
            engine,
            arguments,
            trace,
            interactive,
        )
        self.markdown = Markdown.where_wanted(arguments.markdown, interactive=interactive)
        self.answers: list[Stats] = []
        self._begin(given.messages(arguments))
        self.commands = {
            "/help": self._help,
            "/reset": self._reset,
            "/set": self._set,
            "/stats": self._stats,
            "/more": self._more,
            "/continue": self._more,
            "/retry": lambda rest: self._answer(self._last("retry")),
            "/undo": lambda rest: say(f"taken back: {shown(self._last('undo'))}"),
            "/save": self._save,
            "/load": self._load,
        }

    def _begin(self, messages: list[dict[str, str]]) -> None:
        self.session = self.engine.session(messages)
        self.cut: list[int] = []  # prompt and answer, where the last one can go on
        self.read = 0  # tokens of the last prompt and its answer

    def run(self) -> None:
        if self.interactive:
            self._help("")
            if not has_toolkit():
                say(
                    f"Each pasted line is a message here; for one of many: {install_command('chat')}"
                )
        for line in typed(lambda: self._help("")) if self.interactive else _piped_lines():
            if line in ENDS:
                break
            try:
                if line.startswith("/") and not line.startswith("//"):
                    self._command(*line.split(maxsplit=1))
                elif line:
                    self._answer(line.removeprefix("/"))
            except SpecEngineError as error:
                if not self.interactive:
                    raise
                say(f"specengine: error: {error}")
        if self.interactive and self.answers:
            say(self._verdict())

    def _command(self, name: str, rest: str = "") -> None:
        if name in self.commands:
            self.commands[name](rest.strip())
        else:
            accepted = [*self.commands, *ENDS]
            say(f"unknown command {name}{did_you_mean(name, accepted)}: {CHAT_COMMANDS}")

    # ---- answers

    def _options(self) -> dict[str, Any]:
        """Return the options of the next answer, by default as long as the context lets it be."""
        return {"max_new_tokens": self.engine.target.max_context} | given.generation_options(
            self.arguments
        )

    def _answer(self, text: str) -> None:
        """Answer a message. Ctrl-C stops the answer, and the text so far stays in the conversation."""
        self.cut = []
        turn = self.session.stream(text, **self._options())
        if len(self.session.messages) <= 1:
            given.note_idle_options(self.arguments, turn)
        shown_text = self._show(turn)
        if turn.result is None and shown_text:
            self.session.messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": shown_text},
            ]

    def _show(self, turn: TextGeneration) -> str:
        """Show an answer as it comes, then its figures. Return its text."""
        texts: list[str] = []
        show, end = (
            (write, lambda: write("\n"))
            if self.markdown is None
            else (self.markdown.write, self.markdown.end)
        )
        tokens: list[int] = []
        stats, state = turn.stats, ""
        try:
            with given.follow(turn, self.trace, self.read) as pieces:
                for piece in pieces:
                    tokens += piece.cycle.tokens
                    texts.append(piece.text)
                    show(piece.text)
                    if turn.result is None and self._loops(tokens):
                        state = f"stopped, as the last {LOOP_TOKENS} tokens repeat themselves, "
                        break
        except KeyboardInterrupt:
            turn.close()
            state = "stopped, "
        finally:
            end()
        text = "".join(texts)
        if turn.result is not None and turn.result.finish_reason == "length":
            state = "cut; "
        elif state:
            tokens = self._tokens_of(text, tokens)
        goes_on = tokens or (
            self.cut and not text
        )  # a cut answer may have been stopped before more
        self.cut = [*turn.prompt, *tokens] if state and goes_on else []
        state += "continue with /more; " * bool(self.cut)
        self.read = len(turn.prompt) + stats.num_generated_tokens
        self.answers.append(stats)
        say(
            f"({state}{stats.num_generated_tokens} tokens, {stats.tokens_per_second:.1f} per second, "
            f"acceptance length {stats.mean_acceptance_length:.2f})"
        )
        return text

    def _loops(self, tokens: list[int]) -> bool:
        """Return whether an answer without a limit repeats its last tokens again and again."""
        last = tokens[-LOOP_TOKENS:]
        return (
            self.arguments.max_new_tokens is None
            and len(last) == LOOP_TOKENS
            and any(
                last[-1] == last[-1 - period] and last[period:] == last[:-period]
                for period in range(1, MAX_PERIOD + 1)
            )
        )

    def _tokens_of(self, text: str, tokens: list[int]) -> list[int]:
        """Return the first of these tokens that make up a text; none of no text, or where it ends within one."""
        decode = Decoder(self.engine.tokenizer)
        counts = range(len(tokens), 0, -1) if text else ()
        return next((tokens[:count] for count in counts if decode(tokens[:count]) == text), [])

    # ---- commands

    def _help(self, rest: str) -> None:
        say(CHAT_COMMANDS)

    def _more(self, rest: str) -> None:
        require_input("more: the last answer was not cut", bool(self.cut))
        self.session.messages[-1]["content"] += self._show(
            TextGeneration(self.engine, self.cut, self._options(), reuse_cache=True)
        )

    def _last(self, command: str) -> str:
        """Take the last message of the user and what follows out of the conversation. Return its text."""
        messages = self.session.messages
        places = [place for place, each in enumerate(messages) if each["role"] == "user"]
        require_input(f"{command}: there is no message yet", bool(places))
        text = messages[places[-1]]["content"]
        del messages[places[-1] :]
        self.cut = []
        return text

    def _reset(self, rest: str) -> None:
        self._begin(given.messages(self.arguments))
        say("The conversation starts over.")

    def _set(self, rest: str) -> None:
        """List the options; set one; or, without a value, leave it to its default."""
        options = {each.dest: each for each in flags().values()}
        if not rest:
            for dest, declared in options.items():
                value = getattr(self.arguments, dest)
                if value is not None and value != declared.default:
                    say(f"  {dest} {value}")
            say(f"/set NAME VALUE, /set NAME for its default; names: system, {', '.join(options)}")
            return
        name, _, text = rest.partition(" ")
        dest, text = name.lstrip("-").replace("-", "_"), text.strip()
        if dest == "system":
            self._set_system(text)
            return
        require_input(
            f"set: unknown option {name!r}{did_you_mean(dest, options)}; known are {', '.join(options)}",
            dest in options,
        )
        before = getattr(self.arguments, dest)
        setattr(self.arguments, dest, _value(options[dest], text, before))
        try:
            given.generation_options(self.arguments)
        except SpecEngineError:
            setattr(self.arguments, dest, before)
            raise
        say(f"  {dest} {getattr(self.arguments, dest) if text else 'as by default'}")

    def _set_system(self, text: str) -> None:
        self.arguments.system = text or None
        self.session.messages[:] = [
            *given.messages(self.arguments),
            *(message for message in self.session.messages if message["role"] != "system"),
        ]
        say(f"  system {text or 'none'}")

    def _stats(self, rest: str) -> None:
        if not self.answers:
            say("Nothing was answered yet.")
            return
        say(self.answers[-1].report())
        say(f"all answers        {self._rates()}")
        say(self._verdict())

    def _rates(self) -> str:
        """Return the tokens of all answers, their rate, and what plain decoding's would be by measured costs."""
        tokens = sum(stats.num_generated_tokens for stats in self.answers)
        later = tokens - sum(stats.num_generated_tokens > 0 for stats in self.answers)
        seconds = sum(stats.elapsed_s - stats.ttft_s for stats in self.answers)
        if later <= 0 or seconds <= 0:
            return f"{tokens} tokens"
        averages, costs = Seen.of(self.answers), known_costs(self.engine)
        plain = ""
        if averages is not None and costs is not None:
            slower = break_even(costs, averages.nodes, averages.passes) / averages.tokens
            plain = f"; plain decoding would make about {slower * later / seconds:.1f}, by measured costs"
        return f"{tokens} tokens, {later / seconds:.1f} per second after the first{plain}"

    def _verdict(self) -> str:
        return verdict(
            self.engine.target.device.type,
            known_costs(self.engine),
            Seen.of(self.answers) if self.engine.drafter is not None else None,
        )

    def _save(self, rest: str) -> None:
        file = _file("save", rest)
        require_input(
            f"save: {file} is there and holds no conversation; name another file",
            not file.exists() or _messages(file) is not None,
        )
        with writing(file, "save"), atomic(file) as temporary:
            temporary.write_text(
                json.dumps({"messages": self.session.messages}, ensure_ascii=False) + "\n",
                encoding="utf-8",
            )
        say(f"{len(self.session.messages)} messages are in {file}")

    def _load(self, rest: str) -> None:
        file = _file("load", rest)
        require_input(f"load: there is no file {file}", file.is_file())
        messages = _messages(file)
        if messages is None:
            raise InputError(f"load: {file} holds no conversation that /save wrote")
        self._begin(messages)
        say(f"The conversation of {file} goes on after {len(messages)} messages.")


def _value(declared: Declaration, text: str, before: Any) -> Any:
    """Return the value that a text stands for; repeatable ones are added to those before. The default without one."""
    kind = declared.kind
    if not text:
        return declared.default if kind is bool else None
    if kind is bool:
        return TRUTHS.get(text.lower(), text)
    try:
        value = kind(text)
    except ValueError as error:
        raise InputError(
            f"{declared.name}: got {text!r}, accepted a value of type {kind.__name__}"
        ) from error
    return [*(before or []), value] if declared.repeats else value


def _file(command: str, rest: str) -> Path:
    require_input(f"{command}: name a file, as /{command} talk.json", bool(rest))
    return Path(rest).expanduser()


def _messages(file: Path) -> list[dict[str, str]] | None:
    """Return the messages of a saved conversation; None where the file is none."""
    try:
        messages = read_object(file)["messages"]
        fits = all(
            isinstance(message[name], str) for message in messages for name in ("role", "content")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return list(messages) if fits and isinstance(messages, list) else None


def _piped_lines() -> Iterator[str]:
    try:
        for number, line in enumerate(sys.stdin):
            yield (line if number else line.removeprefix(MARK)).strip()
    except UnicodeDecodeError as error:
        raise InputError(
            f"prompt: standard input is not UTF-8 ({error.reason}); write it as UTF-8"
        ) from error
