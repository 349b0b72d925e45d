"""Claude Code, over Anthropic's Messages, in a folder of its own; `make test-clients` installs it."""

import os
import subprocess
from pathlib import Path

import pytest

MODULES = Path(__file__).with_name("node") / "node_modules" / "@anthropic-ai"
PROGRAM = next(iter(sorted(MODULES.glob("claude-code-*/claude"))), None)


@pytest.mark.slow
@pytest.mark.skipif(
    PROGRAM is None, reason="npm has not installed Claude Code in tests/clients/node"
)
def test_it_runs_a_command_and_tells_what_came_of_it(scripted_server: str, tmp_path: Path) -> None:
    """Its instructions are some 77,000 tokens of the bytes that this server's model reads."""
    named = {
        "ANTHROPIC_BASE_URL": scripted_server,
        "ANTHROPIC_API_KEY": "any",
        "ANTHROPIC_MODEL": "local",
    }
    quiet = {"HOME": str(tmp_path), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    done = subprocess.run(
        [str(PROGRAM), "-p", "Say what the river does.", "--allowedTools", "Bash"],
        cwd=tmp_path,
        env=os.environ | named | quiet,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("It is the river runs.", 0), done.stderr
