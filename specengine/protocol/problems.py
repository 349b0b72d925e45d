"""Errors of a request, in the shape of OpenAI's errors."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specengine.errors import ContextLengthError, InputError, SpecEngineError, shown
from specengine.request.declared import declarations

_UNAVAILABLE = {
    "loading": "the model is being loaded",
    "failed": "the model could not be loaded",
    "stopping": "the server is stopping",
}

_FIELD = re.compile(r"(\w+)(?=:)")
_KINDS = ("str", "int", "float", "bool", "NamedChoice")
_INNER = re.compile(r"([\w.\[\]]+): ")


class RequestError(Exception):
    """A request that is refused: HTTP status, message, the field at fault, OpenAI's code."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the body in the shape of the protocol that has this path."""
        if path.startswith("/v1/messages"):
            return anthropic_error(self)
        return {"error": str(self)} if path.startswith("/api/") else self.body


class PromptTooLongError(RequestError):
    """A prompt that the context does not hold, in each protocol's own words: agents shorten it where they read them."""

    def __init__(self, error: ContextLengthError, field: str) -> None:
        tokens = f"at least {error.tokens}" if error.at_least else f"{error.tokens}"
        message = (
            f"This model's maximum context length is {error.context} tokens. However, your {field} "
            f"resulted in {tokens} tokens, and an answer needs room. Please reduce the length of "
            f"the {field}."
        )
        super().__init__(400, message, field, "context_length_exceeded")
        self.error = error

    def body_for(self, path: str) -> dict[str, Any]:
        error = self.error
        if path.startswith("/v1/messages"):
            return anthropic_error(
                RequestError(
                    400, f"prompt is too long: {error.tokens} tokens > {error.maximum} maximum"
                )
            )
        if path.startswith("/api/"):
            above = f"prompt too long; exceeded max context length by {error.tokens - error.maximum} tokens"
            return {"error": f"the input length exceeds the context length: {above}"}
        if path.startswith("/v1/"):
            return self.body
        return {
            "error": {
                "code": 400,
                "message": f"request ({error.tokens} tokens) exceeds the available context size "
                f"({error.context} tokens), try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": error.tokens,
                "n_ctx": error.context,
            }
        }


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(problem: RequestError) -> dict[str, Any]:
    kind = _ANTHROPIC.get(
        problem.status, "api_error" if problem.status >= 500 else "invalid_request_error"
    )
    return {"type": "error", "error": {"type": kind, "message": str(problem)}}


def require_request(place: str, message: str, holds: bool, code: str | None = None) -> None:
    """Raise RequestError for the value at a place of the request unless `holds`."""
    if not holds:
        raise RequestError(400, f"{place}: {message}", place, code)


def unavailable(state: str, *why: object) -> RequestError:
    """Return the error for a worker in this state, in which it begins no answers."""
    message = ": ".join(map(str, [_UNAVAILABLE[state], *why]))
    return RequestError(503, message, code=state, headers={"Retry-After": "5"})


def of_error(error: Exception, names: Mapping[str, str] | None = None) -> RequestError:
    """Return the client's view of an error. Of an unexpected one it says only that it happened.

    names: of fields, by the engine's names, where this request calls them otherwise.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ContextLengthError):
        return PromptTooLongError(error, (names or {}).get("prompt", "prompt"))
    if isinstance(error, InputError):
        message = str(error)
        match = _FIELD.match(message)
        if match is None:
            return RequestError(400, message)
        declared = declarations().get(match[0])
        field = (names or {}).get(match[0], match[0] if declared is None else declared.field_name)
        return RequestError(400, field + message[match.end() :], field)
    if isinstance(error, SpecEngineError):
        return RequestError(500, str(error), code=type(error).__name__)
    return RequestError(
        500, f"the server failed over this request ({type(error).__name__}); its log says where"
    )


def of_validation(errors: Sequence[Mapping[str, Any]], accepted: Sequence[str]) -> RequestError:
    """Return the first of pydantic's errors; accepted: the fields of the request."""
    first = errors[0]
    place = _place(first["loc"], first["type"] == "extra_forbidden")
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        name = shown(place)[1:-1]
        choices = f", accepted {', '.join(accepted)}" if len(first["loc"]) <= 2 else ""
        return RequestError(
            400,
            f"{name}: unknown, or not supported by this server{choices}",
            name,
            "unsupported_field",
        )
    if first["type"] == "value_error" and not place:
        return RequestError(400, message, message.partition(":")[0])
    if not place:
        return RequestError(
            400, "the body must be a JSON object, sent as application/json", code="invalid_json"
        )
    inner = _INNER.match(message) if first["type"] == "value_error" else None
    if inner is not None:  # a check of a whole object names the field within it
        joined = "" if inner[1].startswith("[") else "."
        place, message = f"{place}{joined}{inner[1]}", message[inner.end() :]
    return RequestError(400, f"{place}: {message}", place)


def _place(parts: Sequence[Any], named: bool) -> str:
    """Return a place as in messages[2].content, without pydantic's kinds; named: the last part is a client's."""
    place = ""
    for index, part in enumerate(parts):
        is_last = named and index == len(parts) - 1
        if isinstance(part, int):
            place += f"[{part}]"
        elif part != "body" and (
            is_last or (part not in _KINDS and (part.isidentifier() or part.isdecimal()))
        ):
            place += f".{part}" if place else part
    return place
