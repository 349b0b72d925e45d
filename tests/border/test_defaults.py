"""Settings of the whole process change no answer: neither when engines are loaded, nor when they generate."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specengine.checkpoints.eagle import save_head
from tests.border.answers import LOADED_BEFORE, SETTINGS, WITHOUT
from tests.heads import LAYERS, deep
from tests.models.native_engines import INSTRUCTION_SETS
from tests.toy import head_config, near_copy, random_state

ROOT = Path(__file__).parents[2]
BACKENDS = (*(["native"] if INSTRUCTION_SETS else []), "huggingface")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    target = deep("llama")
    target.save_pretrained(made / "target")
    near_copy("llama", num_hidden_layers=LAYERS).save_pretrained(made / "draft")
    for name, config in (("eagle-3", head_config(3, target)), ("eagle-1", head_config(1, target))):
        save_head(config, random_state(config), made / name)
    return made


@pytest.fixture(scope="module", params=BACKENDS)
def answered(request: pytest.FixtureRequest, folder: Path) -> dict[str, dict[str, Any]]:
    """Answers by setting and case, from one process."""
    command = [sys.executable, "-m", "tests.border.answers", str(folder), request.param]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def _whens(name: str) -> tuple[str, ...]:
    return (", loaded before",) if name in LOADED_BEFORE else ("", ", loaded before")


@pytest.mark.slow
@pytest.mark.parametrize("setting", [name + when for name in SETTINGS for when in _whens(name)])
def test_the_answers_are_those_without_the_setting(
    setting: str, answered: dict[str, dict[str, Any]]
) -> None:
    wanted, found = answered[WITHOUT], answered[setting]
    assert len(found) > 30
    assert {case: answer for case, answer in found.items() if answer != wanted[case]} == {}


# ---------------------------------------------------------------------------------------------------- as it is written

FACTORIES = {
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "linspace",
    "logspace",
    "eye",
    "scalar_tensor",
}
FACTORIES |= {
    "rand",
    "randn",
    "randint",
    "randperm",
    "empty_strided",
    "empty_permuted",
    "as_tensor",
    "asarray",
}
LEGACY = {
    "Tensor",
    "FloatTensor",
    "DoubleTensor",
    "LongTensor",
    "range",
    "get_default_dtype",
    "set_default_dtype",
}


def without_dtype_or_device(source: str) -> list[str]:
    """Lines and texts of calls that leave a new tensor's dtype or device to the process."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        given = {keyword.arg for keyword in node.keywords}
        stated = {"dtype", "device"} <= given or None in given
        if node.func.attr in LEGACY or (node.func.attr in FACTORIES and not stated):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("part", ["specengine", "kernels"])
def test_every_new_tensor_states_its_dtype_and_device(part: str) -> None:
    found = {
        str(file.relative_to(ROOT)): calls
        for file in sorted((ROOT / part).rglob("*.py"))
        if (calls := without_dtype_or_device(file.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(3)",
        "torch.zeros(3, dtype=torch.int64)",
        "torch.tensor([1.0], device=device)",
        "x = [torch.arange(n, dtype=torch.int64), 1]",
        "torch.FloatTensor(3)",
    ],
)
def test_a_tensor_of_the_process_s_kind_is_found(source: str) -> None:
    assert without_dtype_or_device(source)
    assert not without_dtype_or_device("torch.full((2,), 1.0, dtype=torch.float32, device=device)")
