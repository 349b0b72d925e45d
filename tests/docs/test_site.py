"""Links of the pages, as they are written and as they are built."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT
from tests.docs.site import main, problems

LINK = re.compile(r"\]\(([^)\s]+)\)")
WRITTEN = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")),
    *(ROOT / "specengine").rglob("README.md"),
]


def anchors(page: Path) -> set[str]:
    """What its headings are called."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"[^\w\s-]", "", line.lower()) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", heading.strip()) for heading in headings}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_as_they_are_written(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
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
        "index.html: gone.html leads nowhere",
        "index.html: fetches https://elsewhere.example/a.png",
    ]
    assert main([str(tmp_path)]) == 1
    assert list(problems(tmp_path / "nothing")) == [f"{tmp_path / 'nothing'}: there is no page"]


@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="needs pip install -e '.[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for name in ("docs", "specengine", "bench"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "results"))
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results", dirs_exist_ok=True)
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(problems(tmp_path / "build" / "docs"))
