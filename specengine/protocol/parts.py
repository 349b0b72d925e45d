"""The parts of an answer, whatever protocol it is told in: text, thoughts and calls of tools."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from specengine.protocol.completion import Completion
from specengine.protocol.requests import ChatRequest, Sampling
from specengine.protocol.thoughts import Thought, ThoughtReader
from specengine.protocol.tool_formats import Format, ToolCall
from specengine.protocol.tools import StopText, ToolReader, format_of, schemas_of

Part = str | Thought | ToolCall


class Parts:
    """Splits one growing answer into its parts; a stop string ends it, and is left out.

    stopped  the stop string that has ended it
    """

    def __init__(self, request: Sampling, tokenizer: Any) -> None:
        self._stop = StopText(request.stops)
        self._tokenizer = tokenizer
        self._tools = ToolReader(Format(), {})
        self._thoughts = ThoughtReader(isinstance(request, ChatRequest) and request.separate_reasoning is not False)
        if isinstance(request, ChatRequest) and (offered := request.template_tools):
            most = 1 if request.parallel_tool_calls is False else sys.maxsize
            self._tools = ToolReader(format_of(tokenizer), schemas_of(offered), most)

    def begin(self, prompt: Sequence[int]) -> None:
        """Take the prompt, before anything of the answer."""
        self._thoughts.begin(prompt, self._tokenizer)

    def push(self, text: str, passed: int = 0) -> list[Part]:
        """Return the parts of a piece; passed: characters of the answer in which no stop string counts."""
        return self._read(self._thoughts.push(self._stop.push(text, passed)))

    def end(self) -> list[Part]:
        """Return what was held back."""
        return self._read(self._thoughts.push(self._stop.end()) + self._thoughts.end()) + self._tools.end()

    def of(self, answer: Completion) -> list[Part]:
        """Return the parts of a whole answer, each kind of text in one."""
        self.begin(answer.prompt_ids)
        return joined(self.push(answer.text, answer.passed) + self.end())

    def reason(self, answer: Completion) -> str:
        """Return stop, length or tool_calls."""
        return "tool_calls" if self._tools.found and answer.reason == "stop" else str(answer.reason)

    @property
    def stopped(self) -> str | None:
        return self._stop.found

    def _read(self, texts: Sequence[str | Thought]) -> list[Part]:
        parts: list[Part] = []
        for text in texts:
            parts += [text] if isinstance(text, Thought) else self._tools.push(text)
        return parts


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with text joined to text before it, and thoughts to thoughts."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and isinstance(last, str):
            found[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + part.text)
        else:
            found.append(part)
    return found


def text_of_parts(parts: Sequence[Part]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def thoughts_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thought))


def calls_of(parts: Sequence[Part]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]
