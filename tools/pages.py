"""Hooks of mkdocs: pages and pictures from outside of docs/, and drawings as a part of their page.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages as well. Links between them and docs/ are written for
the repository. Here they become links of the site, and a link whose text is a file gets the title of its
page. A drawing is put into the page, because an SVG in an <img> has no access to the colours of the page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTER = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/diary.md": "diary.md",
}
"""Pages outside of docs/, with their names in the site. README.md would be the start page there."""

LINK = re.compile(r"(\]\(|^\[[^]]+\]: )([^)\s]+)", re.MULTILINE)
NAMED = re.compile(r"\[((?:docs/)?\w+\.md)\]\((?=[^)]*\b\w+\.md)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
DRAWING = re.compile(r'<p><img alt="([^"]*)" src="(drawings/[\w-]+\.svg)" /></p>')


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/, and the files there that any page shows or links to."""
    for path, name in OUTER.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    docs = Path(config.docs_dir)
    for path in sorted(linked([*docs.glob("*.md"), *(ROOT / path for path in OUTER)])):
        name = str(path.relative_to(ROOT))
        if path.is_file() and not path.is_relative_to(docs) and name not in OUTER:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def linked(pages: list[Path]) -> set[Path]:
    """Return the paths in the repository that pages link to."""
    found: set[Path] = set()
    for page in pages:
        for _, target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            path = (page.parent / target.partition("#")[0]).resolve()
            if ":" not in target and path.is_relative_to(ROOT):
                found.add(path)
    return found


def titles(menu: Any) -> dict[str, str]:
    """Return the title of each page of a menu, whose entries are {title: page} or {title: menu}."""
    found: dict[str, str] = {}
    for entry in menu:
        ((title, target),) = entry.items()
        found |= titles(target) if isinstance(target, list) else {target: title}
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links of the repository into those of the site, outside of code."""
    sources = {name: path for path, name in OUTER.items()}
    folder = Path(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    title_of = titles(config.nav)

    def named(match: re.Match[str]) -> str:
        name = Path(match[1]).name
        return f"[{title_of[OUTER.get(name, name)]}]("

    def moved(match: re.Match[str]) -> str:
        start, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or path.startswith(("http:", "https:")):
            return match[0]
        inside = os.path.normpath(folder / path)
        return start + OUTER.get(inside, inside.removeprefix("docs/")) + hash_ + anchor

    parts = FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else LINK.sub(moved, NAMED.sub(named, part)) for part in parts
    )


def on_page_content(html: str, config: Any, **_: Any) -> str:
    """Put drawings into the page."""

    def drawn(match: re.Match[str]) -> str:
        svg = (Path(config.docs_dir) / match[2]).read_text(encoding="utf-8")
        return f'<figure class="drawing">{svg[svg.index("<svg") :]}</figure>'

    return DRAWING.sub(drawn, html)
