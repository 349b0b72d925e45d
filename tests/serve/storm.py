"""Crowds of clients that behave badly, and what becomes of each; then many requests in a row, and the server's memory.

    python -m tests.serve.storm --out bench/results/server-storm.jsonl
    python -m tests.serve.storm --parallel 16 --requests 5000 --out bench/results/server-storm-parallel.jsonl

With --parallel the many requests come from twice as many clients, of whom half leave at any time.

The server runs in a process of its own with a tiny model. Every client ends in one of these:
    right       the tokens that the engine gives for its seed
    refused     by status 429 with Retry-After, and came again; counted once for each time
    error       4xx in OpenAI's shape, as it deserved
    left        went away itself
    lost        anything else, said on stderr
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"
KEY = "right"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
PROMPTS = ("Hello there", "once upon a time", "Hello there, and once more: hello there")
TOKENS = 24  # of an answer
MAX_BODY = 20_000  # bytes, what the server is told to accept
OPTIONS = ("--api-key", KEY, "--max-body-bytes", str(MAX_BODY), "--queue", "32")


@dataclass
class Crowd:
    """Clients of one server; expected: by prompt and seed, the engine's tokens for `body`."""

    address: str
    expected: dict[tuple[str, int], list[int]]
    max_tokens: int
    outcomes: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)

    def body(self, prompt: str, seed: int, **changes: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        asked = {
            "messages": messages,
            "seed": seed,
            "temperature": 1.0,
            "max_tokens": self.max_tokens,
        }
        return asked | {"return_token_ids": True} | changes

    async def come(self, count: int, seed: int = 0, *, rude: bool = True) -> None:
        """`count` at once; rude: about half of them are no patient readers of a right request."""
        chance = random.Random(seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.address, limits=limits, headers=HEADERS, timeout=120
        ) as client:
            kinds: list[Callable[..., Awaitable[str]]] = [self.whole, self.streamed]
            if rude:
                kinds = 3 * kinds + [
                    self.slow,
                    self.leaves,
                    self.leaves_a_stream,
                    self.hangs_up,
                    self.wrong,
                ]
            await asyncio.gather(
                *(self._one(chance.choice(kinds), client, index) for index in range(count))
            )

    async def keep_coming(
        self, count: int, clients: int, pid: int, every: int = 500
    ) -> list[dict[str, Any]]:
        """Ask so many times, from so many clients of whom half leave; return the process' memory after each `every`."""
        rows, turns = list[dict[str, Any]](), iter(range(1, count + 1))
        kinds: list[Callable[..., Awaitable[str]]] = [
            self.whole,
            self.streamed,
            self.leaves,
            self.leaves_a_stream,
        ]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.address, limits=limits, headers=HEADERS, timeout=120
        ) as client:

            async def one() -> None:
                for turn in turns:
                    chance = random.Random(turn)
                    self.outcomes[await chance.choice(kinds)(client, chance)] += 1
                    if turn % every == 0:
                        rows.append(_memory(turn, pid))

            await asyncio.gather(*(one() for _ in range(clients)))
        return rows

    async def _one(
        self, kind: Callable[..., Awaitable[str]], client: httpx.AsyncClient, index: int
    ) -> None:
        chance = random.Random(index)
        await asyncio.sleep(chance.uniform(0, 1))
        try:
            outcome = await kind(client, chance)
        except Exception as error:
            outcome = "lost"
            print(f"{kind.__name__}: {error!r}", file=sys.stderr)
        self.outcomes[outcome] += 1

    # ---- kinds of clients: each answers with its outcome

    async def whole(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        key = chance.choice(list(self.expected))
        answer = await self._patiently(lambda: client.post(CHAT, json=self.body(*key)))
        assert answer.status_code == 200, answer.text
        got = answer.json()
        self._count(got)
        return self._judge(key, got["choices"][0]["token_ids"])

    async def streamed(
        self, client: httpx.AsyncClient, chance: random.Random, pause: float = 0.0
    ) -> str:
        key = chance.choice(list(self.expected))
        asked = self.body(*key, stream=True, stream_options={"include_usage": True})
        while True:
            tokens: list[int] = []
            async with client.stream("POST", CHAT, json=asked) as answer:
                if answer.status_code == 429:
                    await self._refused(answer)
                    continue
                assert answer.status_code == 200
                events = [event async for event in _events(answer, pause)]
            assert events[-1] == "[DONE]"
            chunks = [json.loads(event) for event in events[:-1]]
            for chunk in chunks:
                for choice in chunk["choices"]:
                    tokens += choice.get("token_ids", [])
            self._count(chunks[-1])
            return self._judge(key, tokens)

    async def slow(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        return await self.streamed(client, chance, pause=chance.uniform(0.01, 0.1))

    async def leaves(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        """At any time, with its answer or without."""
        key = chance.choice(list(self.expected))
        with contextlib.suppress(httpx.TimeoutException):
            await client.post(CHAT, json=self.body(*key), timeout=chance.uniform(0.001, 0.5))
        return "left"

    async def leaves_a_stream(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        key, most = chance.choice(list(self.expected)), chance.randrange(1, 12)
        async with client.stream("POST", CHAT, json=self.body(*key, stream=True)) as answer:
            async for _ in _events(answer):
                most -= 1
                if not most:
                    break
        return "left"

    async def hangs_up(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        """Hang up in the middle of a request."""
        url = httpx.URL(self.address)
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 5000\r\n\r\n"
        writer.write(head.encode()[: chance.randrange(1, 200)])
        await writer.drain()
        await asyncio.sleep(chance.uniform(0, 0.2))
        writer.close()
        return "left"

    async def wrong(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        """A request that nobody could answer."""
        right = json.dumps(self.body("Hello", 0)).encode()
        body, headers, status = chance.choice(
            [
                (right, {"Authorization": "Bearer wrong"}, 401),
                (right[: chance.randrange(len(right))], {}, 400),
                (b'{"messages": ' + b"[" * 5000, {}, 400),
                (json.dumps(self.body("Hello", 0, surprise=1)).encode(), {}, 400),
                (json.dumps(self.body("Hello" * MAX_BODY, 0)).encode(), {}, 413),
                (json.dumps(self.body("Hello" * 1000, 0)).encode(), {}, 400),
            ]
        )
        answer = await self._patiently(lambda: client.post(CHAT, content=body, headers=headers))
        assert answer.status_code == status, (status, answer.text)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        return "error"

    # ---- what they share

    async def _patiently(self, ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        while (answer := await ask()).status_code == 429:
            await self._refused(answer)
        return answer

    async def _refused(self, answer: httpx.Response) -> None:
        self.outcomes["refused"] += 1
        seconds = int(answer.headers["Retry-After"])
        assert seconds >= 1
        await asyncio.sleep(min(seconds, 2) * random.uniform(0.5, 1))

    def _judge(self, key: tuple[str, int], tokens: list[int]) -> str:
        assert tokens == self.expected[key], key
        return "right"

    def _count(self, answer: dict[str, Any]) -> None:
        figures = answer["metrics"]["speculative_decoding"]
        usage = answer["usage"]
        self.figures += Counter(
            prompt_tokens=usage["prompt_tokens"],
            generation_tokens=usage["completion_tokens"],
            prefix_cache_hits=usage["prompt_tokens_details"]["cached_tokens"],
            spec_decode_num_drafts=figures["num_spec_steps"] - figures["num_plain_steps"],
            spec_decode_num_draft_tokens=figures["num_draft_tokens"],
            spec_decode_num_accepted_tokens=figures["num_accepted_draft_tokens"],
            spec_decode_num_accepted_tokens_per_pos=figures["num_accepted_draft_tokens"],
            request_success=1,
        )


async def _events(answer: httpx.Response, pause: float = 0.0) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        if pause:
            await asyncio.sleep(pause)


def counters(address: str) -> Counter[str]:
    """Return /metrics, gauges included, by name without the prefix; labels are added up."""
    text = httpx.get(f"{address}/metrics", headers=HEADERS).text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name.removeprefix("specengine_").removesuffix("_total")] += int(
                sample.value
            )
    return found


def expected_of(engine: Any, max_tokens: int, seeds: int = 4) -> dict[tuple[str, int], list[int]]:
    """By prompt and seed, the engine's tokens."""

    def tokens(prompt: str, seed: int) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        return engine.generate(
            messages, seed=seed, temperature=1.0, max_new_tokens=max_tokens
        ).token_ids

    return {(prompt, seed): tokens(prompt, seed) for prompt in PROMPTS for seed in range(seeds)}


def resident(pid: int | str = "self") -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def settled(address: str, seconds: float = 30) -> Counter[str]:
    """The counters once nothing runs or waits; AssertionError where it does not come to that."""
    end = time.monotonic() + seconds
    while (found := counters(address))["num_requests_running"] or found["num_requests_waiting"]:
        assert time.monotonic() < end, "requests are still there whose clients are gone"
        time.sleep(0.02)
    return found


def main() -> None:
    from specengine import Engine
    from specengine.benchmark.records import provenance
    from tests.serve.processes import free_port, running
    from tests.serve.tiny_model import save

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--storms", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000, help="in a row")
    parser.add_argument("--parallel", type=int, default=1, help="answers of the server at once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = [provenance("python -m tests.serve.storm", sys.argv[1:])]
    with tempfile.TemporaryDirectory() as temporary, open(Path(temporary) / "log", "w") as log:
        folder = save(Path(temporary) / "tiny")
        options = [*OPTIONS, "--parallel", str(args.parallel)]
        port = free_port()
        expected = expected_of(Engine.from_pretrained(str(folder)), TOKENS)
        with running([str(folder), *options], port=port, log=log) as process:
            address = f"http://127.0.0.1:{port}"
            for seed in range(args.storms + 1):
                rude = seed < args.storms
                rows += [_storm(Crowd(address, expected, TOKENS), args.clients, seed, rude=rude)]
            crowd = Crowd(address, expected, TOKENS)
            if args.parallel > 1:
                rows += asyncio.run(
                    crowd.keep_coming(args.requests, 2 * args.parallel, process.pid)
                )
            else:
                rows += _in_a_row(crowd, args.requests, process.pid)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _storm(crowd: Crowd, clients: int, seed: int, *, rude: bool) -> dict[str, Any]:
    before, began = settled(crowd.address), time.monotonic()
    asyncio.run(crowd.come(clients, seed, rude=rude))
    seconds = time.monotonic() - began
    counted = settled(crowd.address) - before
    agree = {name: counted[name] == value for name, value in crowd.figures.items()}
    row = {
        "record": "storm",
        "clients": clients,
        "rude": rude,
        "seconds": round(seconds, 1),
        **crowd.outcomes,
    }
    row |= {"lost": crowd.outcomes["lost"]} | (
        {} if rude else {"counters_agree": all(agree.values())}
    )
    print(json.dumps(row))
    return row


def _in_a_row(crowd: Crowd, count: int, pid: int) -> list[dict[str, Any]]:
    rows = []
    keys = list(crowd.expected)
    with httpx.Client(base_url=crowd.address, headers=HEADERS, timeout=60) as client:
        for turn in range(1, count + 1):
            answer = client.post(
                CHAT, json=crowd.body(*keys[turn % len(keys)], stream=turn % 2 == 0)
            )
            assert answer.status_code == 200
            if turn % 500 == 0:
                rows.append(_memory(turn, pid))
    return rows


def _memory(requests: int, pid: int) -> dict[str, Any]:
    row = {"record": "memory", "requests": requests, "resident_mb": round(resident(pid) / 1e6, 1)}
    print(json.dumps(row))
    return row


if __name__ == "__main__":
    main()
