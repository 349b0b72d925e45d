"""Tests that the remedies in errors work wherever the package is installed."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from specengine import errors
from specengine.cli import doctor
from specengine.errors import MissingExtraError, install_command, missing_extra

ROOT = Path(__file__).parents[1]


def lie_in(folder: Path, requires: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the package is installed in this folder, with metadata that lists these requirements."""
    monkeypatch.setattr(errors, "CHECKOUT", folder)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)


def test_in_a_checkout_it_is_installed_anew_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("serve") == "pip install -e '.[serve]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("ray,serve") == f"pip install -e '{ROOT}[ray,serve]'"


def test_beside_a_wheel_the_packages_of_the_extra_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "torch>=2.6",
        'fastapi>=0.115; extra == "serve"',
        "uvicorn>=0.30; extra == 'serve'",
        'ray[serve]; extra == "ray"',
    ]
    lie_in(tmp_path, lines, monkeypatch)
    assert install_command("serve") == "pip install 'fastapi>=0.115' 'uvicorn>=0.30'"
    assert install_command("ray") == "pip install 'ray[serve]'"


def test_every_extra_that_an_error_names_has_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "CHECKOUT", tmp_path)
    told = re.compile(r"missing_extra\(\"[^\"]+\", \"(\w+)\"")
    sources = (ROOT / "specengine").rglob("*.py")
    named = {extra for file in sources for extra in told.findall(file.read_text())}
    assert {"chat", "grammar", "ray", "serve"} <= named
    for extra in named | set(doctor.EXTRAS):
        command = install_command(extra)
        assert command.startswith("pip install '")
        assert "specengine" not in command


def test_the_error_names_what_is_missing_and_the_command() -> None:
    error = missing_extra(
        "serve", "serve", ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
    )
    assert isinstance(error, MissingExtraError)
    assert str(error).startswith("serve: uvicorn is not installed; it comes with: pip install -e '")


def test_nothing_names_a_package_on_an_index_that_holds_none() -> None:
    """A name that nobody has registered is one that anybody may."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources = [
        file
        for folder in ("specengine", "bench", "tests")
        for file in (ROOT / folder).rglob("*.py")
    ]
    told = re.compile("pip install '?" + "specengine")
    assert not [file for file in (*pages, *sources) if told.search(file.read_text())]
