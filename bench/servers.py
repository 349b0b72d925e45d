"""Compare servers at several numbers of clients: a queue, answers at once, and the servers of llama.cpp and vLLM.

One client's answers are compared with those of an engine without a server too.

    python -m bench.servers [--llama-server PATH] [--vllm PATH] [--clients 1 2 4 8 16] --out FILE

All servers run all the time, and one of them is asked at a time: every round asks all in turn, so that load on the
machine meets all of them. A client streams greedy answers of one length, each after the one before has ended. A number
before every prompt keeps servers from finding it in their caches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from bench import provenance, workloads
from bench.arguments import add_arguments
from specengine import Engine
from specengine.checkpoints import embedded

Record = dict[str, Any]
CONTEXT = 2048  # tokens of a conversation in llama.cpp and vLLM, which want to know them before
ALONE = "specengine, no server"
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "2"}  # its setting of memory for caches, in GiB


@dataclass
class Cell:
    """Answers of one server to so many clients."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token, of each answer
    # seconds between tokens, the mean of each answer
    between: list[float] = field(default_factory=list)
    # the longest seconds between two pieces of each answer
    pauses: list[float] = field(default_factory=list)

    def add(self, other: Cell) -> None:
        """Take over the answers of another round."""
        self.seconds += other.seconds
        self.tokens += other.tokens
        for name in ("first", "between", "pauses"):
            getattr(self, name).extend(getattr(other, name))

    def note(self, began: float, times: list[float], count: int) -> None:
        """Take in an answer of so many tokens, by the times of its pieces."""
        self.tokens += count
        self.first.append(times[0] - began)
        self.between.append((times[-1] - times[0]) / (count - 1))
        pauses = (after - before for before, after in itertools.pairwise(times))
        self.pauses.append(max(pauses, default=0.0))

    @property
    def figures(self) -> Record:
        found: Record = {
            "answers": len(self.first),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
        }
        for name, values in (
            ("first_token", self.first),
            ("between_tokens", self.between),
            ("longest_pause", self.pauses),
        ):
            for part in (50, 95):
                found[f"{name}_ms_p{part}"] = round(1000 * percentile(values, part), 1)
        return found


