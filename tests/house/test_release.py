"""Check that `make release` refuses what is not ready, before it builds anything."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import specengine

ROOT = Path(__file__).parents[2]
DATED = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n- A change.\n\n## [1.1.0] - 2026-01-01\n"


@pytest.fixture(scope="module")
def release() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_date_is_that_of_the_newest_version(release: Any) -> None:
    assert release.require_dated(DATED, "1.2.0") == "2026-01-31"
    assert release.require_dated(DATED.replace("## [Unreleased]\n\n", ""), "1.2.0") == "2026-01-31"


@pytest.mark.parametrize(
    ("changelog", "version", "message"),
    [
        (DATED, "1.1.0", "its newest version is not 1.1.0"),
        (DATED.replace("## [1.2", "- New.\n\n## [1.2"), "1.2.0", "changes stand under Unreleased"),
        (DATED.replace(" - 2026-01-31", ""), "1.2.0", "has no date"),
        (DATED.replace("2026-01-31", "soon"), "1.2.0", "changes stand under Unreleased"),
        ("# Changelog\n", "1.2.0", "newest version is not 1.2.0"),
        ("# Changelog\n\n## [Unreleased]\n\n- New.\n", "1.2.0", "changes stand under Unreleased"),
    ],
)
def test_what_is_not_ready_is_refused(
    release: Any, changelog: str, version: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        release.require_dated(changelog, version)


def test_no_python_at_all_is_refused_before_anything_is_built(
    release: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr(release, "build", lambda: built.append("built"))
    monkeypatch.setattr(release, "require_dated", lambda changelog, version: "2026-01-31")
    with pytest.raises(SystemExit, match=r"none of python0\.1 is on the path"):
        release.main(["python0.1"])
    assert not built


def test_the_package_has_the_version_of_its_sources() -> None:
    assert metadata.version("specengine") == specengine.__version__
