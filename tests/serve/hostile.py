"""Bodies that take long to read, and how long another user waits for a short answer meanwhile.

    python -m tests.serve.hostile --out bench/results/server-hostile.jsonl

The server runs in a process of its own with the default model. The other user asks one question after another. Each
row has the status that the body got, the seconds of its slowest answer, and by how many seconds the slowest answer of
the other user was slower than usual (the median without such a body).

    python -m tests.serve.hostile --connections 1000 --out bench/results/server-hostile-2000.jsonl

makes hostile requests of every kind (tests/serve/hostile_connections.py) beside that user, and compares the server's
memory, descriptors and threads after the first fifth with those at the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.serve.hostile_connections import attack

CHAT, RESPONSES, MESSAGES, TEXT = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/completions",
)
HELLO = [{"role": "user", "content": "Hello"}]
WORDS, BLANKS = "word and " * 700_000, " " * 6_000_000
DEEP: Any = json.loads('{"a": ' * 60 + "1" + "}" * 60)


def _tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": HELLO, "max_tokens": 1, **fields}


def _said(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _schema(schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    )


ENUM = {"enum": [f"value {number}" for number in range(20_000)]}
WIDE = {
    "type": "object",
    "properties": {f"p{number}": {"type": "string"} for number in range(1400)},
}
BODIES: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "a prediction of 6 MB": lambda: _chat(prediction={"type": "content", "content": WORDS}),
    "a text of 6 MB": lambda: _chat(messages=_said(WORDS)),
    "blanks, 6 MB": lambda: _chat(messages=_said(BLANKS)),
    "a text part of 6 MB": lambda: _chat(messages=_said([{"type": "text", "text": WORDS}])),
    "200,000 empty parts": lambda: _chat(messages=_said([{"type": "text", "text": ""}] * 200_000)),
    "100,000 messages": lambda: _chat(messages=HELLO * 100_000),
    "20,000 calls": lambda: _chat(
        messages=[*HELLO, {"role": "assistant", "tool_calls": [_tool(arguments="{}")] * 20_000}]
    ),
    "a tool's description of 6 MB": lambda: _chat(tools=[_tool(description=WORDS)]),
    "128 tools of 40 kB": lambda: _chat(tools=[_tool(description="word and " * 4500)] * 128),
    "a schema with 20,000 values": lambda: _schema(ENUM),
    "a schema with 1,400 properties": lambda: _schema(WIDE),
    "a grammar of 250 kB": lambda: _chat(
        grammar="start: " + " | ".join(f'"{number} words"' for number in range(15_000))
    ),
    "a pattern of 1,000,000 letters": lambda: _schema(
        {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}
    ),
    "a text that just fits": lambda: _chat(messages=_said("word and " * 3500)),
    "2,000,000 token ids": lambda: (TEXT, {"prompt": [7] * 2_000_000, "max_tokens": 1}),
    "a text of 6 MB, Responses": lambda: (RESPONSES, {"input": WORDS, "max_output_tokens": 1}),
    "100,000 items, Responses": lambda: (
        RESPONSES,
        {"input": HELLO * 100_000, "max_output_tokens": 1},
    ),
    "100,000 messages, Messages": lambda: (
        MESSAGES,
        {"messages": HELLO * 100_000, "max_tokens": 1},
    ),
    "500,000 unknown fields": lambda: _chat(**{f"x{number}": 0 for number in range(500_000)}),
    "embeddings of 6 MB": lambda: ("/v1/embeddings", {"input": WORDS}),
    "tokens of 6 MB": lambda: ("/tokenize", {"content": WORDS}),
}


class User:
    """Asks one short question after another, and keeps how long each took."""

    def __init__(self, client: httpx.Client) -> None:
        self.client, self.seconds = client, list[float]()

    def ask(self) -> None:
        began = time.monotonic()
        answer = self.client.post(CHAT, json={"messages": _said("hi"), "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        self.seconds.append(time.monotonic() - began)

    def beside(self, thread: threading.Thread) -> float:
        """Ask until the thread has ended; return the time of the slowest answer."""
        self.seconds.clear()
        thread.start()
        while thread.is_alive():
            self.ask()
        self.ask()
        return max(self.seconds)


def measured(address: str, times: int, names: list[str]) -> list[dict[str, Any]]:
    """Return a row for each body that is named, or for all."""
    rows = []
    with (
        httpx.Client(base_url=address, timeout=120) as own,
        httpx.Client(base_url=address, timeout=120) as other,
    ):
        user = User(own)
        for _ in range(20):
            user.ask()
        usual = statistics.median(user.seconds)
        for name, body in BODIES.items():
            if names and name not in names:
                continue
            path, asked = body()
            content, statuses, took = json.dumps(asked).encode(), list[int](), list[float]()

            def post() -> None:
                began = time.monotonic()
                answer = other.post(
                    path,  # noqa: B023
                    content=content,  # noqa: B023
                    headers={"Content-Type": "application/json"},
                )
                took.append(time.monotonic() - began)  # noqa: B023
                statuses.append(answer.status_code)  # noqa: B023

            slowest = [user.beside(threading.Thread(target=post)) for _ in range(times)]
            row = {
                "record": "hostile",
                "body": name,
                "megabytes": round(len(content) / 1e6, 2),
                "status": statuses[0],
            }
            row |= {"seconds": round(max(took), 3), "usual": round(usual, 3)}
            row |= {"longest": round(max(slowest) - usual, 3)}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


ROUNDS = 5
SETTLED_SECONDS = 6.0  # after which connections of clients that have gone are closed


def resident(pid: int) -> int:
    """Return the bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def attacked(port: int, pid: int, count: int) -> list[dict[str, Any]]:
    """Return a row per round of hostile acts, made by another process, and one that compares the server with before.

    The first round is left out of that: what is made at first use stays.
    """
    rows, before, usual = [], dict[str, int](), 0.0
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        user = User(client)
        for number in range(ROUNDS):
            user.seconds.clear()
            for _ in range(20):
                user.ask()
            usual = statistics.median(user.seconds)
            outcomes: list[dict[str, int]] = []
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as others:
                acts = others.submit(attack, port, count // ROUNDS, number)
                slowest = user.beside(
                    threading.Thread(target=lambda: outcomes.append(acts.result()))  # noqa: B023
                )
            time.sleep(SETTLED_SECONDS)
            row = {
                "record": "hostile-connections",
                "requests": count // ROUNDS,
                "usual": round(usual, 3),
            }
            row |= {
                "longest": round(slowest - usual, 3),
                "outcomes": outcomes[0],
                **of_process(pid),
            }
            before = before or of_process(pid)
            print(json.dumps(row), flush=True)
            rows.append(row)
        after = of_process(pid)
        summary: dict[str, Any] = {
            "record": "hostile-summary",
            "requests": count,
            "before": before,
            "after": after,
        }
        summary["memory"] = round(after["resident"] / before["resident"] - 1, 4)
        summary["alive"] = client.get("/health").status_code == 200
        summary["longest"] = max(row["longest"] for row in rows)
        print(json.dumps(summary), flush=True)
    return [*rows, summary]


def of_process(pid: int) -> dict[str, int]:
    """Return a process's resident bytes, descriptors and threads."""
    folder = Path(f"/proc/{pid}")
    counts = {
        name: len(list((folder / kind).iterdir()))
        for name, kind in (("descriptors", "fd"), ("threads", "task"))
    }
    return {"resident": resident(pid), **counts}


def main() -> None:
    from specengine.benchmark.records import provenance
    from tests.serve.processes import free_port, running

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5, help="that each body is sent")
    parser.add_argument("--body", action="append", default=[], choices=list(BODIES), metavar="NAME")
    parser.add_argument(
        "--connections",
        type=int,
        default=0,
        metavar="N",
        help="hostile acts, instead of the bodies",
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [provenance("python -m tests.serve.hostile", sys.argv[1:])]
    port = free_port()
    with running([], port=port) as process:
        if args.connections:
            rows += attacked(port, process.pid, args.connections)
        else:
            rows += measured(f"http://127.0.0.1:{port}", args.times, args.body)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
