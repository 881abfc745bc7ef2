"""Texts and conversations become tokens, and only answers are in the loss."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.tokenizers import CHATML, MARKED, letters
from tokens import NO_LOSS, Chat, TextSection, TokenEncoder

TURNS = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]


def learned_text(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, str]:
    """The text of a conversation, and the same with a dot for each token out of the loss."""
    (tokens,) = TokenEncoder(tokenizer).encode([Chat("chat.jsonl, line 7", messages, None)])
    assert tokens.is_last
    words = [tokenizer.decode([number]) for number in (tokens.stored & (NO_LOSS - 1)).tolist()]
    marked = (word if number < NO_LOSS else "." for word, number in zip(words, tokens.stored, strict=True))
    return "".join(words), "".join(marked)


def test_a_text_has_the_bos_of_the_tokenizer_and_ends_with_eos_also_in_sections() -> None:
    tokenizer = letters()
    sections = [TextSection("ab", is_last=False), TextSection("c", is_first=False), TextSection("d")]
    tokens = list(TokenEncoder(tokenizer).encode(sections))
    assert [tokenizer.decode(part.stored.tolist()) for part in tokens] == ["<s>ab", "c</s>", "<s>d</s>"]
    assert [part.is_last for part in tokens] == [False, True, True]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "<|system|>be</s><|user|>hi</s><|assistant|>yo</s><|user|>so</s><|assistant|>no</s>"),
        (MARKED, "<|system|>be<|user|>hi<|assistant|>yo</s><|user|>so<|assistant|>no</s>"),
    ],
)
def test_only_answers_and_the_tokens_that_end_them_are_in_the_loss(template: str, text: str) -> None:
    whole, learned = learned_text(letters(template), TURNS)
    assert whole == text
    assert learned.replace(".", "") == "yo</s>no</s>"
    assert learned.endswith(".no</s>")


def test_eos_is_added_in_the_loss_to_an_answer_without_and_out_of_it_after_a_question() -> None:
    tokenizer = letters(CHATML.replace("</s>", ""))
    assert learned_text(tokenizer, TURNS[1:3]) == ("<|user|>hi<|assistant|>yo</s>", "....yo</s>")
    assert learned_text(tokenizer, TURNS[1:4])[1] == "....yo...."


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        # An earlier answer is shortened once another one follows, as templates for reasoning do.
        (
            CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '' }}"),
            TURNS[1:],
            r'"messages"\[1\]: the chat template does not render a conversation as a beginning of a longer',
        ),
        # The header of an answer is there, but not as a generation prompt.
        (CHATML.partition("{% if")[0], TURNS[1:3], r'"messages"\[1\]: .* no generation prompt, and writes'),
        (CHATML + "{{ raise_exception('never') }}", TURNS[1:3], "refuses the first 2 messages: never"),
        (MARKED.replace("'assistant'", "'nobody'"), TURNS[1:3], "gives no token of an answer"),
        (None, TURNS[1:3], "expected a tokenizer with a chat template"),
    ],
)
def test_a_template_whose_answers_cannot_be_told_from_prompts_is_refused(
    template: str | None, messages: list[dict[str, str]], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"chat\.jsonl, line 7: .*{message}|{message}") as raised:
        learned_text(letters(template), messages)
    assert str(raised.value).startswith("chat.jsonl, line 7: ")
