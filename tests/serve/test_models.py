"""Several models in one server: loaded at the first request that names them, unloaded where there is no room."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specengine import Engine
from specengine.cli.commands import make_parser
from specengine.cli.serve import models_of, run, size_of
from specengine.errors import InputError, SpecEngineError, UnsupportedModelError
from specengine.protocol.dialects import DIALECTS
from specengine.serve.models import GIB, ServedModel
from tests.serve import tiny_model
from tests.serve.served import NAME, Gate, Served, served, tiny_engine, until

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 4}, "stream": False},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": 4}, "stream": False},
    "/completion": {"prompt": "Hello", "n_predict": 4},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4},
}
CHAT = {"messages": HELLO, "max_tokens": 4}


class Loads:
    """Makes engines, and counts them; one of a name waits for its gate, and fails where `error` is set."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.targets: list[weakref.ref[Any]] = []
        self.gates: dict[str, threading.Event] = {}
        self.error: Exception | None = None

    def of(self, name: str, size: int = 0, make: Callable[[], Engine] = tiny_engine) -> ServedModel:
        def load() -> Engine:
            self.counts[name] = self.counts.get(name, 0) + 1
            if name in self.gates:
                assert self.gates[name].wait(30)
            if self.error is not None:
                raise self.error
            engine = make()
            self.targets.append(weakref.ref(engine))
            return engine

        return ServedModel(name, load, f"/models/{name}", lambda: size)


def loaded_in(server: Served) -> list[str]:
    data = server.client.get("/v1/models").json()["data"]
    return [model["id"] for model in data if model["status"]["value"] == "loaded"]


def ask(server: Served, model: str, **more: Any) -> httpx.Response:
    return server.post(CHAT | {"model": model} | more)


@pytest.fixture
def loads() -> Loads:
    return Loads()


def plain() -> Engine:
    return tiny_engine(draft="none")


@contextlib.contextmanager
def three(loads: Loads, **settings: Any) -> Iterator[Served]:
    others = [loads.of(name, GIB, plain) for name in ("b", "c")]
    with served(plain, *others, **settings) as server:
        yield server


def test_each_protocol_answers_with_the_model_that_it_names(loads: Loads) -> None:
    with three(loads) as server:
        assert loaded_in(server) == [NAME]
        for path, body in BODIES.items():
            for model in (NAME, "b", "/models/b"):
                answer = server.post(body | {"model": model}, path)
                if path != "/infill":  # for which this model has no tokens
                    assert answer.status_code == 200, (path, answer.text)
                    shown = {"/models/b": "b"}.get(model, model)
                    assert answer.json().get("model", shown) == shown
        assert loads.counts == {"b": 1}
        assert loaded_in(server) == [NAME, "b"]


def test_openais_client_lists_and_asks_for_two_models(loads: Loads) -> None:
    with three(loads) as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="any")
        assert [model.id for model in client.models.list()] == [NAME, "b", "c"]
        for model in ("b", NAME):
            stream = client.chat.completions.create(
                model=model,
                messages=HELLO,  # type: ignore[arg-type]
                max_tokens=4,
                stream=True,
            )
            assert {chunk.model for chunk in stream} == {model}


@pytest.mark.sliced(4)
@pytest.mark.parametrize("path", [*DIALECTS, "/tokenize", "/v1/messages/count_tokens", "/api/show"])
def test_an_unknown_name_is_refused_in_the_protocols_form(path: str, loads: Loads) -> None:
    body = BODIES.get(path, {"content": "a"} if path == "/tokenize" else {"messages": HELLO})
    body = {} if path == "/api/show" else body
    with three(loads) as server:
        for name in ("d", "/etc/passwd", "../b", "someone/model", ""):
            answer = server.post(body | {"model": name}, path)
            if path == "/api/show" and not name:
                continue
            assert answer.status_code == 404, (name, answer.text)
            error = answer.json()["error"]
            message = error if path.startswith("/api/") else error["message"]
            assert f"this server has '{NAME}', 'b', 'c'" in message
            assert (answer.json().get("type") == "error") is path.startswith("/v1/messages")
        assert loads.counts == {}


