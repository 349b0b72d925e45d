"""What stands before every request: the names of this server, keys, and how large a body may be."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from fastapi import HTTPException
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specengine.errors import shown
from specengine.serve.problems import Problem
from specengine.serve.settings import is_loopback
from specengine.serve.static import FILES

HEALTH = ("/health", "/healthz", "/v1/health")
WITHOUT_KEY = (*HEALTH, *FILES)


class Hosts:
    """Refuses requests that name the server otherwise than `names`, as a page of elsewhere does whose name was pointed
    here; addresses of this machine alone are names too. failed: counts refusals by status.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str], failed: Counter) -> None:
        self.app, self.names, self.failed = app, {_name(name) for name in names}, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).getlist("host") if scope["type"] == "http" else []
        other = next((host for host in given if not self._knows(_name(host))), None)
        if other is not None:
            message = f"host: got {shown(other)}, which is not a name of this server; --allowed-host makes it one"
            problem = Problem(403, message, "host", "host_not_allowed")
            self.failed.labels(problem.status).inc()
            await problem.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _knows(self, name: str) -> bool:
        return name in self.names or is_loopback(name)


def _name(host: str) -> str:
    """A Host header without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host if host.count(":") > 1 else host.partition(":")[0]).rstrip(".")


class Keys:
    """Refuses requests without one of the keys, compared in a time that does not depend on them.

    failed: counts refusals by status.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], failed: Counter) -> None:
        self.app, self.keys, self.failed = app, [key.encode() for key in keys], failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in WITHOUT_KEY and not self._allows(Headers(scope=scope)):
            message = "a key is needed, as Authorization: Bearer KEY"
            problem = Problem(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            self.failed.labels(problem.status).inc()
            await problem.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self.keys]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Refuses a body that is too large before it is read whole; failed: counts refusals by status."""

    def __init__(self, app: ASGIApp, most: int, failed: Counter) -> None:
        self.app, self.most, self.failed = app, most, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        said = Headers(scope=scope).get("content-length", "0")
        if not said.isdecimal() or int(said) > self.most:
            self.failed.labels(self.too_large.status).inc()
            await self.too_large.response()(scope, receive, send)
            return
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.most:
                raise HTTPException(413, str(self.too_large))
            return message

        await self.app(scope, counted, send)

    @property
    def too_large(self) -> Problem:
        message = f"the body is larger than the {self.most} bytes that are accepted"
        return Problem(413, message, code="body_too_large", headers={"Connection": "close"})
