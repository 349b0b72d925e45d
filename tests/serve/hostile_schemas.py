"""Hostile schemas and grammars by the hundred, and how long another user waits for short answers meanwhile.

    python -m tests.serve.hostile_schemas --requests 1000 --clients 4 --out bench/results/server-hostile-schemas.jsonl

They come from so many clients, of all `KINDS` in turn. The other user asks for a chat, and for JSON that meets a small
schema. The server's memory, threads and descriptors are counted before and after.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.serve.hostile import CHAT, TEXT, _chat, _said, _schema, _tool, of_process

Body = tuple[str, dict[str, Any]]


def _deep(chance: random.Random) -> Body:
    inner: Any = {"enum": [1, 2]}
    wraps: list[Callable[[Any], Any]] = [
        lambda x: {"anyOf": [x]},
        lambda x: {"allOf": [x, {"type": "object"}]},
        lambda x: {"type": "array", "items": x},
        lambda x: {"type": "object", "properties": {"a": x}},
    ]
    for _ in range(chance.randint(20, 400)):
        inner = chance.choice(wraps)(inner)
    return _schema(inner)


def _wide(chance: random.Random) -> Body:
    count = chance.randint(500, 1400)
    return _schema(
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}
    )


def _contradictory(chance: random.Random) -> Body:
    kinds = [
        {"type": "string"},
        {"type": "null"},
        {"minimum": 5},
        {"maximum": 4},
        {"enum": ["a"]},
        {"$ref": "#"},
    ]
    return _schema({"allOf": chance.sample(kinds, 4)})


def _huge(chance: random.Random) -> Body:
    bodies: list[Body] = [
        _schema({"enum": [f"value {n}" for n in range(chance.randint(5000, 12_000))]}),
        _schema({"type": "string", "pattern": "^((a{1,9999}){1,9999}){1,9999}$"}),
        _schema(
            {"type": "array", "items": {"type": "integer"}, "minItems": 10 ** chance.randint(3, 9)}
        ),
        _chat(grammar="start: " + " | ".join(f'"{n} words"' for n in range(15_000))),
        _chat(grammar="root ::= " + "(" * 9999 + '"a"' + ")" * 9999),
    ]
    return chance.choice(bodies)


def _runaway(chance: random.Random) -> Body:
    letter = chance.choice("cdefgh")
    slow = {
        "allOf": [
            {"type": "string", "pattern": f".*{'ab' * count}{letter}.*"} for count in range(1, 20)
        ]
    }
    tool = _tool(
        parameters={"type": "object", "properties": {"a": slow}}, strict=chance.random() < 0.5
    )
    bodies: list[Body] = [
        _schema(slow),
        _chat(grammar="start: %json " + json.dumps(slow)),
        _chat(tools=[tool], tool_choice="required"),
        _schema({"type": "integer", "multipleOf": chance.randint(10**6, 10**9)}),
        (TEXT, {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": slow}}),
    ]
    return chance.choice(bodies)


def _crashing(chance: random.Random) -> Body:
    low = -(2**63) + chance.randint(-2, 2)
    return _schema(
        {"items": {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 9)}}
    )


# A kind makes a body at random; another kind is another line.
KINDS: dict[str, Callable[[random.Random], Body]] = {
    "deep schema": _deep,
    "wide schema": _wide,
    "contradictory schema": _contradictory,
    "huge schema or grammar": _huge,
    "schema or grammar without end": _runaway,
    "bounds that crash": _crashing,
}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0}},
    "required": ["age"],
}


class User:
    """Asks one short question after another, and keeps how long each took."""

    def __init__(self, client: httpx.Client, **fields: Any) -> None:
        self.client, self.fields, self.seconds = client, fields, list[float]()

    def ask(self) -> None:
        began = time.monotonic()
        answer = self.client.post(
            CHAT, json={"messages": _said("hi"), "max_tokens": 4, **self.fields}
        )
        assert answer.status_code == 200, answer.text
        self.seconds.append(time.monotonic() - began)


def flooded(
    address: str, pid: int, requests: int, clients: int, kinds: list[str]
) -> list[dict[str, Any]]:
    """Return a row for each kind, one for the other user's answers, and one for the server's process."""
    turns, statuses, lost = iter(range(requests)), Counter[tuple[str, int]](), list[str]()
    lock = threading.Lock()

    def send() -> None:
        with httpx.Client(base_url=address, timeout=120) as client:
            while True:
                with lock:
                    turn = next(turns, None)
                if turn is None:
                    return
                kind = kinds[turn % len(kinds)]
                path, asked = KINDS[kind](random.Random(turn))
                try:
                    status = client.post(path, json=asked).status_code
                except httpx.HTTPError as error:
                    lost.append(repr(error))
                    continue
                with lock:
                    statuses[kind, status] += 1

    with httpx.Client(base_url=address, timeout=120) as own:
        shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
        users = [User(own), User(own, response_format=shape)]
        for _ in range(20):
            for user in users:
                user.ask()
        usual = [statistics.median(user.seconds) for user in users]
        before = of_process(pid)
        for user in users:
            user.seconds.clear()
        threads = [threading.Thread(target=send) for _ in range(clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for user in users:
                user.ask()
    time.sleep(15)  # threads that wait for work end after 10 s
    with httpx.Client(base_url=address, timeout=120) as own:
        User(own, response_format=shape).ask()
    rows: list[dict[str, Any]] = [
        {
            "record": "kind",
            "kind": kind,
            "statuses": {str(code): count for (of, code), count in statuses.items() if of == kind},
        }
        for kind in kinds
    ]
    for user, name, median in zip(users, ("a chat", "JSON"), usual, strict=True):
        row = {
            "record": "other user",
            "asks": name,
            "answers": len(user.seconds),
            "usual": round(median, 3),
        }
        rows.append(row | {"longest": round(max(user.seconds) - median, 3)})
    rows.append({"record": "server", "lost": len(lost), "before": before, "after": of_process(pid)})
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    from specengine.benchmark.records import provenance
    from tests.serve.processes import free_port, running

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4, help="that send them")
    parser.add_argument("--kind", action="append", default=[], choices=list(KINDS), metavar="NAME")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [provenance("python -m tests.serve.hostile_schemas", sys.argv[1:])]
    port = free_port()
    with running([], port=port) as process:
        kinds = args.kind or list(KINDS)
        rows += flooded(f"http://127.0.0.1:{port}", process.pid, args.requests, args.clients, kinds)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
