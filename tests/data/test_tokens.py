"""Files and folders become documents and these tokens; only answers are in the loss; errors name the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.tokenizers import CHATML, MARKED, letters
from tokens import NO_LOSS, SECTION_BYTES, Chat, TextSection, TokenEncoder, find_files, read_documents

ANSWERED = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


def documents(source: Path) -> list[TextSection | Chat]:
    found = []
    for file in find_files(source):
        with file.open("rb") as stream:
            found += list(read_documents(file, stream))
    return found


def test_a_folder_gives_its_texts_and_lines_of_json_in_the_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    (tmp_path / "b.md").write_bytes("\ufeffzwei\r\nä".encode())
    (tmp_path / "a.jsonl").write_text(f'\ufeff{{"text": "one\\u2028"}}\n\n{{"text": ""}}\n{ANSWERED}\n')
    (tmp_path / "sub" / "c.py").write_text("three")
    (tmp_path / "sub" / "empty.txt").write_text("")
    for left_out in ("sub/.git/d.txt", ".e.txt", "f.bin", "sub/g"):
        (tmp_path / left_out).write_bytes(b"\xff")
    one, chat, two, three = documents(tmp_path)
    assert [one, two, three] == [TextSection("one\u2028"), TextSection("zwei\nä"), TextSection("three")]
    assert isinstance(chat, Chat)
    assert chat.where == f"{tmp_path / 'a.jsonl'}, line 4"
    assert [message["content"] for message in chat.messages] == ["a", "b"]


@pytest.mark.parametrize("line", ["a line of text\n", "ä" * 70_000])
def test_a_long_text_comes_in_sections_of_bounded_size(tmp_path: Path, line: str) -> None:
    file = tmp_path / "long.txt"
    file.write_text(line * (300_000 // len(line)), encoding="utf-8")
    sections = documents(file)
    assert "".join(
        section.text for section in sections if isinstance(section, TextSection)
    ) == file.read_text(encoding="utf-8")
    assert max(len(section.text.encode()) for section in sections) <= 2 * SECTION_BYTES
    assert [section.is_first for section in sections] == [True] + [False] * (len(sections) - 1)
    assert [section.is_last for section in sections] == [False] * (len(sections) - 1) + [True]
    assert len(sections) > 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{'text': 1}", "a.jsonl, line 2: expected JSON, "),
        ("a.jsonl", b'{"text": "x", "messages": []}', "line 2: .* got the keys text, messages"),
        ("a.jsonl", b'{"text": 1}', 'line 2: "text": expected a string, got int'),
        ("a.jsonl", b'{"text": "\\ud800"}', 'line 2: "text": expected Unicode'),
        ("a.jsonl", b'{"text": "\xff"}', "line 2: expected UTF-8"),
        ("a.jsonl", b'{"messages": []}', 'line 2: "messages": expected an answer, with the role "assistant"'),
        ("a.txt", b"caf\xe9 ole", "a.txt, line 2: expected UTF-8"),
        ("a.json", b"", "a.json: expected text or .jsonl"),
    ],
)
def test_an_error_names_the_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(b'{"text": "good"}\n' + content + b"\nmore")
    with pytest.raises(ValueError, match=message):
        documents(tmp_path / name)


def test_a_folder_without_known_files_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected files such as .* got none"):
        find_files(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        find_files(tmp_path / "nowhere.txt")


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
