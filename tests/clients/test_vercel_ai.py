"""Vercel's AI SDK for JavaScript, over chat completions and over Responses; `make test-clients` installs it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
FOLDER = Path(__file__).with_name("node")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NODE is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules").is_dir(), reason="npm has not installed tests/clients/node"
    ),
]


@pytest.mark.parametrize("provider", ["compatible", "responses"])
def test_texts_tools_and_objects(scripted_server: str, provider: str) -> None:
    command = [str(NODE), "ask.mjs", scripted_server, provider]
    done = subprocess.run(
        command, cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    said = "You said: Hello"
    assert found["whole"] == {
        "text": said,
        "finishReason": "stop",
        "output": len(said) + 1,
        "steps": 1,
    }
    parts = found["streamed"].pop("parts")
    assert found["streamed"] == found["whole"]
    assert ("".join(parts), len(parts) > 1) == (said, True)
    for loop in ("loop", "loopStreamed"):
        assert (found[loop]["text"], found[loop]["finishReason"], found[loop]["steps"]) == (
            "It is wet.",
            "stop",
            2,
        )
    assert found["forced"][0]["river"] in ("Nile", "Po")
    assert all(one["river"] in ("Nile", "Po") for one in found["structured"])
    assert found["structuredLoop"] == [{"river": "Po"}] * 2
    assert found["called"].count("Po") >= 4
