"""Files and folders become documents, and errors name the file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokens import SECTION_BYTES, Chat, TextSection, find_files, read_documents

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
        (
            "a.jsonl",
            b'["x"]',
            'line 2: expected an object with either "text" or "messages", got list',
        ),
        ("a.jsonl", b'{"body": "x"}', "line 2: expected an object with either .* got the keys body"),
        ("a.jsonl", b'{"text": "x", "messages": []}', "line 2: .* got the keys text, messages"),
        ("a.jsonl", b'{"text": 1}', 'line 2: "text": expected a string, got int'),
        ("a.jsonl", b'{"text": "\\ud800"}', 'line 2: "text": expected Unicode'),
        ("a.jsonl", b'{"text": "\xff"}', "line 2: expected UTF-8"),
        ("a.jsonl", b'{"messages": "x"}', 'line 2: "messages": expected a list, got str'),
        (
            "a.jsonl",
            b'{"messages": ["x"]}',
            r'line 2: "messages"\[0\]: expected an object with .* "role"',
        ),
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
