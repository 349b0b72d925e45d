"""Settings: what a server is told once, when it starts."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from specengine.errors import require


@dataclass(frozen=True)
class Settings:
    """InputError where a value is out of range.

    name                of the model, as clients see it
    host, port          port 0 takes a free one
    api_keys            any of them is accepted as a bearer token; none: nobody is asked
    strict_model        refuse requests that name another model; else the one model answers whatever they call it
    allowed_hosts       names, besides this machine's own, that clients may call the server by; `*` for all
    origins             web origins that browsers may call from (CORS); `*` for all
    parallel            answers at once, on the native forward; each has caches of its own; None: by the memory that is
                        free, and 1 in a replica
    queue               requests that may wait while as many as may are answered
    max_body_bytes      of a request
    max_prompt_tokens   None: what the model's context holds
    max_tokens          of an answer; None: what the model's context holds
    default_max_tokens  of an answer where the request does not say
    max_seconds         that an answer may take: the reading of its request, and all from its turn on
    request_seconds     that a client may take to send its request
    keep_alive_seconds  that a connection stays open after an answer, for another request
    ping_seconds        after which a silent stream gets a comment, which keeps proxies awake
    drain_seconds       that answers under way have when the server is told to stop
    allow_special_text  read the text of special tokens in chats as those tokens, as it is in completions
    log_contents        write prompts and answers to the log
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    strict_model: bool = False
    allowed_hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    parallel: int | None = None
    queue: int = 16
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int = 2048
    max_seconds: float = 600.0
    request_seconds: float = 60.0
    keep_alive_seconds: float = 75.0
    ping_seconds: float = 15.0
    drain_seconds: float = 30.0
    allow_special_text: bool = False
    log_contents: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names that a request's Host header may have. Without any, the header is not checked.

        At an address of this machine alone, a page of elsewhere whose name was pointed to it would be told everything:
        its requests come with its own name. With keys it is told nothing anyway.
        """
        if "*" in self.allowed_hosts or not (
            self.allowed_hosts or (is_loopback(self.host) and not self.api_keys)
        ):
            return ()
        return ("localhost", self.host, *self.allowed_hosts)

    def __post_init__(self) -> None:
        require("port", self.port, "0 to 65535", 0 <= self.port <= 65535)
        require("parallel", self.parallel, "1 or more", self.parallel is None or self.parallel >= 1)
        require("queue", self.queue, "0 or more", self.queue >= 0)
        for field in ("max_body_bytes", "max_prompt_tokens", "max_tokens", "default_max_tokens"):
            value = getattr(self, field)
            require(field, value, "1 or more", value is None or value >= 1)
        for field in (
            "max_seconds",
            "request_seconds",
            "keep_alive_seconds",
            "ping_seconds",
            "drain_seconds",
        ):
            value = getattr(self, field)
            require(field, value, "above 0", 0 < value < math.inf)
        for key in self.api_keys:
            fits = key != "" and all("!" <= char <= "~" for char in key)
            shown = "one with other characters" if key.strip() else "an empty one"
            require("api_key", shown, "a key of visible ASCII characters", fits)


def is_loopback(host: str) -> bool:
    """Return whether the address belongs to this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