def test_one_model_answers_to_any_name_unless_it_is_strict() -> None:
    with served(plain) as server:
        assert ask(server, "any").status_code == 200
    with served(plain, strict_model=True) as server:
        assert ask(server, NAME).status_code == 200
        assert ask(server, "any").json()["error"]["message"].endswith(f"this server has '{NAME}'")


@pytest.mark.slow
@pytest.mark.parametrize("bound", [{"max_models": 2}, {"max_model_memory": 1.5}])
def test_a_bound_unloads_the_least_recently_used(loads: Loads, bound: dict[str, Any]) -> None:
    first = loads.of("a", GIB // 2, plain)
    others = first, loads.of("b", GIB // 2, plain), loads.of("c", GIB, plain)
    with served(plain, *others, **bound) as server:
        for model in ("a", "b", "a", "c") if "max_models" in bound else (NAME, "a", "b", "a", "c"):
            assert ask(server, model).status_code == 200
        if "max_models" in bound:
            assert loaded_in(server) == ["a", "c"]
            assert loads.counts == {"a": 1, "b": 1, "c": 1}
        else:  # tiny has no size: it goes first, and b after it
            assert loaded_in(server) == ["a", "c"]
        assert ask(server, "b").status_code == 200
        assert "b" in loaded_in(server)
        assert len(loaded_in(server)) == 2
        gc.collect()
        assert [target() is None for target in loads.targets].count(False) == 2


@pytest.mark.slow
def test_what_is_larger_than_the_bound_is_refused_and_nothing_is_unloaded(loads: Loads) -> None:
    with served(plain, loads.of("b", 2 * GIB, plain), max_model_memory=1.0) as server:
        answer = ask(server, "b")
        assert answer.status_code == 503
        assert (
            "max_model_memory: got 1.0, accepted 2.00 GiB or more"
            in (answer.json()["error"]["message"])
        )
        assert loaded_in(server) == [NAME]
        assert loads.counts == {}


@pytest.mark.slow
def test_a_model_with_an_answer_under_way_stays_until_it_ends(loads: Loads) -> None:
    gate = Gate()
    with (
        served(lambda: gate.engine, loads.of("b", make=plain), max_models=1) as server,
        ThreadPoolExecutor(3) as many,
    ):
        running = many.submit(ask, server, NAME)
        until(lambda: gate.passed > 0)
        waiting = many.submit(ask, server, "b")
        until(lambda: server.models.first.jobs.paused < math.inf)
        after = many.submit(ask, server, NAME)  # has its place, for when the model is back
        until(lambda: len(server.models.first.jobs) == 1)
        assert loads.counts == {}
        assert loaded_in(server) == [NAME]
        assert not running.done()
        gate.open.set()
        for each in (running, waiting, after):
            assert each.result(30).status_code == 200
        assert loads.counts == {"b": 1}


def test_two_first_requests_load_it_once_and_one_waits_in_silence_with_pings(loads: Loads) -> None:
    gate = loads.gates["b"] = threading.Event()
    with three(loads, ping_seconds=0.05) as server, ThreadPoolExecutor(2) as many:
        jobs = [many.submit(ask, server, "b") for _ in range(2)]
        until(lambda: len(server.models.workers["b"].jobs) == 2)
        assert ask(server, NAME).status_code == 200  # meanwhile others are answered
        body = CHAT | {"model": "b", "stream": True}
        with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": ping"
            gate.set()
            assert any('"finish_reason":"length"' in line for line in lines)
        assert [job.result(30).status_code for job in jobs] == [200, 200]
        assert loads.counts == {"b": 1}


@pytest.mark.slow
def test_a_load_that_fails_answers_those_that_wait_and_is_tried_again(loads: Loads) -> None:
    gate = loads.gates["b"] = threading.Event()
    loads.error = UnsupportedModelError("b: has no head")
    with three(loads, ping_seconds=0.05) as server, ThreadPoolExecutor(2) as many:
        jobs = [many.submit(ask, server, "b") for _ in range(2)]
        until(lambda: len(server.models.workers["b"].jobs) == 2)
        body = {"input": "Hello", "model": "b", "stream": True}
        with server.client.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": ping"
            gate.set()
            assert any("response.failed" in line for line in lines)
        for job in jobs:
            assert job.result(30).status_code == 503
            message = job.result().json()["error"]["message"]
            assert message == "the model could not be loaded: b: has no head"
        for path in ("/tokenize", "/api/generate"):
            refused = server.post(
                {"model": "b", "content": "a"} if path == "/tokenize" else {"model": "b"}, path
            )
            assert refused.status_code == 503
        assert ask(server, NAME).status_code == 200
        assert server.client.get("/ready").status_code == 200
        loads.error = None
        assert ask(server, "b").status_code == 200


@pytest.mark.slow
def test_a_model_says_whether_it_loads_and_why_it_did_not(loads: Loads) -> None:
    gate = loads.gates["b"] = threading.Event()
    loads.error = UnsupportedModelError("b: has no head")
    with three(loads) as server, ThreadPoolExecutor(1) as many:

        def status() -> dict[str, Any]:
            told: dict[str, Any] = server.client.get("/v1/models/b").json()["status"]
            return told

        assert status() == {"value": "unloaded"}
        waiting = many.submit(ask, server, "b")
        until(lambda: loads.counts == {"b": 1})
        assert status() == {"value": "loading"}
        gate.set()
        assert waiting.result(30).status_code == 503
        message = "the model could not be loaded: b: has no head"
        assert status() == {"value": "unloaded", "failed": True, "message": message}
        loads.error = None
        assert ask(server, "b").status_code == 200
        assert status() == {"value": "loaded"}
        server.models.workers["b"].unload()
        assert status() == {"value": "unloaded"}


@pytest.mark.slow
def test_a_client_that_leaves_while_it_waits_frees_its_place_and_loads_nothing(
    loads: Loads,
) -> None:
    gate = loads.gates["b"] = threading.Event()
    with three(loads, max_models=2) as server, ThreadPoolExecutor(1) as many:
        first = many.submit(ask, server, "b")
        until(lambda: loads.counts == {"b": 1})
        jobs = server.models.workers["c"].jobs
        connection = HTTPConnection(server.address.removeprefix("http://"))
        connection.request("POST", "/v1/completions", '{"model": "c", "prompt": "a"}')
        until(lambda: len(jobs) == 1)
        connection.close()
        until(lambda: jobs.idle)
        gate.set()
        assert first.result(30).status_code == 200
        assert ask(server, "c").status_code == 200
        assert loads.counts == {"b": 1, "c": 1}


def test_the_queue_of_a_model_that_is_not_loaded_has_its_bound(loads: Loads) -> None:
    gate = loads.gates["b"] = threading.Event()
    with three(loads, queue=1) as server, ThreadPoolExecutor(2) as many:
        jobs = [many.submit(ask, server, "b") for _ in range(2)]
        until(lambda: len(server.models.workers["b"].jobs) == 2)
        refused = ask(server, "b")
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        gate.set()
        assert [job.result(30).status_code for job in jobs] == [200, 200]


def test_what_is_said_of_models_loads_none_and_texts_do(loads: Loads) -> None:
    with three(loads) as server:
        client = server.client
        assert [each["name"] for each in client.get("/api/tags").json()["models"]] == [
            NAME,
            "b",
            "c",
        ]
        assert [each["name"] for each in client.get("/api/ps").json()["models"]] == [NAME]
        assert server.post({"model": "b"}, "/api/show").json()["capabilities"] == ["completion"]
        assert client.get("/v1/models/c").json()["status"] == {"value": "unloaded"}
        assert loads.counts == {}
        assert server.post({"model": "b", "content": "ab"}, "/tokenize").json()["count"] > 0
        assert client.get("/props", params={"model": "b"}).json()["model_alias"] == "b"
        assert server.post({"model": "c"}, "/api/generate").json()["done_reason"] == "load"
        assert loads.counts == {"b": 1, "c": 1}
        assert [each["name"] for each in client.get("/api/ps").json()["models"]] == [NAME, "b", "c"]


def test_figures_are_told_apart_by_model(loads: Loads) -> None:
    with three(loads) as server:
        for model in ("b", "b", NAME):
            assert ask(server, model).status_code == 200
        assert ask(server, "d").status_code == 404
        success = 'request_success_total{finished_reason="length",model_name='
        assert server.metric(f'{success}"b"}}') == 2
        assert server.metric(f'{success}"{NAME}"}}') == 1
        assert server.metric('request_failure_total{status="404"}') == 1


def test_a_stop_ends_those_that_wait_for_a_model(loads: Loads) -> None:
    gate = loads.gates["b"] = threading.Event()
    with three(loads, drain_seconds=0.2) as server, ThreadPoolExecutor(1) as many:
        job = many.submit(ask, server, "b")
        until(lambda: len(server.models.workers["b"].jobs) == 1)
        server.stop()
        assert job.result(30).status_code == 503
    gate.set()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"smollm2-135m-instruct": None}),
        (["a/b"], {"b": "a/b"}),
        (["--model", "a/b", "--model", "x=c/d"], {"b": "a/b", "x": "c/d"}),
        (["x=a/b", "--model", "c"], {"x": "a/b", "c": "c"}),
        (["a/b", "--served-model-name", "y"], {"y": "a/b"}),
    ],
)
def test_models_of_the_command_line(words: list[str], expected: dict[str, Any]) -> None:
    assert models_of(make_parser().parse_args(["serve", *words])) == expected


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="model: got b, accepted names that differ"):
        models_of(make_parser().parse_args(["serve", "a/b", "--model", "c/b"]))


