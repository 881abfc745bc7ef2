"""Hooks of mkdocs: pages and pictures from outside of docs/, and drawings as a part of their page.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages as well. Links between them and docs/ are written for
the repository; here they become links of the site. A drawing is put into the page, because an SVG in an <img>
has no access to the colours of the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTER = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages outside of docs/, with their names in the site. README.md would be the start page there."""

LINK = re.compile(r"(\]\(|^\[[^]]+\]: )([^)\s]+)", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
DRAWING = re.compile(r'<p><img alt="([^"]*)" src="(drawings/[\w-]+\.svg)" /></p>')


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside of docs/ that pages show or link to."""
    for path, name in OUTER.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "LICENSE", abs_src_path=str(ROOT / "LICENSE")))
    for picture in sorted((ROOT / "benchmarks/results").glob("*.png")):
        name = str(picture.relative_to(ROOT))
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into those of the site, outside of code."""
    is_outer = page.file.src_uri in OUTER.values()

    def moved(match: re.Match[str]) -> str:
        start, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            return match[0]
        inside = path.removeprefix("docs/" if is_outer else "../")
        return start + OUTER.get(inside, inside) + hash_ + anchor

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def on_page_content(html: str, config: Any, **_: Any) -> str:
    """Put drawings into the page."""

    def drawn(match: re.Match[str]) -> str:
        svg = (Path(config.docs_dir) / match[2]).read_text(encoding="utf-8")
        return f'<figure class="drawing">{svg[svg.index("<svg") :]}</figure>'

    return DRAWING.sub(drawn, html)
