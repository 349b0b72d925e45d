"""Links of the pages, as they are written and as they are built."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from docs.build import site as building
from docs.build.site import GENERATED, build, problems
from tests.docs.blocks import PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
WRITTEN = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")),
    *(ROOT / "specengine").rglob("README.md"),
]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [
        re.sub(r"[^\w\s-]", "", line.lower())
        for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    ]
    return {re.sub(r"[-\s]+", "-", heading.strip()) for heading in headings}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_as_they_are_written(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists() or target.relative_to(ROOT / "docs").as_posix() in GENERATED, link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text()))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}


def test_what_is_wrong_with_a_site_is_told(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h1 id="here"></h1><a href="..#top">up</a>')
    (tmp_path / "index.html").write_text(
        '<p id="top"></p><a href="other/#here"></a><a href="other/#there"></a><a href="gone.html"></a>'
        '<a href="https://elsewhere.example/"></a><img src="https://elsewhere.example/a.png"><img src="data:,">'
        '<link rel="canonical" href="https://elsewhere.example/">'
    )
    assert list(problems(tmp_path)) == [
        "index.html: other/#there has no such anchor",
        "index.html: gone.html does not exist",
        "index.html: fetches https://elsewhere.example/a.png",
    ]
    assert list(problems(tmp_path / "nothing")) == [f"{tmp_path / 'nothing'}: no pages"]


@pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="needs pip install -e '.[docs]'"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for name in ("docs", "specengine"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    site = build(tmp_path)
    assert not list(problems(site))
    assert not list(site.rglob("*.py"))
    assert "default-src 'none'" in (site / "guide/traces/example.html").read_text()


def test_a_site_with_a_dead_link_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "index.html").write_text('<a href="gone.html"></a>')
    monkeypatch.setattr(building, "ROOT", tmp_path)
    monkeypatch.setattr(building, "build", lambda: tmp_path)
    assert building.main() == 1
    assert capsys.readouterr().err == "index.html: gone.html does not exist\n"
