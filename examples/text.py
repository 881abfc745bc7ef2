"""Text for a causal language model: its sources, its tokens, and fixed-length blocks of tokens."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

HELD_OUT_EVERY = 20  # one block in 20 is kept for evaluation


class Tokenizer(Protocol):
    """The two methods that a tokenizer needs; the tokenizers of `transformers` have them."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token, so the vocabulary has 256."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        text = bytes(ids).decode(errors="replace")
        return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Split(NamedTuple):
    """Blocks of token ids, (number of blocks, block length), int64."""

    train: torch.Tensor
    held_out: torch.Tensor


def read_text(path: str | None) -> str:
    """Return a text file, the "text" fields of a .jsonl file, or (None) the documentation of Python.

    Raises OSError or ValueError for a file that can't be read.
    """
    if path is None:
        return "\n\n".join(_python_sections())
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    return _text_fields(path, text) if path.endswith(".jsonl") else text


def write_python_documentation(folder: Path) -> Path:
    """Write the documentation of Python as a .jsonl file, a section a line, unless it is there; return it."""
    path = folder / f"python-{sys.version_info.major}.{sys.version_info.minor}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")  # of this rank
        lines = (json.dumps({"text": section}) + "\n" for section in _python_sections())
        own.write_text("".join(lines), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(own, path)  # unlike a renaming, never over the file that another rank reads
        own.unlink()
    return path


def _python_sections() -> list[str]:
    # Some sections belong to several topics: each is taken once, or the held-out text would not be new.
    from pydoc_data.topics import topics

    return list(dict.fromkeys(part for topic in topics.values() for part in topic.split("\n\n")))


def _text_fields(path: str, lines: str) -> str:
    documents = []
    for number, line in enumerate(lines.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected JSON, {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("text"), str):
            raise ValueError(f'{path}, line {number}: expected an object with a string "text"')
        documents.append(document["text"])
    return "\n\n".join(documents)


def split_blocks(ids: list[int], length: int, world_size: int) -> Split:
    """Cut `ids` into blocks of `length`, and hold out every 20th block.

    Raises ValueError if there is no held-out block for each rank.
    """
    needed = HELD_OUT_EVERY * world_size * length
    if len(ids) < needed:
        raise ValueError(
            f"the text is too small: expected at least {needed} tokens ({HELD_OUT_EVERY} blocks of {length} "
            f"for each of {world_size} ranks), came {len(ids)}; give more text or a smaller --seq-len"
        )
    blocks = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    held_out = torch.arange(len(blocks)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Split(blocks[~held_out], blocks[held_out])