def test_a_models_size_is_that_of_one_kind_of_its_files(tmp_path: Any) -> None:
    for name, size in (("a.safetensors", 5), ("b.safetensors", 6), ("a.bin", 10), ("x.json", 99)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert size_of(str(tmp_path)) == 11
    assert size_of(str(tmp_path / "a.bin")) == 10
    assert size_of("no/such") == size_of("no such") == size_of("x/y/z") == 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no such file or folder"),
        ({}, "model_type"),
        ({"config.json": '{"model_type": "llama"}'}, "accepted a folder with .safetensors or .bin"),
        ({"config.json": "{", "model.safetensors": ""}, "not a valid JSON file"),
        ("model.gguf", "is cut off or damaged"),
        ("other.txt", "not a valid JSON file"),
    ],
)
def test_a_model_that_is_none_is_refused_before_anything_is_served(
    files: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specengine.serve import server

    monkeypatch.setattr(server, "run", lambda *arguments: pytest.fail("it was served"))
    path = tmp_path / (files if isinstance(files, str) else "b")
    if isinstance(files, str):
        path.write_text("GG")
    elif files is not None:
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)
    words = ["serve", str(tiny_model.save(tmp_path / "a")), "--model", f"second={path}"]
    with pytest.raises(SpecEngineError, match=message) as caught:
        run(make_parser().parse_args(words))
    assert str(caught.value).startswith(("model", str(path)))
    assert str(path) in str(caught.value)


def test_the_command_serves_each_model_with_the_same_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from specengine.serve import server

    calls: list[Any] = []
    monkeypatch.setattr(server, "run", lambda *arguments: calls.append(arguments))
    monkeypatch.chdir(tmp_path)
    tiny_model.save(tiny_model.save(tmp_path) / "a/b")
    words = ["serve", "--model", "a/b", "--model", f"x={tmp_path}", "--policy", "plain"]
    assert run(make_parser().parse_args(words)) == 0
    models, settings = calls[0][:2]
    assert [(model.name, model.path) for model in models] == [("b", "a/b"), ("x", str(tmp_path))]
    assert [model.load.args[0].__self__.policy for model in models] == ["plain", "plain"]
    assert settings.name == "b"
    for more, field in ((["--learn", str(tmp_path)], "learn"), (["--replicas", "2"], "replicas")):
        with pytest.raises(InputError, match=f"^{field}: "):
            run(make_parser().parse_args([*words, *more]))
    assert len(calls) == 1
