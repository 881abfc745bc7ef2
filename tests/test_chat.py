"""`zeroshard chat` with a small Llama."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.tokenizers import CHATML, letters
from zeroshard.cli.main import main

CONTEXT = 48


def save_tiny_llama(folder: Path, chat_template: str | None = CHATML) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = letters(chat_template, model_max_length=CONTEXT)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def expected_answer(folder: Path, prompt: str, max_tokens: int) -> str:
    """What transformers alone answers to a rendered prompt, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    written = model.generate(
        ids, do_sample=False, max_new_tokens=max_tokens, attention_mask=torch.ones_like(ids)
    )
    return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def test_one_question_gets_the_answer_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_llama(tmp_path)
    capsys.readouterr()
    options = ["--temperature", "0", "--max-tokens", "12"]
    assert main(["chat", str(tmp_path), "ab c?", "--system", "be", *options]) == 0
    answer = capsys.readouterr().out.strip()
    rendered = "<|system|>be</s><|user|>ab c?</s><|assistant|>"
    assert answer == expected_answer(tmp_path, rendered, 12) != ""


def test_a_model_without_a_chat_template_goes_on_with_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_llama(tmp_path, chat_template=None)
    capsys.readouterr()
    assert main(["chat", str(tmp_path), "ab", "--temperature", "0", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.strip() == expected_answer(tmp_path, "<s>ab", 5)


def test_an_answer_takes_at_most_half_of_the_positions_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    save_tiny_llama(tmp_path, chat_template=None)
    capsys.readouterr()
    lengths, generate = [], LlamaForCausalLM.generate

    def measured(model: LlamaForCausalLM, **how: Any) -> Any:
        written = generate(model, **how, min_new_tokens=how["max_new_tokens"])
        lengths.append(written.shape[1])
        return written

    monkeypatch.setattr(LlamaForCausalLM, "generate", measured)
    assert main(["chat", str(tmp_path), "abc", "--max-tokens", "200"]) == 0
    assert lengths == [4 + CONTEXT // 2]  # after a beginning and three letters


def test_a_conversation_has_what_was_said_before_and_drops_the_oldest_when_it_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_llama(tmp_path)
    from transformers import LlamaForCausalLM

    capsys.readouterr()
    lengths, generate = [], LlamaForCausalLM.generate

    def noted(self, input_ids, **kwargs):
        lengths.append(input_ids.shape[1])
        return generate(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "generate", noted)
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("abcdefgh\n\nabcdefgh\nabcdefgh\nabcdefgh\n/new\nabcdefgh\n")
    )
    assert main(["chat", str(tmp_path), "--temperature", "0", "--max-tokens", "8"]) == 0
    first, second, third, fourth, after_new = lengths
    assert first == after_new == 11  # a role, 8 letters, the end, the next role
    answer = second - 2 * first  # 8 tokens, perhaps an end
    assert 0 < answer <= 9
    assert third == fourth == CONTEXT - 8 < second + first + answer


def test_a_folder_without_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tmp_path / "none")]) == 2
    assert "none': expected a folder of save_pretrained" in capsys.readouterr().err
