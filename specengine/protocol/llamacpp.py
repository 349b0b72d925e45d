"""llama.cpp's requests that OpenAI has no endpoint for: tokens of a text, its text, and answers between two texts."""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from specengine.protocol.completion import Completion, Piece
from specengine.protocol.messages import Body
from specengine.protocol.parts import text_of_parts
from specengine.protocol.replies import OneReply, sse
from specengine.protocol.requests import (
    CommonFields,
    CompletionRequest,
    Declared,
    Infill,
    base_of,
    declared_values,
)


class TokenizeBody(Body):
    """llama.cpp's `content`, or vLLM's `prompt`, whose special tokens at its ends are there by default."""

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = Field(
        None, description="false: the text of special tokens is plain text"
    )
    with_pieces: bool | None = Field(None, description="the text of each token too")
    return_token_strs: bool | None = Field(
        None, description="the text of each token too, as `token_strs`"
    )


class DetokenizeBody(Body):
    tokens: list[int]
    model: str | None = None


class OtherFile(Body, extra="ignore"):
    text: str
    filename: str = "tmp"


Unread: Any = base_of(
    "Unread",
    {
        "samplers": (list[str], "no effect"),
        "n_indent": (int, "no effect"),
        "n_keep": (int, "no effect"),
        "t_max_prompt_ms": (float, "no effect"),
    },
)


class CompletionBody(Declared, CommonFields, Unread):
    """POST /completion."""

    prompt: str | list[int] | None = None
    n_predict: int | None = Field(None, description="0: take the prompt into the cache")
    max_tokens: int | None = None
    t_max_predict_ms: float | None = None
    repeat_penalty: float | None = None
    response_fields: list[str] | None = None
    return_progress: bool | None = None


class InfillBody(CompletionBody):
    """POST /infill."""

    input_prefix: str
    input_suffix: str
    input_extra: list[OtherFile] | None = Field(None, max_length=256)
    prompt: str | None = Field(None, description="goes on with input_prefix")


NAMES = {
    "suffix": "input_suffix",
    "prompt": "input_prefix",
    "max_tokens": "n_predict",
    "max_new_tokens": "n_predict",
}


def completion_of(body: CompletionBody) -> CompletionRequest:
    """Return the request, that of an editor with the texts around its answer."""
    most = body.max_tokens if body.n_predict is None else body.n_predict
    prompt = (
        body.input_prefix + (body.prompt or "") if isinstance(body, InfillBody) else body.prompt
    )
    fields: dict[str, Any] = {
        "prompt": prompt,
        "model": body.model,
        "max_tokens": None if most is None or most < 0 else most,
        "t_max_predict_ms": body.t_max_predict_ms,
        "repetition_penalty": body.repeat_penalty,
        "stop": body.stop,
        "stream": body.stream,
        "return_progress": body.return_progress,
    }
    completion = CompletionRequest.model_validate(fields | declared_values(body))
    if not isinstance(body, InfillBody):
        return completion
    return completion.within(
        Infill(
            str(prompt),
            body.input_suffix,
            tuple((other.filename, other.text) for other in body.input_extra or ()),
        )
    )


class InfillReply(OneReply):
    """llama.cpp's answer: `content`, and `stop` with the last of it."""

    path = "/infill"

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        reply = self._said(text_of_parts(self.parts.of(answers[0])), answers[0])
        fields = self.body.response_fields
        return reply if not fields else {name: reply[name] for name in fields if name in reply}

    def piece(self, place: int, piece: Piece) -> Iterator[bytes]:
        text = text_of_parts(self.parts.push(piece.text, piece.answer.passed))
        if text:
            yield sse({"index": 0, "content": text, "tokens": piece.tokens, "stop": False})

    def progress(self, figures: dict[str, Any]) -> bytes:
        return sse({"index": 0, "content": "", "stop": False, "prompt_progress": figures})

    def end(self, place: int, answer: Completion) -> Iterator[bytes]:
        yield sse(self._said(text_of_parts(self.parts.end(answer.reason)), answer))

    def _said(self, text: str, answer: Completion) -> dict[str, Any]:
        usage, stopped = answer.usage, self.parts.stop.found
        return {
            "index": 0,
            "content": text,
            "tokens": answer.token_ids,
            "stop": True,
            "model": self.model,
            "stop_type": "limit"
            if answer.reason == "length"
            else "eos"
            if stopped is None
            else "word",
            "stopping_word": stopped or "",
            "tokens_cached": answer.cached_tokens,
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_predicted": usage["completion_tokens"],
            "truncated": False,
            "timings": answer.timings,
        }
