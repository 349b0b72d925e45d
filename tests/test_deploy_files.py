"""The files of integrations/deploy: what they name is there, and what they run is accepted."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from specengine.cli.commands import make_parser

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "integrations" / "deploy"


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with what follows them, continued lines joined."""
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def unit() -> configparser.ConfigParser:
    read = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read(FOLDER / "specengine.service")
    return read


def test_the_dockerfile_copies_what_is_there() -> None:
    known = {"FROM", "RUN", "WORKDIR", "ENV", "COPY", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK"}
    assert {name for name, _ in instructions()} == known | {"ENTRYPOINT"}
    copied = [rest.split()[:-1] for rest in of("COPY") if not rest.startswith("--from")]
    paths = [path for group in copied for path in group]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert {"specengine", "csrc", "kernels", "heads", "setup.py", "constraints.txt"} <= set(paths)


def test_the_image_installs_the_pinned_torch_and_extras_that_exist() -> None:
    steps = "\n".join(of("RUN"))
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert len([line for line in pins if line.startswith("torch==")]) == 1
    assert "grep '^torch==' constraints.txt" in steps
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.search(r"-c constraints\.txt '\.\[(\w+)\]' \./(\w+)", steps)
    assert found is not None
    assert found[1] in extras["optional-dependencies"]
    assert (ROOT / found[2] / "pyproject.toml").exists()


def test_the_image_runs_without_root_and_says_whether_it_is_ready() -> None:
    names = [name for name, _ in instructions()]
    assert of("USER") == ["specengine"]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "/ready" in of("HEALTHCHECK")[0]


@pytest.mark.parametrize("words", ["", "MODEL --log-level warning"])
def test_the_command_of_the_image_is_accepted(words: str) -> None:
    command = [*json.loads(of("ENTRYPOINT")[0]), *words.split()]
    assert command[0] == "specengine"
    parsed = make_parser().parse_args(command[1:])
    assert (parsed.host, parsed.api_key_file) == ("0.0.0.0", Path("/run/secrets/keys"))


def test_the_unit_starts_what_is_accepted_where_the_proxies_look() -> None:
    service = unit()["Service"]
    program, *words = shlex.split(service["ExecStart"])
    parsed = make_parser().parse_args(words)
    assert program == "/opt/specengine/bin/specengine"
    assert service["LoadCredential"].startswith(f"{parsed.api_key_file.name}:")
    assert float(service["TimeoutStopSec"]) > parsed.drain_seconds
    assert parsed.unix_socket == f"/run/{service['RuntimeDirectory']}/http.sock"
    assert not int(service["UMask"], 8) & 0o070
    for proxy in ("Caddyfile", "nginx.conf"):
        assert parsed.unix_socket in (FOLDER / proxy).read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    text = (FOLDER / "specengine.service").read_text()
    program = "/opt/specengine/bin/specengine"
    file = tmp_path / "specengine.service"
    file.write_text(text.replace(program, "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    told = [line for line in done.stderr.splitlines() if str(file) in line or "Unknown" in line]
    assert told == []


@pytest.mark.parametrize(
    ("proxy", "streams"),
    [("Caddyfile", "flush_interval -1"), ("nginx.conf", "proxy_buffering off;")],
)
def test_proxies_pass_tokens_on_as_they_come(proxy: str, streams: str) -> None:
    text = re.sub(r"#.*", "", (FOLDER / proxy).read_text())
    assert streams in text
    assert text.count("{") == text.count("}") > 1
    if proxy == "nginx.conf":
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        assert all(line.endswith((";", "{", "}")) for line in lines)
        assert "proxy_set_header X-Forwarded-For $remote_addr;" in lines
