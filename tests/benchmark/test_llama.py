"""llama.cpp as a way: its binding and its server, both pretended, and the refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specengine.benchmark import llama
from specengine.errors import BackendError, InputError

SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0 and asked["cache_prompt"] is False
        ended = asked["n_predict"] > 3
        tokens = [sum(asked["prompt"])] * (3 if ended else asked["n_predict"])
        self.reply({{"tokens": tokens, "stop_type": "eos" if ended else "limit"}})
    def reply(self, answer):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
CPU = torch.device("cpu")
GREEDY = {"temperature": 0.0}


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(program: str) -> None:
        file = tmp_path / llama.SERVER
        file.write_text(program)
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return put


@pytest.mark.parametrize(("ends", "expected"), [([3], [1, 2, 3]), ([9], [1, 2, 3, 4, 5])])
def test_the_binding_ends_where_the_others_do(ends: list[int], expected: list[int]) -> None:
    resets: list[int] = []
    binding = SimpleNamespace(reset=lambda: resets.append(1), generate=lambda prompt, **_: iter(range(1, 100)))
    assert list(llama.decode(binding, [1, 2], 5, ends, GREEDY)) == expected
    assert resets == [1]


def test_a_server_is_started_asked_and_stopped(on_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(SERVER.format(python=sys.executable))
    started: list[Any] = []
    real = llama.subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        started.append(real(*args, **options))
        return started[-1]

    monkeypatch.setattr(llama.subprocess, "Popen", start)
    server = llama.Server(Path("model.gguf"), 64, CPU, GREEDY, [2])
    assert server([1, 4], 2).tokens == [5, 5]
    assert server([1, 4], 9).tokens == [5, 5, 5, 2]
    assert "model.gguf" in server.facts["policy"]
    del server
    assert started[0].wait(10) is not None


def test_a_server_that_ends_at_once_is_told_with_its_last_words(on_path: Any) -> None:
    on_path(f"#!{sys.executable}\nprint('loading')\nprint('no such model')\nraise SystemExit(1)\n")
    with pytest.raises(BackendError, match="no such model"):
        llama.Server(Path("model.gguf"), 64, CPU, GREEDY, [2])


def test_without_llama_cpp_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"llama-server .* llama-cpp-python"):
        llama.refuse_missing()


def test_the_file_is_named_the_model_or_the_embedded_ones(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert llama.gguf_file(None, None) is None
    assert llama.gguf_file(str(file), None) == llama.gguf_file("some/model", file) == file
    with pytest.raises(InputError, match="gguf: way"):
        llama.gguf_file("some/model", None)
    with pytest.raises(InputError, match="is not a file"):
        llama.gguf_file(None, tmp_path / "y.gguf")
