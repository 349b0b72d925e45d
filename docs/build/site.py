"""Build the site, and check it: links and anchors lead somewhere, and no page fetches anything from elsewhere.

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
from specengine.trace.page import page

ROOT = Path(__file__).parents[2]
SITE = "build/docs"  # site_dir of zensical.toml
GENERATED = {"guide/traces/example.html": "guide/traces/example.jsonl"}  # pages of traces, below docs/ and the site
FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
NAMED_ONLY = {"canonical", "sitemap", "alternate", "next", "prev"}  # of <link>: nothing is fetched


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in FETCHED and found.get(FETCHED[tag]) and found.get("rel") not in NAMED_ONLY:
            self.fetched.append(found[FETCHED[tag]])


def problems(site: Path) -> Iterator[str]:
    """A line for each link that leads nowhere and each thing that a page would fetch from elsewhere."""
    pages = {file.resolve(): _Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: there is no page"
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
                yield f"{name}: {link} leads nowhere"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: {link} has no such anchor"


def build(root: Path = ROOT) -> Path:
    """Return the folder of the site, built of the checkout at `root`; CalledProcessError where Zensical complains."""
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=root, check=True)
    site = root / SITE
    shutil.rmtree(site / "build")  # this program: Zensical copies all that is in docs/
    for name, trace in GENERATED.items():
        (site / name).write_text(page([read_trace(root / "docs" / trace)]), encoding="utf-8")
    return site


def main() -> int:
    site = build()
    found = list(problems(site))
    print("\n".join(found) or f"{site.relative_to(ROOT)}: all links lead somewhere", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
