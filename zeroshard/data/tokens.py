"""Documents become tokens, each marked for the loss: all tokens of a text, the answers of a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zeroshard.data.sources import SECTION_BYTES, Chat, TextSection

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
                    "as a beginning of a longer one, so this answer cannot be told from the prompt; "
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
