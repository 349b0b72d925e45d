"""lm-eval's `local-completions`: texts rated and answered, with and without a draft the same.

lm-eval may have an environment of its own, with its extras api and hf: LM_EVAL_PYTHON names its Python, as
SPECENGINE_SERVER_PYTHON does the server's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
from tests.serve.processes import ROOT, free_port, running

PYTHON = os.environ.get("LM_EVAL_PYTHON", sys.executable)
SERVER_PYTHON = os.environ.get("SPECENGINE_SERVER_PYTHON", sys.executable)
TASKS = "tests/clients/lm_eval"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def has_lm_eval() -> bool:
    tried = subprocess.run(
        [PYTHON, "-c", "import accelerate, lm_eval, transformers"], capture_output=True
    )
    return tried.returncode == 0


pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(not has_lm_eval(), reason="lm_eval with its extra hf is not installed"),
]


def evaluated(
    kind: str, out: Path, tasks: str, given: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Samples by task, each as lm-eval logs it; given: arguments of the model."""
    arguments = ",".join(f"{name}={value}" for name, value in given.items())
    command = [
        PYTHON,
        "-m",
        "lm_eval",
        "run",
        "--model",
        kind,
        "--model_args",
        arguments,
        "--tasks",
        tasks,
    ]
    command += [
        "--include_path",
        TASKS,
        "--batch_size",
        "1",
        "--output_path",
        str(out),
        "--log_samples",
    ]
    environment = os.environ | OFFLINE | {"HF_HOME": str(out.parent / "hf"), "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for path in out.rglob("samples_*.jsonl"):
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.name.removeprefix("samples_").rpartition("_")[0]] = sorted(
            samples, key=lambda one: one["doc_id"]
        )
    return found


def served(policy: list[str], tokenizer: Path, out: Path) -> dict[str, list[dict[str, Any]]]:
    port = free_port()
    with running(
        ["--served-model-name", "smol", *policy], port=port, python=SERVER_PYTHON, seconds=300
    ):
        address = f"http://127.0.0.1:{port}/v1/completions"
        both = "specengine_choice,specengine_generate"
        given = {"model": "smol", "base_url": address, "tokenizer": tokenizer}
        return evaluated("local-completions", out, both, given)


def test_scores_are_the_same_with_and_without_a_draft(
    default_model_path: Path, tmp_path: Path
) -> None:
    drafted = served([], default_model_path, tmp_path / "drafted")
    plain = served(["--policy", "plain"], default_model_path, tmp_path / "plain")
    assert sorted(plain) == ["specengine_choice", "specengine_generate"]
    for task, samples in plain.items():
        assert [one["resps"] for one in drafted[task]] == [one["resps"] for one in samples]
    assert all(len(one["resps"][0][0]) > 10 for one in plain["specengine_generate"])
    here = {"pretrained": default_model_path, "dtype": "float32"}
    own = evaluated("hf", tmp_path / "own", "specengine_choice", here)["specengine_choice"]
    for rated, expected in zip(plain["specengine_choice"], own, strict=True):
        assert likelihoods(rated) == pytest.approx(
            likelihoods(expected), abs=0.5
        )  # of bfloat16, summed up
    assert sum(one["acc"] for one in plain["specengine_choice"]) >= len(own) / 2


def likelihoods(sample: dict[str, Any]) -> list[float]:
    return [float(response[0][0]) for response in sample["resps"]]
