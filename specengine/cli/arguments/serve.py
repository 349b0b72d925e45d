"""specengine serve: a model over HTTP."""

from __future__ import annotations

import argparse

from specengine.cli.arguments import shared
from specengine.cli.arguments.batch import add_replicas

HELP = "answer OpenAI's clients over HTTP, with one model, one request at a time"


def add(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser, positional=True)
    parser.set_defaults(run="specengine.cli.serve:run", loads=lambda _: None)  # said where the address is
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine alone)"
    )
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default 8000)")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model (default: its own name)"
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="asked of clients as a bearer token; repeatable (default: $SPECENGINE_API_KEY, which other users cannot "
        "see in a list of processes, else none)",
    )
    group.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN", help="browsers may call from there; repeatable"
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="clients may call the server by this name, as a proxy in front does; repeatable, * for any (default: its "
        "own names alone at an address of this machine, without a key)",
    )
    group.add_argument(
        "--strict-model",
        action="store_true",
        help="refuse requests that name another model (default: the one model answers them)",
    )
    group.add_argument(
        "--allow-special-text",
        action="store_true",
        help="read the text of special tokens in chats as those tokens, as in completions (default: as text)",
    )
    group.add_argument("--log-contents", action="store_true", help="write prompts and answers to the log")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--queue", type=int, default=16, metavar="N", help="requests that may wait (default 16)")
    limits.add_argument(
        "--max-body-bytes", type=int, default=8 << 20, metavar="N", help="of a request (default 8388608)"
    )
    limits.add_argument("--max-prompt-tokens", type=int, metavar="N", help="(default: the model's context)")
    limits.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: the model's context)")
    limits.add_argument(
        "--default-max-tokens", type=int, default=2048, metavar="N", help="where a request asks for none (default 2048)"
    )
    limits.add_argument(
        "--max-seconds", type=float, default=600.0, metavar="S", help="that one answer may take (default 600)"
    )
    limits.add_argument(
        "--request-seconds", type=float, default=60.0, metavar="S", help="to send a request in (default 60)"
    )
    limits.add_argument(
        "--drain-seconds", type=float, default=30.0, metavar="S", help="for answers under way at a stop (default 30)"
    )
    replicas = parser.add_argument_group("replicas")
    add_replicas(replicas, "engines behind one address, each in a process of its own (needs the extra `ray`)")
    replicas.add_argument(
        "--max-replicas", type=int, metavar="N", help="as many as there is work for, up to N (default: --replicas)"
    )
    shared.add_draft_and_policy(parser)
