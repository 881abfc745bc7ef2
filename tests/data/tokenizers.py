"""Tokenizers for the tests, made here: of bytes, and one of transformers with a token for each letter."""

from __future__ import annotations

import string
from typing import Any

import pytest

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Answers can be told from prompts by rendering beginnings of a conversation."""

MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""Answers are marked by the template."""


class Bytes:
    """Every byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def letters(chat_template: str | None = None, **special_tokens: Any) -> Any:
    """Return a fast tokenizer of transformers: letters, a space, and special tokens."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocab = {token: number for number, token in enumerate([*special, *string.ascii_letters, " ", "?"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 0)]
    )
    model.decoder = tokenizers.decoders.Fuse()
    options = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": special[2:]} | special_tokens
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **options)
    tokenizer.chat_template = chat_template
    return tokenizer
