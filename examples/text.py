"""The text that the examples train on when no other is given, and the bytes that the small Llama reads."""

from __future__ import annotations

import fcntl
import json
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT_CHARACTERS = 2000


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token: a vocabulary of 256. Text has no byte 0, which is the EOS."""

    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        text = bytes(id for id in ids if id != self.eos_token_id).decode(errors="replace")
        return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def python_documentation(folder: Path) -> Path:
    """Return a file with the documentation that comes with Python, a few paragraphs a line."""
    from pydoc_data.topics import topics

    # Some paragraphs belong to several topics: each is taken once, or the held-out text would not be new.
    seen: set[str] = set()
    documents = []
    for topic in topics.values():
        paragraphs = [text for text in topic.split("\n\n") if text not in seen]
        seen.update(paragraphs)
        documents += list(_joined(paragraphs))
    return _written(folder / f"python-{platform.python_version()}.jsonl", documents)


def _joined(paragraphs: list[str]) -> Iterator[str]:
    """Yield texts of DOCUMENT_CHARACTERS or little more."""
    text = ""
    for paragraph in paragraphs:
        text += paragraph + "\n\n"
        if len(text) >= DOCUMENT_CHARACTERS:
            yield text
            text = ""
    yield text


def zeroshard_documentation(folder: Path) -> Path:
    """Return a file with the documentation of zeroshard, one section a line."""
    documents = []
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        title, *sections = re.split(r"^(?=##+ )", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        heading = title.splitlines()[0]
        documents += [title, *(f"{heading}\n\n{section}" for section in sections)]
    return _written(folder / "zeroshard.jsonl", documents)


def _written(file: Path, documents: Iterable[str]) -> Path:
    """Return a JSONL file that has these documents; it is written anew only if it has others.

    One process of the machine writes it while others wait: a file that is written again has a new time of
    change, and a rank that is reading it would take it for another text.
    """
    lines = "".join(json.dumps({"text": text.strip()}) + "\n" for text in documents if text.strip())
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process
        if not file.is_file() or file.read_text(encoding="utf-8") != lines:
            partial = file.with_suffix(".partial")
            partial.write_text(lines, encoding="utf-8")
            partial.replace(file)
    return file


TEXTS = {"python": python_documentation, "zeroshard": zeroshard_documentation}
"""Texts that --data can name: functions of the folder for the file, which return the file."""
