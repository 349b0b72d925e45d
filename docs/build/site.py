"""Build the site and check it: links and anchors must resolve, and no page may fetch from other hosts.

python -m docs.build.site
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from specengine.trace import read_trace
from specengine.trace.views import page

ROOT = Path(__file__).parents[2]
SITE = "build/docs"  # site_dir of zensical.toml
# pages of traces, below docs/ and the site
GENERATED = {"guide/traces/example.html": "guide/traces/example.jsonl"}
FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
LINK_ONLY = {"canonical", "sitemap", "alternate", "next", "prev"}  # of <link>: nothing is fetched


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in FETCHED and values.get(FETCHED[tag]) and values.get("rel") not in LINK_ONLY:
            self.fetched.append(values[FETCHED[tag]])


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each link that does not resolve and each file that a page would fetch from another host."""
    pages = {file.resolve(): _Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no pages"
    for file, own in pages.items():
        name = file.relative_to(site.resolve())
        if name.name == "404.html":  # served at any address
            continue
        for link in (*own.links, *own.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in own.fetched and parts.scheme != "data":
                    yield f"{name}: fetches {link}"
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{name}: {link} does not exist"
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors
            ):
                yield f"{name}: {link} has no such anchor"


def build(root: Path = ROOT) -> Path:
    """Build the site of the checkout at `root` and return its folder. Raise CalledProcessError if Zensical fails."""
    subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=root, check=True
    )
    site = root / SITE
    shutil.rmtree(site / "build")  # Zensical copies all of docs/, this program included
    for name, trace in GENERATED.items():
        (site / name).write_text(page([read_trace(root / "docs" / trace)]), encoding="utf-8")
    return site


def main() -> int:
    site = build()
    errors = list(problems(site))
    print("\n".join(errors) or f"{site.relative_to(ROOT)}: all links resolve", file=sys.stderr)
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
