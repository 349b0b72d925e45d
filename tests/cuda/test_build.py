"""Tests of when the library is built."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("asked", "home", "wanted"), [("1", "", True), ("0", "/opt/cuda", False), ("", "/nowhere", False)]
)
def test_build_is_asked_for(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: str, home: str, wanted: bool
) -> None:
    monkeypatch.setenv("SPECENGINE_CUDA", asked)
    monkeypatch.setenv("CUDA_HOME", home)
    assert setup_script.cuda_is_wanted() is wanted


def test_nvcc_on_the_path_of_a_machine_without_a_device_is_left_alone(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECENGINE_CUDA", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(setup_script.os.path, "exists", lambda path: False)
    assert not setup_script.cuda_is_wanted()


def test_library_is_not_named_like_a_module_of_python(setup_script: ModuleType) -> None:
    build = object.__new__(setup_script.OptionalBuildExt)  # naming a file needs no distribution
    assert build.get_ext_filename("specengine._cuda") == str(Path("specengine", "_cuda.so"))
    assert build.get_ext_filename("_cuda") == "_cuda.so"


def test_unknown_wish_is_refused(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECENGINE_CUDA", "yes")
    with pytest.raises(SystemExit, match="SPECENGINE_CUDA"):
        setup_script.cuda_is_wanted()


def test_without_pybind11_the_library_alone_is_built(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without a network `setup.py build_ext` runs with what is there."""
    monkeypatch.setitem(sys.modules, "pybind11.setup_helpers", None)
    for asked, names in (("1", [setup_script.CUDA]), ("0", [])):
        monkeypatch.setenv("SPECENGINE_CUDA", asked)
        assert [extension.name for extension in setup_script.extensions()] == names
    assert "specengine._ops was not built" in capsys.readouterr().err
