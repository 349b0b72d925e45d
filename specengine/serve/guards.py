"""Checks before every request: host names, keys, the size of a body, and the number of parts of its JSON."""

import hmac
import json
import re
from collections.abc import Collection
from typing import Any
from urllib.parse import quote

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specengine.errors import shown
from specengine.protocol.problems import RequestError
from specengine.protocol.settings import Settings, is_loopback
from specengine.serve.answering import json_response

HEALTH = ("/health", "/ready", "/healthz", "/v1/health")
ALIVE = ("/live", "/version")
METRICS = "/metrics"
JSON = "application/json"
_ADDRESS = re.compile(r"\Ahttps?://[^/]*", re.IGNORECASE)
_SLASHES = re.compile("/{2,}")
# as clients of llama.cpp's server write them
_WITHOUT_VERSION = "/chat/completions", "/responses", "/models"


class Guard:
    """Refuses requests before they are read whole, and counts refusals by status in `failed`.

    Host names: those that name the server otherwise than it is called, as a page of elsewhere does whose name was
    pointed here; addresses of this machine alone are names too.
    Keys: requests without one of them, compared in a time that does not depend on them; `without_key`: paths that
    need none, as they tell nothing that is not in the package.
    Origins: bodies that any page of elsewhere can make a browser send, which asks nobody before: those not declared as
    JSON, from an origin that is neither the server's nor allowed. Of everybody else any body is read as JSON.
    Sizes: a body that is too large, by its declared length or as it comes.
    Paths are read as proxies and clients write them: after the server's address, with more slashes or one at their end,
    OpenAI's without /v1 too. A HEAD is answered as its GET is, without the body.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, failed: Counter, without_key: Collection[str] = ()
    ) -> None:
        self.app, self.settings, self.failed = app, settings, failed
        self._without_key = without_key
        self._names = {_name(name) for name in settings.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = _SLASHES.sub("/", _ADDRESS.sub("", scope["path"])).rstrip("/") or "/"
        path = f"/v1{path}" if path in _WITHOUT_VERSION else path
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "path": path, "raw_path": quote(path).encode(), "method": method}
        problem = self._problem(scope, Headers(scope=scope))
        if problem is not None:
            await refusal(problem, path, self.failed)(scope, receive, send)
            return
        scope["headers"] = [
            *(pair for pair in scope["headers"] if pair[0] != b"content-type"),
            (b"content-type", JSON.encode()),
        ]
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.settings.max_body_bytes:
                raise HTTPException(413, str(self.too_large))
            return message

        await self.app(scope, counted, send)

    def _problem(self, scope: Scope, headers: Headers) -> RequestError | None:
        names = map(_name, headers.getlist("host"))
        others = [name for name in names if name not in self._names and not is_loopback(name)]
        if self._names and others:
            message = f"host: got {shown(others[0])}, which is not a name of this server; --allowed-host makes it one"
            return RequestError(403, message, "host", "host_not_allowed")
        if (
            self.settings.api_keys
            and scope["path"] not in self._without_key
            and not self._allows(headers)
        ):
            message = "a key is needed, as Authorization: Bearer KEY, or as X-Api-Key: KEY"
            return RequestError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        declared = kind.startswith("application/") and kind.endswith(("/json", "+json"))
        if scope["method"] == "POST" and not declared and (origin := self._elsewhere(headers)):
            message = f"origin: got {shown(origin)}, accepted {JSON} alone from pages of elsewhere; see --cors"
            return RequestError(403, message, "origin", "origin_not_allowed")
        length = headers.get("content-length", "0")
        fits = length.isdecimal() and int(length) <= self.settings.max_body_bytes
        return None if fits else self.too_large

    def _allows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        matches = [
            hmac.compare_digest(key.strip().encode(), known.encode())
            for known in self.settings.api_keys
        ]
        return any(matches)

    def _elsewhere(self, headers: Headers) -> str | None:
        """Return the origin of a page of elsewhere; None for this server's own, and for what is no page."""
        named, origins = headers.getlist("origin"), self.settings.origins
        allowed = [f"{scheme}://{headers.get('host', '')}" for scheme in ("http", "https")]
        other = next((origin for origin in named if origin not in (*allowed, *origins)), None)
        if (
            other is None
            and not named
            and headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        ):
            other = headers["sec-fetch-site"]
        return None if "*" in origins else other

    @property
    def too_large(self) -> RequestError:
        message = (
            f"the body is larger than the {self.settings.max_body_bytes} bytes that are accepted"
        )
        return RequestError(413, message, code="body_too_large", headers={"Connection": "close"})


def refusal(problem: RequestError, path: str, failed: Counter) -> Response:
    """Return the response that tells a problem, in the shape of the protocol that has this path, and count it."""
    if path not in HEALTH:  # who asks whether requests are taken has made none
        failed.labels(problem.status).inc()
    return json_response(problem.body_for(path), problem.status, problem.headers)


def _name(host: str) -> str:
    """Return a Host header without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host if host.count(":") > 1 else host.partition(":")[0]).rstrip(".")


FEW = 1 << 16  # bytes that are parsed without a look at them
MAX_PARTS = 100_000  # strings, lists and objects
MAX_VALUES = 1_000_000  # commas: of which most are between token ids


def parsed(body: bytes, encoding: str = "") -> Any:
    """Return the value of a JSON text; RequestError says why it cannot be read.

    encoding: the header Content-Encoding
    """
    if encoding.strip().lower() not in ("", "identity"):
        raise RequestError(
            415, f"content-encoding: got {encoding:.60}, accepted a body that is not compressed"
        )
    if len(body) > FEW:
        _require_few(body)
    try:
        return json.loads(body)
    except RecursionError as error:
        raise _no_json("it is nested too deep") from error
    except UnicodeDecodeError as error:
        packed = (
            "; it looks compressed"
            if body.startswith((b"\x1f\x8b", b"\x78\x9c", b"\x28\xb5\x2f\xfd"))
            else ""
        )
        raise _no_json(f"byte {error.start} is not UTF-8{packed}") from error
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg}, at character {error.pos}") from error
    except ValueError as error:  # a number that Python does not take
        raise _no_json("a number has too many digits") from error


def _no_json(why: str) -> RequestError:
    return RequestError(
        400, f"the body is not JSON that this server reads ({why})", code="invalid_json"
    )


def _require_few(body: bytes) -> None:
    """Raise RequestError for a text of so many parts that parsing it takes everybody's time."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings <= MAX_PARTS:
        outside = b"".join(plain.split(b'"')[::2])
        parts, values = strings + outside.count(b"[") + outside.count(b"{"), outside.count(b",")
    else:
        parts, values = strings, 0
    for count, most, name in (
        (parts, MAX_PARTS, "strings, lists and objects"),
        (values, MAX_VALUES, "values"),
    ):
        if count > most:
            raise RequestError(
                400, f"the body has {count} {name}, accepted at most {most}", code="body_too_large"
            )


class _ParsedRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body(), self.headers.get("content-encoding", ""))


class BodyRoute(APIRoute):
    """A route whose body is parsed by `parsed`."""

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Any:
            return await handle(_ParsedRequest(request.scope, request.receive))

        return handled
