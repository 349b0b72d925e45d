"""Clients of bench.servers stream answers side by side, and their times are summed up."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path

import pytest

from bench import servers
from tests.serve.served import served, tiny_engine


def test_clients_share_the_prompts() -> None:
    with served(parallel=1) as server:
        cell = asyncio.run(servers.crowd(server.address, 2, ["one", "two", "three"], 6))
    assert cell.tokens == 3 * 6
    assert len(cell.first) == len(cell.between) == len(cell.pauses) == 3
    assert 0 < max(cell.first) <= cell.seconds
    cell.add(cell)
    assert cell.figures["answers"] == 6


def test_an_engine_alone_is_timed_as_a_server_is() -> None:
    cell = servers.answer_alone(tiny_engine(), ["one", "two"], 6)
    assert cell.tokens == 2 * 6
    assert len(cell.first) == len(cell.between) == len(cell.pauses) == 2
    assert 0 < sum(cell.first) <= cell.seconds


def test_a_refused_request_ends_the_run() -> None:
    with served(max_tokens=4) as server, pytest.raises(SystemExit, match="status 400"):
        asyncio.run(servers.crowd(server.address, 1, ["one"], 6))


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (servers.percentile(values, 50), servers.percentile(values, 95)) == (51, 96)
    assert servers.percentile([3.0], 95) == 3.0


def test_command_lines_name_no_folder() -> None:
    peers = {"llama_server": "/here/llama-server", "vllm": "/here/python", "vllm_model": "/there/m"}
    args = Namespace(clients=[1, 4], file=Path("/there/m.gguf"), threads=2, **peers)
    found = servers.commands(args)
    assert len(found) == 6
    assert found["vLLM, --max-num-seqs 4"][-2:] == ["--max-model-len", str(servers.CONTEXT)]
    public = [servers._public(words) for words in found.values()]
    assert not any("/there" in words or "/here" in words for words in public)
    assert sum("--parallel 4" in words for words in public) == 2
    assert sum("-np 4 -cb" in words for words in public) == 2
