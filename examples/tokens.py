"""Documents become tokens, each marked for the loss: all tokens of a text, the answers of a conversation."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

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
    """Return the files that a source names: the file itself, or the files of a folder, sorted by path.

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
        file: the path, which shows the format.
        stream: the open file, whose position shows how much was read.

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


if TYPE_CHECKING:
    import numpy.typing as npt

NO_LOSS = 1 << 31
"""The bit of a stored token that keeps it out of the loss."""

_BATCH_BYTES, _BATCH_SECTIONS = 16 * SECTION_BYTES, 256
"""Sections that a fast tokenizer gets at once, which it spreads over the cores: 1 MiB of text at most."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class EncodedTokens(NamedTuple):
    """The tokens of a section or conversation."""

    stored: npt.NDArray[np.uint32]
    """[num_tokens], ids with the bit NO_LOSS."""
    is_last: bool
    """True if a document ends here."""


class TokenEncoder:
    """A tokenizer, and the rule by which documents begin and end.

    A text begins as the tokenizer begins a text (many put a BOS there), and ends with EOS. A conversation
    begins and ends as the chat template says; EOS is added if its last answer has none. A tokenizer without
    EOS ends no document: documents are apart all the same, but a model does not learn to stop.

    Args:
        tokenizer: a tokenizer of transformers, or an object with `encode(text) -> list of ids`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_hf = callable(tokenizer) and hasattr(tokenizer, "apply_chat_template")
        eos, pad = (getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "pad"))
        self.eos: list[int] = [] if eos is None else [eos]
        self.pad: int = next((number for number in (pad, eos) if number is not None), 0)
        self._beginning = self._find_beginning()

    def encode(self, documents: Iterable[TextSection | Chat]) -> Iterator[EncodedTokens]:
        """Yield the tokens of documents in order.

        Raises:
            ValueError: a conversation whose answers cannot be told from its prompts, or an id out of range.
        """
        batch: list[TextSection] = []
        num_chars = 0
        for document in documents:
            if isinstance(document, TextSection):
                batch.append(document)
                num_chars += len(document.text)
            if isinstance(document, Chat) or num_chars >= _BATCH_BYTES or len(batch) >= _BATCH_SECTIONS:
                yield from self._encode_sections(batch)
                batch, num_chars = [], 0
            if isinstance(document, Chat):
                yield self._encode_chat(document)
        yield from self._encode_sections(batch)

    def fingerprint(self) -> str:
        """Return a digest of all that decides about ids, the same in each process.

        For a tokenizer outside of transformers: of its class and attributes.
        """
        tokenizer = self._tokenizer
        facts: list[Any] = [type(tokenizer).__module__, type(tokenizer).__qualname__, self.eos, self.pad]
        if not self._is_hf:
            facts.append(repr(sorted(getattr(tokenizer, "__dict__", {}).items())))
        else:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            facts.append(backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()))
            facts += [str(tokenizer.special_tokens_map), str(tokenizer.chat_template), self._beginning]
        return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def _ids(self, texts: list[str], **options: Any) -> list[list[int]]:
        if not self._is_hf:
            return [self._tokenizer.encode(text) for text in texts]
        options = {"add_special_tokens": False} | options
        ids: list[list[int]] = self._tokenizer(
            texts, return_attention_mask=False, truncation=False, padding=False, verbose=False, **options
        )["input_ids"]
        return ids

    def _find_beginning(self) -> list[int]:
        """Return the ids that the tokenizer puts in front of a text."""
        if not self._is_hf:
            return []
        bare, whole = self._ids(["a"])[0], self._ids(["a"], add_special_tokens=True)[0]
        starts = range(len(whole) - len(bare) + 1)
        return whole[: next((start for start in starts if whole[start : start + len(bare)] == bare), 0)]

    def _encode_sections(self, sections: list[TextSection]) -> Iterator[EncodedTokens]:
        if not sections:
            return
        for section, ids in zip(sections, self._ids([section.text for section in sections]), strict=True):
            beginning = self._beginning if section.is_first else []
            end = self.eos if section.is_last else []
            yield EncodedTokens(_stored([*beginning, *ids, *end]), section.is_last)

    def _encode_chat(self, chat: Chat) -> EncodedTokens:
        if not self._is_hf or not self._tokenizer.chat_template:
            raise ValueError(f'{chat.where}: "messages": expected a tokenizer with a chat template, got none')
        by_template = self._tokenizer.is_fast and _GENERATION.search(self._tokenizer.get_chat_template())
        ids, learned = self._marked_by_template(chat) if by_template else self._marked_by_prefixes(chat)
        if not learned.any():
            raise ValueError(f"{chat.where}: the chat template gives no token of an answer")
        start_of_last = int(np.flatnonzero(np.diff(learned, prepend=False) & learned)[-1])
        if not set(self.eos) <= set(ids[start_of_last:]):
            ids += self.eos
            learned = np.append(learned, chat.messages[-1]["role"] == "assistant")
        return EncodedTokens(_stored(ids) | np.where(learned, 0, NO_LOSS).astype(np.uint32), is_last=True)

    def _marked_by_template(self, chat: Chat) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Return the ids, and the mask of what the template has put into {% generation %}."""
        rendered = self._render(chat, len(chat.messages), return_assistant_tokens_mask=True)
        return list(rendered["input_ids"]), np.array(rendered["assistant_masks"], dtype=bool)

    def _marked_by_prefixes(self, chat: Chat) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Return the ids, and the mask of what follows the generation prompt in each turn of the assistant.

        The ids up to the prompt, and those up to the end of the answer, must be beginnings of the ids of the
        whole conversation. So the tokens between are those that the model has to write after the prompt.
        """
        ids = list(self._render(chat, len(chat.messages))["input_ids"])
        learned = np.zeros(len(ids), dtype=bool)
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            prompt = list(self._render(chat, number, add_generation_prompt=True)["input_ids"])
            end = list(self._render(chat, number + 1)["input_ids"])
            if ids[: len(prompt)] != prompt or ids[: len(end)] != end or len(prompt) >= len(end):
                raise ValueError(
                    f'{chat.where}: "messages"[{number}]: the chat template does not render a conversation '
                    "as a beginning of a longer one, so the prompt and this answer cannot be kept apart; "
                    "expected a template that marks answers with {% generation %}, or messages that end here"
                )
            self._check_header(chat, number)
            learned[len(prompt) : len(end)] = True
        return ids, learned

    def _check_header(self, chat: Chat, number: int) -> None:
        """Refuse a template without a generation prompt that writes a header before the answer."""
        prompt, before = (self._text(chat, number, add_generation_prompt=flag) for flag in (True, False))
        answer = self._text(chat, number + 1)[len(prompt) :].lstrip()
        content = chat.messages[number].get("content")
        if prompt == before and not (isinstance(content, str) and answer.startswith(content.strip())):
            raise ValueError(
                f'{chat.where}: "messages"[{number}]: the chat template has no generation prompt, and writes '
                f"{answer[:40]!r} before or in place of the answer's content; expected a template that marks "
                "answers with {% generation %} or heeds add_generation_prompt"
            )

    def _text(self, chat: Chat, num_messages: int, **options: Any) -> str:
        return str(self._render(chat, num_messages, tokenize=False, return_dict=False, **options))

    def _render(self, chat: Chat, num_messages: int, **options: Any) -> Any:
        """Apply the template to the first messages of a conversation."""
        options = {"tokenize": True, "return_dict": True, "tools": chat.tools} | options
        try:
            return self._tokenizer.apply_chat_template(chat.messages[:num_messages], **options)
        except Exception as error:  # templates raise errors of their own, of many types
            raise ValueError(
                f"{chat.where}: the chat template refuses the first {num_messages} messages: {error}"
            ) from error


def _stored(ids: list[int]) -> npt.NDArray[np.uint32]:
    wide = np.array(ids, dtype=np.int64)
    if wide.size and (wide.min() < 0 or wide.max() >= NO_LOSS):
        raise ValueError(f"expected token ids in [0, 2**31), got {wide.min()} to {wide.max()}")
    return wide.astype(np.uint32)
