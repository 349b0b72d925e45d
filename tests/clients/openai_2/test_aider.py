"""aider, without a terminal: it edits a file as the model says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("aider")
pytestmark = pytest.mark.slow

WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
QUIET = [
    "--yes",
    "--no-git",
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-analytics",
    "--no-show-release-notes",
]


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_a_file_is_edited(scripted_server: str, tmp_path: Path, how: str) -> None:
    file = tmp_path / "sum.py"
    file.write_text(WRONG)
    command = [
        str(Path(sys.executable).parent / "aider"),
        "--model",
        "openai/local",
        "--openai-api-key",
        "any",
    ]
    command += [
        "--openai-api-base",
        f"{scripted_server}/v1",
        *QUIET,
        how,
        "--message",
        "Mend the sum",
        file.name,
    ]
    environment = os.environ | {"HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        input="",
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert file.read_text() == RIGHT, done.stdout
    assert "Applied edit to sum.py" in done.stdout
