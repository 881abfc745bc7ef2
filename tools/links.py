"""Check a built site: each link inside it leads to a page and an anchor, and nothing comes from elsewhere.

    python tools/links.py site

mkdocs checks the links that are written in Markdown. This sees the pages as a browser does, with the links of
the API reference and of the theme. Needs only the standard library.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
"""Tags and attributes whose target a browser fetches by itself."""


class Link(NamedTuple):
    """A target that a page names, and True if a browser loads it with the page."""

    target: str
    is_loaded: bool


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[Link] = []
        self.anchors: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors += [values[name] for name in ("id", "name") if name in values and tag != "meta"]
        is_hint = tag == "link" and values.get("rel") in ("canonical", "next", "prev")
        for name in ("href", "src"):
            if name in values:
                self.links.append(Link(values[name], (tag, name) in LOADED and not is_hint))


def problems(site: Path) -> list[str]:
    """Return a line for each dead link, each anchor that stands twice, and each file from elsewhere."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        shown = path.relative_to(site.resolve())
        twice = {anchor for anchor in page.anchors if page.anchors.count(anchor) > 1 and anchor[:2] != "__"}
        found += [f"{shown}: two anchors #{anchor}" for anchor in sorted(twice)]
        for link in page.links:
            url = urlsplit(link.target)
            if url.scheme or url.netloc:
                if link.is_loaded and url.scheme != "data":
                    found.append(f"{shown}: loads {link.target}")
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if target.is_dir():
                target /= "index.html"
            if path.name == "404.html":  # shown in place of any page, so its links begin at the root
                continue
            if not target.exists():
                found.append(f"{shown}: {link.target} leads nowhere")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors:
                found.append(f"{shown}: {link.target}: no such anchor")
    return found


def main() -> None:
    """Check the folder on the command line; exit with 1 if there are problems."""
    site = Path(sys.argv[1])
    found = problems(site)
    print(
        "\n".join(found) if found else f"{site}: all links lead somewhere, and nothing comes from elsewhere"
    )
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
