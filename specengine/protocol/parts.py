"""The parts of an answer in any protocol: text, calls of tools, and thoughts between `<think>` and `</think>`."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specengine.protocol.completion import Completion
from specengine.protocol.requests import ChatRequest, Sampling
from specengine.protocol.tools import (
    Every,
    Format,
    StopText,
    ToolCall,
    ToolReader,
    held_back,
    schemas_of,
)

THOUGHT_MARKS = OPENING, CLOSING = "<think>", "</think>"
_LAST = 8  # tokens of a prompt that are looked at


@dataclass(frozen=True)
class Thought:
    """Text that a model thinks."""

    text: str


class ThoughtReader:
    """Split a growing answer into thoughts, which stand before everything else, and text.

    Blanks at both ends of the thoughts, and those before the text after them, are left out.

    separates: whether there may be thoughts; else everything is text
    """

    def __init__(self, separates: bool = True) -> None:
        self._text = ""  # up to the text that follows the thoughts
        self._opened = False  # before the answer
        self._told = 0  # characters of the thoughts
        self._answers = not separates

    def begin(self, prompt: Sequence[int], tokenizer: Any) -> None:
        """Take the prompt, which may open the thoughts of the answer."""
        self._opened = tokenizer is not None and prompt_thinks(prompt, tokenizer)

    def push(self, text: str, ended: bool = False) -> list[str | Thought]:
        """Return what is certain of the answer with this text, all of it where it has ended."""
        if self._answers:
            return [text] if text else []
        self._text += text
        thoughts, answer = self._split(ended)
        new, self._told = Thought(thoughts[self._told :]), max(self._told, len(thoughts))
        self._answers = answer != ""
        return [part for part in (new, answer) if part not in ("", Thought(""))]

    def _split(self, ended: bool) -> tuple[str, str]:
        begun = self._text if self._opened else self._text.lstrip()
        if not (self._opened or begun.startswith(OPENING)):
            return "", "" if OPENING.startswith(begun) and not ended else self._text
        thoughts, closing, answer = begun[0 if self._opened else len(OPENING) :].partition(CLOSING)
        if not (closing or ended):
            thoughts = thoughts[: len(thoughts) - held_back(thoughts, [CLOSING])]
        return thoughts.strip(), answer.lstrip()


def prompt_thinks(prompt: Sequence[int], tokenizer: Any) -> bool:
    """Return whether a prompt ends where thoughts begin, as those of some chat templates do."""
    try:
        end = tokenizer.decode(list(prompt[-_LAST:]), skip_special_tokens=False)
    except Exception:  # somebody else's tokenizer
        return False
    return isinstance(end, str) and end.rstrip().endswith(OPENING)


def thought_tokens(tokens: Sequence[int], tokenizer: Any) -> int:
    """Return how many of an answer's tokens are thoughts, their closing mark included; 0 where no one token is it."""
    closing = getattr(tokenizer, "convert_tokens_to_ids", lambda name: None)(CLOSING)
    return tokens.index(closing) + 1 if isinstance(closing, int) and closing in tokens else 0


Part = str | Thought | ToolCall


class AnswerParts:
    """Splits one growing answer into its parts; a stop string ends it, and is left out.

    stop  whose `found` is the stop string that has ended it
    """

    def __init__(self, request: Sampling, tokenizer: Any) -> None:
        self.stop = StopText(request.stops)
        self._tokenizer = tokenizer
        self._tools = ToolReader(Format(), {})
        self._thoughts = ThoughtReader(
            isinstance(request, ChatRequest) and request.separate_reasoning is not False
        )
        if isinstance(request, ChatRequest) and (offered := request.template_tools):
            most = 1 if request.parallel_tool_calls is False else sys.maxsize
            self._tools = ToolReader(
                Every(), schemas_of(offered), most, forced=request.tool_choice not in (None, "auto")
            )

    def begin(self, prompt: Sequence[int]) -> None:
        """Take the prompt, before anything of the answer."""
        self._thoughts.begin(prompt, self._tokenizer)

    def push(self, text: str, passed: int = 0) -> list[Part]:
        """Return the parts of a piece; passed: characters of the answer in which no stop string counts."""
        return self._read(self._thoughts.push(self.stop.push(text, passed)))

    def end(self, reason: str | None = "stop") -> list[Part]:
        """Return what was held back of an answer that ended for this reason (stop or length)."""
        return self._read(self._thoughts.push(self.stop.end(), ended=True)) + self._tools.end(
            reason
        )

    def of(self, answer: Completion) -> list[Part]:
        """Return the parts of a whole answer, each kind of text in one."""
        self.begin(answer.prompt_ids)
        return list(joined(self.push(answer.text, answer.passed) + self.end(answer.reason)))

    def reason(self, answer: Completion) -> str:
        """Return stop, length or tool_calls."""
        return "tool_calls" if self._tools.found and answer.reason == "stop" else str(answer.reason)

    def _read(self, texts: Sequence[str | Thought]) -> list[Part]:
        parts: list[Part] = []
        for text in texts:
            parts += [text] if isinstance(text, Thought) else self._tools.push(text)
        return parts


def joined(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield the parts with text joined to text before it, and thoughts to thoughts."""
    for kind, group in itertools.groupby(parts, type):
        same = list(group)
        if kind is ToolCall:
            yield from same
        else:
            yield Thought(thoughts_of(same)) if kind is Thought else text_of_parts(same)


def text_of_parts(parts: Sequence[Part]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def thoughts_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thought))


def calls_of(parts: Sequence[Part]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]
