"""Checks a built site: links and anchors lead somewhere, and no page fetches anything from elsewhere.

python -m tests.docs.site build/docs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
    for file, page in pages.items():
        name = file.relative_to(site.resolve())
        if name.name == "404.html":  # served at any address
            continue
        for link in (*page.links, *page.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.fetched and parts.scheme != "data":
                    yield f"{name}: fetches {link}"
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{name}: {link} leads nowhere"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: {link} has no such anchor"


def main(argv: list[str]) -> int:
    found = list(problems(Path(argv[0])))
    print("\n".join(found) or f"{argv[0]}: all links lead somewhere", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
