"""Files become documents: text files, lines of JSON with a text or a conversation, folders of both.

A document is a whole text file, or one line of a .jsonl file. A text file is read in sections, so that it may
be larger than memory. A line of JSON is read as a whole.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

SECTION_BYTES = 1 << 16
"""A section of a text file ends with the first line end after this many bytes, or inside a longer line."""

_TEXT_SUFFIXES = """
    .txt .text .md .rst .org .tex .html .xml .csv .toml .yaml .yml .sql .sh .py .pyi .js .ts .jsx .tsx .css .c
    .h .cc .cpp .hpp .cu .cuh .java .kt .scala .go .rs .rb .php .pl .lua .r .jl .swift .cs .hs .ml
"""
KNOWN_SUFFIXES = frozenset([".jsonl", *_TEXT_SUFFIXES.split()])
"""The files of a folder that are read; all others are left out."""


class TextSection(NamedTuple):
    """A part of a text document."""

    text: str
    is_first: bool = True
    is_last: bool = True


class Chat(NamedTuple):
    """A document that is a conversation."""

    where: str
    """The file and line, for messages."""
    messages: list[dict[str, Any]]
    tools: list[Any] | None


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """Return the files that a source names: the file itself, or those of a folder, sorted by path.

    Files and folders whose names begin with a dot are left out.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: a folder has no file of a known kind.
    """
    path = Path(source)
    if not path.is_dir():
        path.stat()
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    known = sorted(file for file in found if file.suffix.lower() in KNOWN_SUFFIXES)
    if not known:
        raise ValueError(f"{path}: expected files such as .txt, .md, .py or .jsonl in this folder, got none")
    return known


def read_documents(file: Path, stream: BinaryIO) -> Iterator[TextSection | Chat]:
    """Yield the documents of one file in order; those without text are left out.

    Args:
        file: the path, which tells the format.
        stream: the open file, whose position tells how much was read.

    Raises:
        ValueError: naming the file and line that is not as expected.
    """
    suffix = file.suffix.lower()
    if suffix in (".json", ".gz", ".zst", ".zip", ".parquet", ".arrow", ".pdf", ".docx"):
        raise ValueError(f"{file}: expected text or .jsonl (a JSON object in each line), got {suffix}")
    return _lines_of_json(file, stream) if suffix == ".jsonl" else _sections(file, stream)


def _sections(file: Path, stream: BinaryIO) -> Iterator[TextSection]:
    """Yield a text file in sections; a line end of two characters becomes one."""
    waiting, is_first = "", True
    for text in _blocks_of_text(file, stream):
        if waiting:
            yield TextSection(waiting, is_first, is_last=False)
            is_first = False
        waiting = text
    if waiting:
        yield TextSection(waiting, is_first)


def _blocks_of_text(file: Path, stream: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    parts: list[str] = []
    num_bytes, number = 0, 1
    while True:
        line = stream.readline(SECTION_BYTES)
        try:
            parts.append(decoder.decode(line, final=not line).replace("\r\n", "\n"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}, line {number}: expected UTF-8, {error}") from None
        num_bytes += len(line)
        number += line.endswith(b"\n")
        if not line or num_bytes >= SECTION_BYTES:
            yield "".join(parts)
            parts, num_bytes = [], 0
        if not line:
            return


def _lines_of_json(file: Path, stream: BinaryIO) -> Iterator[TextSection | Chat]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            document = _parse(f"{file}, line {number}", line, "utf-8-sig" if number == 1 else "utf-8")
            if document != TextSection(""):
                yield document


def _parse(where: str, line: bytes, encoding: str) -> TextSection | Chat:
    try:
        record = json.loads(line.decode(encoding))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: expected UTF-8, {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON, {error}") from None
    if not isinstance(record, dict) or ("text" in record) == ("messages" in record):
        got = f"the keys {', '.join(record) or 'none'}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(f'{where}: expected an object with either "text" or "messages", got {got}')
    if "messages" in record:
        return Chat(where, _checked(where, record["messages"]), record.get("tools"))
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f'{where}: "text": expected a string, got {type(text).__name__}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f'{where}: "text": expected Unicode, {error}') from None
    return TextSection(text)


def _checked(where: str, messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation, which end or go on with answers."""
    if not isinstance(messages, list):
        raise ValueError(f'{where}: "messages": expected a list, got {type(messages).__name__}')
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'{where}: "messages"[{number}]: expected an object with a string "role"')
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f'{where}: "messages": expected an answer, with the role "assistant", got none')
    return messages
