"""Agents that edit code and run commands, each in a folder of its own; `make test-clients` installs them."""

import json
import os
import subprocess
from pathlib import Path

import pytest

MODULES = Path(__file__).with_name("node") / "node_modules"
CODEX = next(iter(sorted(MODULES.glob("@openai/codex-*/vendor/*/bin/codex"))), None)
OPENCODE = next(
    (
        path
        for path in sorted(MODULES.glob("opencode-*/bin/opencode"))
        if "baseline" not in str(path)
    ),
    None,
)
ASKED = "Say what the river does."
pytestmark = pytest.mark.slow


def run(command: list[str], folder: Path, **more: str) -> str:
    """Return what it prints; its home is the folder."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"HOME": str(folder), "PWD": str(folder), "KEY": "any"} | more,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(CODEX is None, reason="npm has not installed Codex in tests/clients/node")
def test_codex_runs_a_command_and_tells_what_came_of_it(
    scripted_server: str, tmp_path: Path
) -> None:
    """Over Responses, with tools of its own types beside functions."""
    provider = f'{{name="here",base_url="{scripted_server}/v1",env_key="KEY",wire_api="responses"}}'
    settings = ["model=local", "model_provider=here", f"model_providers.here={provider}"]
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    for setting in settings:
        options += ["-c", setting]
    (tmp_path / ".codex").mkdir()
    said = run([str(CODEX), "exec", *options, ASKED], tmp_path, CODEX_HOME=str(tmp_path / ".codex"))
    assert said.startswith("It is ")
    assert "Process exited with code 0" in said
    assert "the river runs" in said


@pytest.mark.skipif(OPENCODE is None, reason="npm has not installed opencode in tests/clients/node")
def test_opencode_runs_a_command_and_tells_what_came_of_it(
    scripted_server: str, tmp_path: Path
) -> None:
    """Over chat completions, streamed."""
    model = {"name": "local", "tool_call": True, "limit": {"context": 131072, "output": 4096}}
    options = {"baseURL": f"{scripted_server}/v1", "apiKey": "any"}
    here = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "here",
        "options": options,
        "models": {"local": model},
    }
    named = {"model": "here/local", "small_model": "here/local", "provider": {"here": here}}
    config = tmp_path / "opencode.json"
    config.write_text(
        json.dumps(
            named | {"autoupdate": False, "share": "disabled", "permission": {"bash": "allow"}}
        )
    )
    quiet = dict.fromkeys(("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS"), "1")
    more = {f"OPENCODE_DISABLE_{name}": value for name, value in quiet.items()}
    said = run([str(OPENCODE), "run", ASKED], tmp_path, OPENCODE_CONFIG=str(config), **more)
    assert "It is the river runs" in said
