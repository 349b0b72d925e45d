"""What a deployment needs: key files, a Unix socket, paths for probes, levels of the log, names of metrics."""

from __future__ import annotations

import contextlib
import logging.config
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families

import specengine
from specengine.cli.commands import make_parser
from specengine.cli.serve import settings_of
from specengine.errors import InputError
from specengine.protocol.settings import LEVELS, Settings
from specengine.serve.models import Models, ServedModel
from specengine.serve.server import Server, logging_of, open_socket
from tests.models.native_engines import needs_extension
from tests.serve.processes import ROOT, free_port
from tests.serve.served import CHAT, NAME, served, tiny_engine, until
from tests.serve.test_parallel import native_engine
from tests.serve.tiny_model import save

OPEN = ("/live", "/version", "/ready", "/health", "/healthz", "/v1/health", "/")
LOCKED = ("/metrics", "/v1/models", "/openapi.json", "/props", "/live/more", "/versions")


def settings(*words: str) -> Settings:
    return settings_of(make_parser().parse_args(["serve", *words]))


# ---- keys


def write(file: Path, text: str, mode: int = 0o600) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


@given(
    keys=st.lists(
        st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1).filter(
            lambda key: not key.startswith("#")
        ),
        min_size=1,
    ),
    around=st.sampled_from(["\n", "\r\n", "\n\n", "  \n# comment\n", "\t\n"]),
)
def test_a_file_holds_a_key_a_line(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], around: str
) -> None:
    file = write(tmp_path_factory.getbasetemp() / "keys", "# ours\n" + around.join(keys))
    assert settings("--api-key-file", str(file)).api_keys == tuple(keys)


def test_a_comment_may_stand_behind_a_key(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "key-a # laptop\n\tkey#b\t# phone\n  # nobody's\n")
    assert settings("--api-key-file", str(file)).api_keys == ("key-a", "key#b")


def test_keys_of_a_file_join_those_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "keys", "one\ntwo\n")
    monkeypatch.setenv("SPECENGINE_API_KEY", "of the environment")
    given = settings("--api-key", "zero", "--api-key-file", str(file))
    assert given.api_keys == ("zero", "one", "two")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a file with a key in a line"),
        (b"# none yet\n\n  \n", "a file with a key in a line"),
        (b"good\nsecret key\n", "line 2: got one with other characters"),
        ("schlüssel".encode(), "line 1: got one with other characters"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_keys_opens_no_server(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"^api_key_file: ") as caught:
        settings("--api-key-file", str(file))
    assert str(file) in str(caught.value)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("mode", "noted"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_can_read_is_noted(
    tmp_path: Path, mode: int, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "keys", "key\n", mode)
    settings("--api-key-file", str(file))
    assert (f"every user of this machine can read {file}" in capsys.readouterr().err) is noted


# ---- a file of options


def serve(*words: str, config: Path | None = None) -> Any:
    more = [] if config is None else ["--config", str(config)]
    parsed = vars(make_parser().parse_args(["serve", *words, *more]))
    return {name: value for name, value in parsed.items() if name not in ("config", "loads")}


CONFIG = """
port = 8001
served-model-name = "n"
api_key = ["one", "two"]
max_seconds = 2.5
strict_model = true
log_contents = false
pack = false
policy-option = ["teeth=2", "width=3"]
model = ["a/b", "x=c/d"]
"""


def test_a_file_says_what_the_command_line_would(tmp_path: Path) -> None:
    words = (
        "--port 8001 --served-model-name n --api-key one --api-key two --max-seconds 2.5 --strict-model --no-pack "
        "-o teeth=2 -o width=3 --model a/b --model x=c/d"
    )
    assert serve(config=write(tmp_path / "c.toml", CONFIG)) == serve(*words.split())


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--port=9"], {"port": 9}),
        (["--api-key", "three"], {"api_key": ["three"]}),
        (["--pack"], {"pack": True}),
        (["-o", "width=1"], {"policy_option": [("width", "1")]}),
        (["--model", "e/f"], {"models": ["e/f"]}),
        (["e/f"], {"model": "e/f", "models": []}),
    ],
)
def test_the_command_line_wins_over_the_file(
    tmp_path: Path, words: list[str], changed: dict[str, Any]
) -> None:
    config = write(tmp_path / "c.toml", CONFIG)
    assert changed.keys() <= serve().keys()
    assert serve(*words, config=config) == serve(config=config) | changed