def percentile(values: list[float], part: int) -> float:
    """Return the value that `part` of a hundred do not exceed."""
    return sorted(values)[min(len(values) * part // 100, len(values) - 1)]


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the servers' command lines by name, without their ports."""
    most = max(args.clients)
    model = [] if args.file is None else [str(args.file)]
    own = [
        sys.executable,
        "-m",
        "specengine",
        "serve",
        *model,
        "--queue",
        str(most),
        "--threads",
        str(args.threads),
    ]
    found = {
        "specengine, one at a time": [*own, "--parallel", "1"],
        f"specengine, --parallel {most}": [*own, "--parallel", str(most)],
        f"specengine, --parallel {most}, plain": [
            *own,
            "--parallel",
            str(most),
            "--policy",
            "plain",
        ],
    }
    if args.llama_server is not None:
        file = args.file or embedded.gguf()
        batched = ["-np", str(most), "-cb", "-c", str(CONTEXT * most)]
        llama = [
            args.llama_server,
            "-m",
            str(file),
            *batched,
            "-t",
            str(args.threads),
            "--no-webui",
        ]
        found[f"llama.cpp, -np {most}"] = llama
        found[f"llama.cpp, -np {most}, ngram drafts"] = [*llama, "--spec-type", "ngram-simple"]
    if args.vllm is not None:
        sizes = ["--max-num-seqs", str(most), "--max-model-len", str(CONTEXT)]
        served = [
            "--model",
            str(args.vllm_model or embedded.path()),
            "--served-model-name",
            "default",
            *sizes,
        ]
        found[f"vLLM, --max-num-seqs {most}"] = [
            args.vllm,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *served,
        ]
    return found


async def crowd(address: str, clients: int, prompts: list[str], tokens: int) -> Cell:
    """Answer all prompts, so many at a time."""
    cell, left = Cell(), iter(prompts)
    # servers may close those
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:

        async def one() -> None:
            for prompt in left:
                await ask(client, prompt, tokens, cell)

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        cell.seconds = time.perf_counter() - began
    return cell


async def ask(client: httpx.AsyncClient, prompt: str, tokens: int, cell: Cell) -> None:
    """Stream one answer, and note its times."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, times, count = time.perf_counter(), list[float](), 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(
                f"status {answer.status_code}: {(await answer.aread()).decode()[:300]}"
            )
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            count = (chunk.get("usage") or {}).get("completion_tokens", count)
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                times.append(time.perf_counter())
    if count != tokens:
        raise SystemExit(f"an answer has {count} tokens, expected {tokens}")
    cell.note(began, times, count)


def answer_alone(engine: Engine, prompts: list[str], tokens: int) -> Cell:
    """Answer all prompts in this process, and note the times as for a server."""
    cell = Cell()
    for prompt in prompts:
        began = time.perf_counter()
        stream = engine.stream(
            [{"role": "user", "content": prompt}],
            max_new_tokens=tokens,
            temperature=0.0,
            eos_token_id=[],
        )
        times = [time.perf_counter() for piece in stream if piece.text]
        cell.seconds += time.perf_counter() - began
        cell.note(began, times, tokens)
    return cell


def records(args: argparse.Namespace) -> Iterator[Record]:
    texts = [item.text for item in workloads.read(args.prompts, args.per_set)]
    asked = itertools.count()
    ways, cells = commands(args), dict[tuple[str, int], Cell]()
    yield {
        "record": "settings",
        "servers": {way: _public(words) for way, words in ways.items()},
        "tokens": args.max_new_tokens,
    }

    def prompts(count: int) -> list[str]:
        return [f"({next(asked)}) {texts[number % len(texts)]}" for number in range(count)]

    with contextlib.ExitStack() as running:
        addresses = {
            way: running.enter_context(_server(words, args.port + number))
            for number, (way, words) in enumerate(ways.items())
        }
        for address in addresses.values():
            asyncio.run(
                crowd(address, max(args.clients), prompts(max(args.clients)), args.max_new_tokens)
            )
        engine = Engine.from_pretrained(args.file and str(args.file), memory="off")
        torch.set_num_threads(args.threads)
        answer_alone(engine, prompts(2), args.max_new_tokens)
        for turn in range(args.rounds):
            cell = answer_alone(engine, prompts(args.requests), args.max_new_tokens)
            cells.setdefault((ALONE, 1), Cell()).add(cell)
            for clients in args.clients:
                for way in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
                    count = max(args.requests, 2 * clients)
                    found = asyncio.run(
                        crowd(addresses[way], clients, prompts(count), args.max_new_tokens)
                    )
                    cells.setdefault((way, clients), Cell()).add(found)
    for (way, clients), cell in sorted(
        cells.items(), key=lambda item: ([ALONE, *ways].index(item[0][0]), item[0][1])
    ):
        yield {"record": "server", "way": way, "clients": clients, **cell.figures}


@contextlib.contextmanager
def _server(words: list[str], port: int, seconds: float = 300) -> Iterator[str]:
    """Run a server until it is left; yields its address once it is ready."""
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        [*words, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | VLLM,
    ) as server:
        try:
            end = time.monotonic() + seconds
            while not _ready(address):
                if server.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server did not become ready: {_public(words)}")
                time.sleep(0.2)
            yield address
        finally:
            server.terminate()  # vLLM ends processes of its own
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()


def _ready(address: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    return False


def _public(words: list[str]) -> str:
    """Return a command line without the folders of this machine."""
    return " ".join(Path(word).name if os.sep in word else word for word in words)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.servers", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--llama-server", metavar="PATH", help="llama.cpp's server; default: it is left out"
    )
    parser.add_argument(
        "--vllm", metavar="PATH", help="the Python that has vLLM for CPUs; default: it is left out"
    )
    parser.add_argument(
        "--vllm-model",
        metavar="FOLDER",
        help="a model's folder for it; default: the embedded one's",
    )
    parser.add_argument(
        "--file", type=Path, help="a GGUF file; default: the embedded model's, with its head"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--requests", type=int, default=16, help="of a cell, but two for each client at least"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--port", type=int, default=8095, help="the first of the servers'; the others follow"
    )
    add_arguments(parser, "prompts", "out", per_set=4, rounds=2, max_new_tokens=64)
    args = parser.parse_args(arguments)
    provenance.show(records(args), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
