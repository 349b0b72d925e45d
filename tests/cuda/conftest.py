"""Fixtures of the tests of csrc/*.cu: the build script, and devices of the kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.cuda import host
from tests.ops.backends import choose

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return host.built(tmp_path_factory.mktemp("host"))


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the tensors that the kernels take."""
    if request.param == "cuda":
        choose(monkeypatch, "cuda")
        return "cuda"
    host.take(request.getfixturevalue("host_library"), monkeypatch)
    return "cpu"
