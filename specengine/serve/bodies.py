"""Bodies of requests as JSON, parsed only where that takes a moment."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute

from specengine.serve.problems import Problem

FEW = 1 << 16  # bytes that are parsed without a look at them
MOST_PARTS = 100_000  # strings, lists and objects
MOST_VALUES = 1_000_000  # commas: of which most are between token ids
_PACKED = (b"\x1f\x8b", b"\x78\x9c", b"\x28\xb5\x2f\xfd")  # how gzip, zlib and zstd begin


def parsed(body: bytes, encoding: str = "") -> Any:
    """The value of a JSON text; Problem that says why it is none, or is not read.

    encoding: the header Content-Encoding
    """
    if encoding.strip().lower() not in ("", "identity"):
        raise Problem(415, f"content-encoding: got {encoding:.60}, accepted is a body that is not compressed")
    if len(body) > FEW:
        _require_few(body)
    try:
        return json.loads(body)
    except RecursionError as error:
        raise _no_json("it is nested too deep") from error
    except UnicodeDecodeError as error:
        packed = " it looks compressed" if body.startswith((b"\x1f\x8b", b"\x78\x9c", b"\x28\xb5\x2f\xfd")) else ""
        raise _no_json(
            f"byte {error.start} is no UTF-8;{packed}" if packed else f"byte {error.start} is no UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg}, at character {error.pos}") from error
    except ValueError as error:  # a number that Python does not take
        raise _no_json("a number has too many digits") from error


def _no_json(why: str) -> Problem:
    return Problem(400, f"the body is no JSON that is read here ({why})", code="invalid_json")


def _require_few(body: bytes) -> None:
    """Raise Problem for a text of so many parts that parsing it takes everybody's time."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings <= MOST_PARTS:
        outside = b"".join(plain.split(b'"')[::2])
        parts, values = strings + outside.count(b"[") + outside.count(b"{"), outside.count(b",")
    else:
        parts, values = strings, 0
    for count, most, name in ((parts, MOST_PARTS, "strings, lists and objects"), (values, MOST_VALUES, "values")):
        if count > most:
            raise Problem(400, f"the body has {count} {name}, accepted at most {most}", code="body_too_large")


class _ParsedRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parsed(await self.body(), self.headers.get("content-encoding", ""))
        return self._json


class BodyRoute(APIRoute):
    """A route whose body is parsed by `parsed`."""

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Any:
            return await handle(_ParsedRequest(request.scope, request.receive))

        return handled
