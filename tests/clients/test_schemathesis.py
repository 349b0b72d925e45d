"""Requests that Schemathesis makes of the server's own /openapi.json, valid and invalid, and what is answered."""

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

st = shutil.which("st", path=str(Path(sys.executable).parent))


@pytest.mark.slow
@pytest.mark.skipif(st is None, reason="schemathesis is not installed")
def test_no_failures_and_answers_of_the_media_types_in_the_schema(
    tiny_server: str, tmp_path: Path
) -> None:
    config = Path(__file__).with_name("schemathesis.toml")
    command = [
        str(st),
        "--config-file",
        str(config),
        "run",
        f"{tiny_server}/openapi.json",
        "--no-color",
    ]
    options = [
        "--max-examples",
        "50",
        "--phases",
        "coverage,fuzzing",
        "--seed",
        "1",
        "--continue-on-failure",
    ]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout
    with urllib.request.urlopen(f"{tiny_server}/openapi.json") as answer:
        operations = sum(len(methods) for methods in json.load(answer)["paths"].values())
    assert f"Tested: {operations}" in done.stdout, done.stdout
