"""Settings: what a server is told once, when it starts."""

import ipaddress
from dataclasses import dataclass

from specengine.errors import ABOVE_0, TRUTH, Checked, one_of, option, require, whole

COUNT = whole(1, accepted="1 or more")
HOST, PORT = "127.0.0.1", 8000
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Settings(Checked):
    """InputError where a value is out of range.

    name                of the model, as clients see it
    host, port          port 0 takes a free one
    unix_socket         path of a socket to listen at in place of host and port
    api_keys            any of them is accepted as a bearer token; none: nobody is asked
    strict_model        refuse requests that name another model; else the one model answers whatever they call it
    allowed_hosts       names, besides this machine's own, that clients may call the server by; `*` for all
    origins             web origins that browsers may call from (CORS); `*` for all
    parallel            answers at once; each has caches of its own; None: on the native forward by the memory that is
                        free, and 1 in a replica
    queue               requests that may wait while as many as may are answered, of each model
    max_models          that are loaded at once; None: all for which there is memory
    max_model_memory    GiB that the files of loaded models may have; None: what is free decides
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
    log_level           what is less important is not logged; a request's line is info
    log_contents        write prompts and answers to the log
    """

    name: str = option(
        help="what clients call the model (default: its own name)",
        flag="served-model-name",
        metavar="NAME",
    )
    host: str = option(
        default=HOST, help="address to listen on (default 127.0.0.1: this machine only)"
    )
    port: int = option(
        whole(0, 65535, "0 to 65535"),
        default=PORT,
        metavar="N",
        help="port to listen on; 0 takes a free one (default 8000)",
    )
    unix_socket: str | None = option(
        metavar="PATH",
        help="listen at a Unix socket instead, for this user, and for the group where the umask lets it write",
    )
    api_keys: tuple[str, ...] = option(
        default=(),
        help="bearer token that clients must send; repeatable (default: $SPECENGINE_API_KEY, which other users cannot "
        "see in a list of processes, else none)",
        flag="api-key",
        metavar="KEY",
        repeats=True,
    )
    strict_model: bool = option(
        TRUTH,
        default=False,
        one_way=True,
        help="refuse requests that name another model (default: the one model answers them)",
    )
    allowed_hosts: tuple[str, ...] = option(
        default=(),
        help="accept requests that call the server by this name, as a proxy sends them; repeatable, * for any "
        "(default: its own names, at an address of this machine without a key)",
        flag="allowed-host",
        metavar="NAME",
        repeats=True,
    )
    origins: tuple[str, ...] = option(
        default=(),
        help="let browsers call from this origin; repeatable",
        flag="cors",
        metavar="ORIGIN",
        repeats=True,
    )
    parallel: int | None = option(
        COUNT,
        metavar="N",
        help="answers at once (default: as memory holds; 1 on modules and with replicas)",
    )
    queue: int = option(
        whole(0, accepted="0 or more"),
        default=16,
        metavar="N",
        help="requests that may wait (default 16)",
    )
    max_models: int | None = option(
        COUNT, metavar="N", help="models loaded at once (default: all that fit)"
    )
    max_model_memory: float | None = option(
        ABOVE_0,
        metavar="GIB",
        help="size of loaded models' files (default: as memory holds)",
    )
    max_body_bytes: int = option(
        COUNT,
        default=8 << 20,
        metavar="N",
        help="largest body of a request (default 8388608)",
    )
    max_prompt_tokens: int | None = option(
        COUNT, metavar="N", help="longest prompt (default: the model's context)"
    )
    max_tokens: int | None = option(
        COUNT, metavar="N", help="longest answer (default: the model's context)"
    )
    default_max_tokens: int = option(
        COUNT,
        default=2048,
        metavar="N",
        help="length of an answer where the request gives none (default 2048)",
    )
    max_seconds: float = option(
        ABOVE_0, default=600.0, metavar="S", help="time for one answer (default 600)"
    )
    request_seconds: float = option(
        ABOVE_0,
        default=60.0,
        metavar="S",
        help="time for a client to send its request (default 60)",
    )
    keep_alive_seconds: float = option(
        ABOVE_0,
        default=75.0,
        metavar="S",
        help="time that a connection stays open after an answer (default 75)",
    )
    ping_seconds: float = option(ABOVE_0, default=15.0)
    drain_seconds: float = option(
        ABOVE_0,
        default=30.0,
        metavar="S",
        help="time for answers under way when the server stops (default 30)",
    )
    allow_special_text: bool = option(
        TRUTH,
        default=False,
        one_way=True,
        help="read the text of special tokens in chats as those tokens, as in completions (default: as text)",
    )
    log_level: str = option(
        one_of(LEVELS),
        default="info",
        choices=LEVELS,
        help="log this and what is more important (default info: a line for each request)",
    )
    log_contents: bool = option(
        TRUTH, default=False, one_way=True, help="write prompts and answers to the log"
    )

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
        super().__post_init__()
        default = self.unix_socket is None or (self.host, self.port) == (HOST, PORT)
        require("unix_socket", self.unix_socket, "alone, without host and port", default)
        for key in self.api_keys:
            require_key("api_key", key)


def require_key(field: str, key: str) -> None:
    """Raise InputError, which does not show it, for a key that no header can carry."""
    fits = key != "" and all("!" <= char <= "~" for char in key)
    shown = "one with other characters" if key.strip() else "an empty one"
    require(field, shown, "a key of visible ASCII characters", fits)


def is_loopback(host: str) -> bool:
    """Return whether the address belongs to this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