def test_each_option_may_stand_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve("--help")
    names = set(re.findall(r"(?m)^  (?:-\w \S+, )?--([a-z-]+)", capsys.readouterr().out))
    assert len(names) > 40
    for name in names - {"help", "config"}:
        with contextlib.suppress(SystemExit):  # for its value
            serve(config=write(tmp_path / "c.toml", f"{name} = 1"))
        assert "unknown option" not in capsys.readouterr().err, name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt = 'a b'", "unknown option 'prt'; did you mean --port?"),
        ("[serve]\nport = 1", "unknown option 'serve'"),
        ("port = 'x'", "argument --port: invalid int value: 'x'"),
        ("port = 99999", "port: got 99999, accepted 0 to 65535"),
        ("strict_model = 'yes'", "argument --strict-model: ignored explicit argument 'yes'"),
        ("port =", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_mistake_in_the_file_is_named(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises((SystemExit, InputError)) as caught:
        settings("--config", str(file))
    assert message in capsys.readouterr().err + str(caught.value)


# ---- probes


@pytest.fixture(scope="module")
def loading() -> Iterator[Any]:
    """A server with keys whose model is loaded when `done` is set."""
    done = threading.Event()

    def load() -> Any:
        done.wait(60)
        return tiny_engine(draft="none")

    with served(load, wait=False, api_keys=("right", "other")) as server:
        server.done = done  # type: ignore[attr-defined]
        try:
            yield server
        finally:
            done.set()


def test_probes_need_no_key_and_tell_living_from_ready(loading: Any) -> None:
    ask = loading.client.get
    assert {path: ask(path).status_code for path in LOCKED} == dict.fromkeys(LOCKED, 401)
    for path in ("/live", "/version"):
        reply = {"status": "ok", "version": specengine.__version__}
        assert (ask(path).status_code, ask(path).json()) == (200, reply)
    assert {ask(path).status_code for path in ("/ready", "/health")} == {503}
    loading.done.set()
    until(lambda: loading.worker.state != "loading", 120)
    assert {path: ask(path).status_code for path in OPEN} == dict.fromkeys(OPEN, 200)
    assert loading.client.head("/ready").status_code == 200
    for key in ("right", "other"):
        headers = {"Authorization": f"Bearer {key}"}
        assert loading.post(CHAT | {"max_tokens": 1}, headers=headers).status_code == 200
        assert ask("/metrics", headers=headers).status_code == 200


# ---- a Unix socket


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A short path: the system takes 107 bytes."""
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        yield "s.sock"
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o600), (0o007, 0o660), (0o077, 0o600), (0, 0o660)]
)
def test_a_socket_is_for_this_user_and_perhaps_the_group(path: str, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        opened, address = open_socket(Settings(NAME, unix_socket=path))
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert (stat.S_IMODE(os.stat(path).st_mode), address) == (mode, f"unix:{path}")
    opened.close()
    assert not os.path.lexists(path)
    opened.close()  # a second time takes nothing of another server away


@pytest.mark.parametrize("words", [["--port", "8001"], ["--host", "0.0.0.0"]])
def test_a_socket_has_neither_host_nor_port(words: list[str]) -> None:
    with pytest.raises(InputError, match=r"unix_socket: got s\.sock, accepted alone, without"):
        settings("--unix-socket", "s.sock", *words)
    assert settings("--unix-socket", "s.sock").port == settings().port


def test_a_socket_that_was_left_is_replaced_and_one_in_use_is_not(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    opened, _ = open_socket(Settings(NAME, unix_socket=path))
    with opened, pytest.raises(InputError, match=f"unix_socket: cannot listen at {path}"):
        open_socket(Settings(NAME, unix_socket=path))
    assert not os.path.lexists(path)


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing", "long", "no folder"])
def test_a_path_that_is_no_socket_stays_as_it_is(path: str, kind: str) -> None:
    if kind == "file":
        Path(path).write_text("mine")
    elif kind == "folder":
        Path(path).mkdir()
    elif kind == "link to nothing":
        Path(path).symlink_to("nothing")
    name = {"long": "s" * 200, "no folder": "none/s.sock"}.get(kind, path)
    with pytest.raises(InputError, match="unix_socket: cannot listen at"):
        open_socket(Settings(NAME, unix_socket=name))
    assert kind != "file" or Path(path).read_text() == "mine"
    assert os.path.lexists(path) is (kind in ("file", "folder", "link to nothing"))


def test_a_server_answers_at_a_socket_believes_its_proxy_and_takes_it_away(path: str) -> None:
    chosen = Settings(NAME, unix_socket=path, drain_seconds=2)
    models = Models([ServedModel(NAME, lambda: tiny_engine(draft="none"))], chosen)
    opened, _ = open_socket(chosen)
    server = Server(models, log_config=None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    try:
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=30) as client:
            until(lambda: server.started and models.first.state == "ready", 120)
            asked = CHAT | {"max_tokens": 4}
            assert client.post("/v1/chat/completions", json=asked).status_code == 200
            headers = {"X-Forwarded-For": "203.0.113.9"}
            assert client.get("/live", headers=headers).status_code == 200
            elsewhere = client.get("/live", headers={"Host": "evil.example"})
            assert elsewhere.status_code == 403
    finally:
        server.should_exit = True
        thread.join(60)
    assert not os.path.lexists(path)


def _answers(path: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            return client.get("/live").status_code == 200
    return False


@pytest.mark.slow
def test_a_signal_takes_the_socket_away(path: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny")
    words = [sys.executable, "-m", "specengine", "serve", str(folder), "--draft", "none"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*words, "--unix-socket", path], env=environment) as process:
        try:
            until(lambda: _answers(path), 120)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
    assert not os.path.lexists(path)


# ---- the log


@pytest.mark.parametrize("level", LEVELS)
def test_the_log_has_its_level(level: str) -> None:
    levels = [each["level"] for each in logging_of(level)["loggers"].values()]
    assert levels == [level.upper()] * 2
    assert settings("--log-level", level).log_level == level


def test_another_level_is_refused() -> None:
    with pytest.raises(InputError, match="log_level: got 'all', accepted debug, info"):
        Settings(NAME, log_level="all")
    with pytest.raises(SystemExit):
        settings("--log-level", "all")


@pytest.mark.parametrize("level", LEVELS)
def test_probes_are_lines_of_debugging(level: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        logging.config.dictConfig(logging_of(level))
        log = logging.getLogger("uvicorn.access")
        for path in ("/live", "/ready", "/health?a=b", "/metrics", "/v1/models", "/livery"):
            log.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", path, "1.1", 200)
        logging.getLogger("uvicorn.error").info("Started server process [%d]", 5)
        logging.getLogger("specengine.serve").warning("loading")
    finally:
        for name in ("uvicorn", "specengine.serve"):
            logging.getLogger(name).handlers.clear()
            logging.getLogger(name).setLevel(logging.NOTSET)
            logging.getLogger(name).propagate = True
    lines = capfd.readouterr().err.splitlines()
    probes = [line for line in lines if re.search("/(live|ready|health|metrics)[ ?]", line)]
    assert len(probes) == (4 if level == "debug" else 0)
    assert all(" DEBUG 127.0.0.1:5 " in line for line in probes)
    others = {"debug": 4, "info": 4, "warning": 1, "error": 0}
    assert len(lines) - len(probes) == others[level]


# ---- metrics


def problems(text: str) -> Iterator[str]:
    """Yield what `promtool check metrics` finds in Prometheus' text: its rules of names, help and types."""
    for family in text_string_to_metric_families(text):
        if not family.documentation:
            yield f"{family.name}: no help"
        if family.type == "unknown":
            yield f"{family.name}: no type"
        names = {sample.name for sample in family.samples}
        if family.type == "counter" and any(not name.endswith("_total") for name in names):
            yield f"{family.name}: a counter without _total"
        if family.type != "counter" and family.name.endswith("_total"):
            yield f"{family.name}: _total, but no counter"
        if family.type in ("gauge", "counter") and re.search(
            "_(count|sum|bucket|info)$", family.name
        ):
            yield f"{family.name}: the end of a histogram's or summary's name"
        if re.search(r"[A-Z:]|(^|_)(counter|gauge|histogram|summary)(_|$)", family.name):
            yield f"{family.name}: a colon, a capital, or its type"
        if re.search(
            r"_(s|ms|us|ns|sec|b|kb|mb|gb|m|h|d|minutes|hours|percent|bits)(_|$)", family.name
        ):
            yield f"{family.name}: not a base unit, or an abbreviated one"


@needs_extension
@pytest.mark.parametrize("parallel", [1, 2])
def test_metrics_are_named_as_prometheus_wants(parallel: int) -> None:
    with served(native_engine, parallel=parallel) as server:
        assert server.post(CHAT).status_code == 200
        assert server.post({"nonsense": 1}).status_code == 400
        text = server.client.get("/metrics").text
    assert list(problems(text)) == []
    assert "_created" not in text
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert all(name.startswith("specengine_") for name in families)
    assert families["specengine_request_success"] == "counter"
    assert families["specengine_time_to_first_token_seconds"] == "histogram"
    assert ("specengine_iteration_tokens" in families) is (parallel > 1)


@pytest.mark.parametrize(
    "line",
    ["a:b 1", "x_total 1", "wait_ms 1", "x_count 1"],
)
def test_a_bad_name_is_told(line: str) -> None:
    name = line.partition(" ")[0]
    assert list(problems(f"# HELP {name} x\n# TYPE {name} gauge\n{line}\n"))


def test_two_servers_have_ports_of_their_own() -> None:
    port = free_port()
    opened, address = open_socket(Settings(NAME, port=port))
    with opened, pytest.raises(InputError, match=f"host, port: cannot listen at 127.0.0.1:{port}"):
        open_socket(Settings(NAME, port=port))
    assert address == f"http://127.0.0.1:{port}/v1"
