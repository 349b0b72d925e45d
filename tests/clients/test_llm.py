"""Simon Willison's `llm`, as its users set it up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llm")
pytestmark = pytest.mark.slow

MODELS = """
- model_id: local
  model_name: local
  api_base: {0}/v1
  supports_tools: true
  supports_schema: true
- model_id: text
  model_name: local
  api_base: {0}/v1
  completion: true
"""
SCHEMA = {
    "type": "object",
    "properties": {"river": {"enum": ["Nile", "Po"]}},
    "required": ["river"],
}
TOOL = 'def look_up(river: str) -> str:\n    "Look a river up"\n    return "wet"\n'


@pytest.fixture
def home(tmp_path: Path, scripted_server: str) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(scripted_server))
    return tmp_path


def ran(home: Path, *arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(home)}
    done = subprocess.run(
        command, env=environment, input="", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def logged(home: Path) -> dict[str, Any]:
    return dict(json.loads(ran(home, "logs", "--json", "-n", "1"))[0])


@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_chats_and_tools(home: Path, how: list[str]) -> None:
    assert ran(home, "-m", "local", *how, "Hello") == "You said: Hello"
    entry = logged(home)
    assert (entry["input_tokens"], entry["output_tokens"]) == (
        len("Hello") + 3,
        len("You said: Hello") + 1,
    )
    assert ran(home, *how, "-c", "And more") == "You said: And more"
    assert logged(home)["input_tokens"] > 2 * len("Hello")
    assert ran(home, "-m", "local", *how, "--functions", TOOL, "Hello") == "It is wet."
    assert logged(home)["tool_results"][0]["output"] == "wet"


def test_schemas_and_texts(home: Path) -> None:
    assert json.loads(ran(home, "-m", "local", "--schema", json.dumps(SCHEMA), "Hello"))[
        "river"
    ] in ("Nile", "Po")
    assert (
        ran(home, "-m", "text", "-o", "max_tokens", "8", "-o", "logprobs", "1", "Hello") is not None
    )
    assert logged(home)["response_json"]["object"] == "text_completion"
