"""Several engines: the same bytes in a batch, a server that loses one of them, and what is known of conversations."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from ray.exceptions import ActorDiedError
from starlette.requests import Request

from specengine import Engine
from specengine.batch import answering, lines, spread
from specengine.batch.answering import Answered
from specengine.batch.files import beside
from specengine.cli.given import EngineArguments
from specengine.errors import InputError
from specengine.protocol.problems import RequestError
from specengine.protocol.replies import last_words
from specengine.protocol.settings import Settings
from specengine.replicas import Scale, cluster
from specengine.serve import front
from specengine.serve.front import conversation_of
from specengine.serve.metrics import Added, Metrics
from tests.batch import files, kills
from tests.replicas.clusters import workers
from tests.replicas.deadly import DEADLY, Deadly
from tests.replicas.replicated import Replicated, replicated
from tests.serve.served import NAME, until

pytestmark = pytest.mark.usefixtures("one_thread")
CHATS = 100


# ---- batch


@pytest.mark.slow
def test_a_batch_loses_nothing_to_workers_that_end(
    model: Path, address: str, tmp_path: Path
) -> None:
    """One prompt ends whichever process has it."""
    entries = [*files.lines(20), {"id": "deadly", "prompt": DEADLY}, *files.lines(27)[20:]]
    items = lines.read(files.write(tmp_path / "in.jsonl", entries), {"max_new_tokens": 12}).items
    expected = list(
        answering.answered(
            EngineArguments(str(model)).load,
            [item for item in items if item.id != "deadly"],
            lambda _: None,
        )
    )
    scale = Scale(2, threads=1, address=address)
    loaded: list[Any] = []
    with cluster.running(scale):
        spreading = spread.Spread(Deadly(str(model), threads=1).load, scale, loaded.append)
        found = list(spread.in_order(spreading.answered(items), 0))
    assert [answered.line for answered in found if answered.line["id"] != "deadly"] == [
        each.line for each in expected
    ]
    assert [answered.place for answered in found] == list(range(len(items)))
    error = found[20].line["error"]
    assert (error["type"], error["message"]) == (
        "ReplicaError",
        "the process that answered it ended, 3 times",
    )
    assert all(facts == loaded[0] for facts in loaded)
    # each of the three that ended had loaded; whether a fourth has, before the rest is answered, the machine decides
    assert len(loaded) > scale.replicas, "replicas that have ended are replaced"


@pytest.mark.slow
def test_a_cluster_without_room_is_refused_and_a_model_that_is_not_there_is_named(
    model: Path, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = files.write(tmp_path / "in.jsonl", ["a"])
    on = ("--ray-address", address, "--replicas")
    assert files.batch(file, tmp_path / "1.jsonl", model, *on, "9", "--threads", "2") == 2
    assert "9 replicas need 18 CPUs, accepted up to 4" in capsys.readouterr().err
    assert (
        files.batch(file, tmp_path / "2.jsonl", tmp_path / "none", *on, "2", "--threads", "1") == 2
    )
    assert "replicas" not in (said := capsys.readouterr().err), said


@pytest.mark.slow
@pytest.mark.parametrize("lines_before", [0, 3], ids=["loading", "answering"])
def test_ctrl_c_ends_a_batch_of_replicas_which_goes_on(
    lines_before: int, model: Path, address: str, tmp_path: Path
) -> None:
    """A terminal sends it to every process of the command."""
    prompts, out, whole = (tmp_path / f"{name}.jsonl" for name in ("in", "out", "whole"))
    files.write(prompts, files.lines(42))
    more = ("--max-new-tokens", "60")
    command = [
        sys.executable,
        "-m",
        "specengine",
        "batch",
        str(prompts),
        "--out",
        str(out),
        "--model",
        str(model),
    ]
    on = ("--replicas", "2", "--threads", "1", "--ray-address", address)
    with subprocess.Popen(
        [*command, *more, *on],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    ) as run:
        until(lambda: beside(out).exists() and kills.length(out) >= lines_before, 120)
        os.killpg(run.pid, signal.SIGINT)
        said = run.communicate(timeout=60)[1]
    assert run.returncode == 130, said
    assert "Traceback" not in said
    assert said.endswith(
        f"specengine: stopped; {out} keeps what was done so far, and the same command goes on from there\n"
    )
    assert kills.length(out) < 42
    assert (
        files.batch(prompts, out, model, *more, *on)
        == files.batch(prompts, whole, model, *more)
        == 1
    )
    assert kills.is_same(out, whole)


def test_answers_are_put_in_order_as_early_as_can_be() -> None:
    come = [Answered(place, {}, []) for place in (5, 3, 4, 7, 6)]
    seen: list[int] = []

    def coming() -> Any:
        for answered in come:
            seen.append(answered.place)
            yield answered

    order = [(answered.place, len(seen)) for answered in spread.in_order(coming(), 3)]
    assert order == [(3, 2), (4, 3), (5, 3), (6, 5), (7, 5)]


# ---- server


def chat(text: str, *more: str, **options: Any) -> dict[str, Any]:
    """A conversation of which `text` is the first turn, and `more` the turns behind it, the model's and the user's."""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[place % 2], "content": said} for place, said in enumerate((text, *more))
    ]
    return {"model": NAME, "messages": messages, "max_tokens": 16, **options}


@pytest.mark.slow
def test_a_server_of_two_replicas(model: Path, address: str) -> None:
    with replicated(model, address, queue=CHATS, api_keys=("right",)) as server:
        assert server.client.post("/v1/chat/completions", json=chat("x")).status_code == 401
        server.client.headers["Authorization"] = "Bearer right"
        assert server.client.get("/v1/models").json()["data"][0]["id"] == NAME
        _second_turns_go_where_the_first_was(server)
        _streams_are_the_same(server)
        _who_goes_away_is_not_answered(server)
        _one_of_two_is_killed(server, model, address)


def _second_turns_go_where_the_first_was(server: Replicated) -> None:
    """Two conversations in turn, one on each replica at the most: each finds its own beginning."""
    for number in range(3):
        first = server.client.post("/v1/chat/completions", json=chat(f"hello {number}")).json()
        said = first["choices"][0]["message"]["content"]
        turn = chat(f"hello {number}", said, "and then?")
        usage = server.client.post("/v1/chat/completions", json=turn).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > len(f"hello {number}")


def _streams_are_the_same(server: Replicated) -> None:
    whole = server.client.post(
        "/v1/chat/completions", json=chat("a stream", return_token_ids=True)
    ).json()
    text = server.client.post(
        "/v1/chat/completions", json=chat("a stream", stream=True, return_token_ids=True)
    ).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert f'"finish_reason":"{whole["choices"][0]["finish_reason"]}"' in events[-2]
    refused = server.client.post("/v1/chat/completions", json=chat("x", nonsense=1, stream=True))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "nonsense")


def _who_goes_away_is_not_answered(server: Replicated) -> None:
    asked = chat("long", max_tokens=470, ignore_eos=True, stream=True)

    def leave() -> bool:
        with server.client.stream("POST", "/v1/chat/completions", json=asked) as coming:
            next(coming.iter_lines())
        until(lambda: server.metric("num_requests_running") == 0, 30)
        return server.metric('request_success_total{finished_reason="abort"}') > 0

    until(leave, 30)  # one may have ended before the word of it came


def _one_of_two_is_killed(server: Replicated, model: Path, address: str) -> None:
    """A hundred clients meanwhile: each is answered rightly, or told to come again."""
    engine = Engine.from_pretrained(str(model))
    expected = {
        number: engine.generate(chat(f"c{number}")["messages"], max_new_tokens=16).text
        for number in range(9)
    }
    counted = server.metric("generation_tokens_total")
    done: list[tuple[int, httpx.Response]] = []

    async def crowd() -> None:
        limits = httpx.Limits(max_connections=CHATS)
        headers = server.client.headers
        async with httpx.AsyncClient(
            base_url=server.address, timeout=120, limits=limits, headers=headers
        ) as client:

            async def ask(number: int) -> None:
                answer = await client.post("/v1/chat/completions", json=chat(f"c{number % 9}"))
                done.append((number % 9, answer))

            asking = [asyncio.create_task(ask(number)) for number in range(CHATS)]
            while len(done) < CHATS // 10:
                await asyncio.sleep(0.01)
            workers(address, "ServeReplica")[0].kill()
            await asyncio.gather(*asking)

    asyncio.run(crowd())
    statuses = Counter(answer.status_code for _, answer in done)
    assert set(statuses) <= {200, 429, 503}, statuses
    assert statuses[200] > CHATS // 2, statuses
    for number, answer in done:
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["message"]["content"] == expected[number]
        else:
            assert int(answer.headers["Retry-After"]) >= 1
    assert len(done) == CHATS
    assert server.client.post("/v1/chat/completions", json=chat("after")).status_code == 200
    assert server.metric("generation_tokens_total") >= counted, (
        "what a lost replica had counted stays"
    )


@pytest.mark.slow
def test_each_replica_answers_several_at_once(model: Path, address: str) -> None:
    engine = Engine.from_pretrained(str(model))
    messages = [chat(f"c{number}")["messages"] for number in range(24)]
    long: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
    expected = [
        engine.generate(asked, max_new_tokens=300, eos_token_id=[]).token_ids for asked in messages
    ]
    with (
        replicated(model, address, parallel=2, queue=CHATS) as server,
        ThreadPoolExecutor(24) as many,
    ):

        def ask(number: int) -> tuple[list[int], int]:
            answer = server.client.post(
                "/v1/chat/completions", json=chat(f"c{number}", **long)
            ).json()
            return answer["choices"][0]["token_ids"], answer["metrics"]["speculative_decoding"][
                "num_spec_steps"
            ]

        jobs = [many.submit(ask, number) for number in range(24)]
        until(lambda: server.metric("num_requests_running") == 4)
        tokens, cycles = zip(*(job.result() for job in jobs), strict=True)
        assert list(tokens) == expected
        assert server.metric("iteration_tokens_total_count") < 0.8 * sum(cycles), (
            "one pass serves several"
        )


# ---- without a cluster


@pytest.mark.parametrize("pieces", [0, 1])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream; charset=utf-8"])
def test_an_answer_that_breaks_off_is_refused_before_its_first_piece_and_ends_behind_it(
    kind: bytes, pieces: int
) -> None:
    async def coming() -> Any:
        yield {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        for _ in range(pieces):
            yield {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
        raise ActorDiedError

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    if not pieces:
        with pytest.raises(RequestError) as error:
            asyncio.run(front._pass(coming(), send))
        assert (error.value.status, error.value.headers, sent) == (503, {"Retry-After": "1"}, [])
    else:
        asyncio.run(front._pass(coming(), send))
        assert [message["type"] for message in sent] == ["http.response.start"] + [
            "http.response.body"
        ] * 2
        assert (b"replica_lost" in sent[-1]["body"], sent[-1]["more_body"]) == (
            kind != b"application/json",
            False,
        )


def test_counters_are_added_and_stay_where_a_replica_goes() -> None:
    first, second = Metrics(), Metrics()
    added = Added()
    first.counters["generation_tokens"].inc(3)
    second.counters["generation_tokens"].inc(4)
    first.running.set(1)
    second.running.set(1)
    first.times["time_to_first_token"].observe(0.02)
    second.times["time_to_first_token"].observe(20)
    added.take([("a", first.text().decode()), ("b", second.text().decode())])
    assert _value(added, "generation_tokens_total") == 7
    assert _value(added, "num_requests_running") == 2
    assert _value(added, 'time_to_first_token_seconds_bucket{le="0.025"}') == 1
    assert _value(added, 'time_to_first_token_seconds_bucket{le="+Inf"}') == 2
    second.counters["generation_tokens"].inc(1)
    added.take([("b", second.text().decode())])
    assert _value(added, "generation_tokens_total") == 8
    assert _value(added, "num_requests_running") == 1


def test_a_front_answers_probes_without_a_key_or_a_replica() -> None:
    async def ask() -> dict[str, int]:
        transport = httpx.ASGITransport(front.Front(Settings(NAME, api_keys=("key",))).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            paths = ("/live", "/version", "/ready", "/metrics")
            return {path: (await client.get(path)).status_code for path in paths}

    assert asyncio.run(ask()) == {"/live": 200, "/version": 200, "/ready": 503, "/metrics": 401}


def test_a_share_of_several_replicas_is_their_mean() -> None:
    added = Added()
    text = "# TYPE specengine_kv_cache_usage_perc gauge\nspecengine_kv_cache_usage_perc {}\n"
    front = "# TYPE specengine_num_requests_running gauge\nspecengine_num_requests_running 0\n"
    added.take([("front", front), ("a", text.format(0.5)), ("b", text.format(0.1))])
    assert _value(added, "kv_cache_usage_perc") == pytest.approx(0.3)


def _value(added: Added, name: str) -> float:
    lines = added.text().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"specengine_{name}"))


def test_a_conversation_is_known_by_its_beginning() -> None:
    def of(asked: dict[str, Any]) -> str | None:
        return conversation_of(httpx.Request("POST", "http://x", json=asked).read())

    system = {"role": "system", "content": "be kind"}
    start = of(chat("one"))
    assert start == of(chat("one", "yes", "two", temperature=1)) is not None
    assert start != of(chat("another"))
    assert start != of({"messages": [system, *chat("one")["messages"]]})
    assert of({"prompt": "a" * 300}) == of({"prompt": "a" * 256 + "b"}) != of({"prompt": "b"})
    item = {"role": "user", "content": "one"}
    assert (
        of({"input": "one"})
        == of({"input": [item, {"type": "function_call"}]})
        != of({"input": "two"})
    )
    assert of({"input": "one", "instructions": "be kind"}) != of({"input": "one"})
    messages = chat("one")["messages"]
    assert of({"messages": messages, "system": "be kind"}) != of({"messages": messages}) == start
    assert (
        of({"input_prefix": "a" * 300, "input_suffix": "b"})
        == of({"input_prefix": "a" * 256})
        is not None
    )
    for nothing in ({}, {"prompt": 3}, {"messages": []}, {"input": 3}, {"input": []}):
        assert of(nothing) is None
    assert conversation_of(b"{") is conversation_of(b"[1]") is None


@pytest.mark.parametrize(
    ("path", "media", "last"),
    [
        ("/v1/chat/completions", "text/event-stream", b'data: {"error":{"message":"lost",'),
        ("/v1/messages", "text/event-stream", b'event: error\ndata: {"type":"error",'),
        ("/api/chat", "application/x-ndjson", b'{"error":"lost"}\n'),
        ("/api/chat", "application/json", b""),
    ],
)
def test_a_stream_that_is_lost_ends_in_its_protocol(path: str, media: str, last: bytes) -> None:
    said = last_words(RequestError(503, "lost"), media, path)
    assert said.startswith(last)
    assert bool(said) == bool(last)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"replicas": 0}, "replicas: got 0"),
        ({"threads": 0}, "threads: got 0"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas: got 2, accepted 3 or more"),
    ],
)
def test_a_scale_out_of_range_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Scale(**given)


def test_a_replica_is_told_no_name_of_a_stream() -> None:
    """It would keep a stream that another may be asked for; other headers come through."""
    told: list[dict[bytes, bytes]] = []

    class Handle:
        """A handle of a replica that answers nothing."""

        def options(self, **_: Any) -> Any:
            return self

        @property
        def ask(self) -> Any:
            return self

        def remote(self, asking: Any, conversation: str | None) -> Any:
            told.append(dict(asking.scope["headers"]))
            return self._answer()

        async def _answer(self) -> Any:
            yield {"type": "http.response.start", "status": 200, "headers": []}
            yield {"type": "http.response.body", "body": b"{}", "more_body": False}

    made = front.Front(Settings("tiny"))
    made.handle, made.state = cast(Any, Handle()), "ready"

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(made.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"X-Stream-Id": "mine", "X-Request-Id": "7"}
            return await client.post("/v1/chat/completions", json=chat("hi"), headers=headers)

    assert asyncio.run(ask()).status_code == 200
    assert told[0][b"x-request-id"] == b"7"
    assert b"x-stream-id" not in told[0]


@pytest.mark.parametrize(("lost", "status"), [(1, 200), (2, 503)])
def test_a_request_of_which_nothing_was_sent_is_asked_of_another_replica_once(
    lost: int, status: int
) -> None:
    asked: list[Any] = []

    class Handle:
        """A handle of replicas of which the first few end before they answer."""

        def options(self, **_: Any) -> Any:
            return self

        @property
        def ask(self) -> Any:
            return self

        def remote(self, asking: Any, conversation: str | None) -> Any:
            asked.append(asking.body)
            return self._answer(len(asked) <= lost)

        async def _answer(self, ends: bool) -> Any:
            yield {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json")],
            }
            if ends:
                raise ActorDiedError
            yield {"type": "http.response.body", "body": b"{}", "more_body": False}

    made = front.Front(Settings("tiny"))
    made.handle, made.state = cast(Any, Handle()), "ready"

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(made.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/chat/completions", json=chat("hi"))

    answer = asyncio.run(ask())
    assert (answer.status_code, len(asked)) == (status, 2)
    assert asked[0] == asked[1]


@pytest.mark.parametrize("ending", ["answer", "refusal", "lost"])
def test_a_stream_that_waits_for_a_replica_is_told_its_place(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "PLACE_SECONDS", 0.02)
    free = asyncio.Event()

    class Handle:
        """One that takes no request before `free`."""

        def options(self, **_: Any) -> Any:
            return self

        @property
        def ask(self) -> Any:
            return self

        def remote(self, asking: Any, conversation: Any) -> Any:
            return self._answer(b"cycles" in asking.body)

        async def _answer(self, second: bool) -> Any:
            await free.wait()
            if second and ending == "lost":
                raise ActorDiedError
            refused, kind = second and ending == "refusal", (b"content-type", b"text/event-stream")
            yield {
                "type": "http.response.start",
                "status": 400 if refused else 200,
                "headers": [kind],
            }
            body = b'{"error": {"message": "no"}}' if refused else b"data: [DONE]\n\n"
            yield {"type": "http.response.body", "body": body, "more_body": False}

    made = front.Front(Settings("tiny"))
    made.handle, made.state = cast(Any, Handle()), "ready"

    async def ask() -> list[httpx.Response]:
        app, placed = made.app(), asyncio.Event()

        async def observed(scope: Any, receive: Any, send: Any) -> None:
            async def sent(message: Any) -> None:
                await send(message)
                if message.get("body"):
                    placed.set()

            await app(scope, receive, sent)

        transport = httpx.ASGITransport(observed, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            bodies = chat("one"), chat("two") | {"stream": True, "return_cycles": True}
            coming = [
                asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
                for body in bodies
            ]
            await asyncio.wait_for(placed.wait(), 60)
            free.set()
            return await asyncio.gather(*coming)

    one, two = asyncio.run(ask())
    assert (one.status_code, one.text) == (200, "data: [DONE]\n\n")
    assert two.status_code == 200
    places, rest = two.text.split("data: ", 1)
    assert set(places.split("\n\n")) == {": 1 before", ""}
    said = {"answer": "[DONE]", "refusal": '{"error":{"message":"no"}}', "lost": '"replica_lost"'}[
        ending
    ]
    assert said in rest
    assert not made._under_way


def test_a_front_tells_when_there_is_room_and_counts_no_question_for_health() -> None:
    made = front.Front(Settings("tiny"))
    made._mean_seconds = 6.4
    full = RequestError(429, "full", headers={"Retry-After": "1"})

    def told(path: str, problem: RequestError) -> Any:
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        return asyncio.run(made._told(Request(scope), problem))

    assert told("/v1/completions", full).headers["Retry-After"] == "7"
    counted = made._own.text()
    told("/health", RequestError(503, "the model is being loaded"))
    assert made._own.text() == counted


@pytest.mark.slow
def test_a_cluster_of_this_machine_listens_at_the_loopback_address() -> None:
    psutil = pytest.importorskip("psutil")
    script = (
        "import time; from ray import serve; from specengine.replicas import cluster; "
        "from specengine.replicas import Scale; from tests.replicas.test_replicas import Quiet\n"
        "with cluster.running(Scale(replicas=1, threads=1)):\n"
        "    serve.start(proxy_location='Disabled')\n"
        "    serve.run(serve.deployment(Quiet).bind(), name='quiet', route_prefix=None)\n"
        "    print('ready', flush=True); input()\n"
    )
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            while (line := process.stdout.readline()) and line != "ready\n":
                pass
            own = psutil.Process(process.pid)
            opened = [
                (each.name(), connection.laddr.ip)
                for each in [own, *own.children(recursive=True)]
                for connection in each.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
        finally:
            process.communicate("\n", timeout=60)
    assert len(opened) > 5
    assert {ip for _, ip in opened} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, opened


class Quiet:
    """A deployment as ours is, of nothing."""

    def __init__(self) -> None:
        assert cluster.is_alone()
        front._listen_here_alone()
