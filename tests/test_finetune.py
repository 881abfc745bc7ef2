from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.text import ByteTokenizer, read_text, split_blocks, write_python_documentation
from zeroshard.data import text_datasets

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "examples" / "finetune.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TINY = ["--hidden", "32", "--layers", "2", "--seq-len", "64"]


def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_two_ranks_learn_and_show_the_memory_they_held(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    plot = tmp_path / "loss.png"
    done = run(*TORCHRUN, SCRIPT, *TINY, "--steps", "25", "--accumulate", "2", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    before, after = evaluation_losses(done.stdout)
    assert before == pytest.approx(math.log(256), abs=0.1)
    assert after < before - 1
    held = {kind: list(map(float, numbers)) for kind, *numbers in table_rows(done.stdout)}
    assert list(held) == ["parameters", "gradients", "optimizer", "unsharded, peak", "all"]
    for kind in ("parameters", "gradients", "optimizer"):
        ours, ddp = held[kind]
        assert ours == pytest.approx(ddp / 2, rel=0.1, abs=0.01)
    assert plot.read_bytes().startswith(b"\x89PNG")


def evaluation_losses(output: str) -> list[float]:
    """The losses before and after training, in nats per byte."""
    found = re.findall(r"evaluation loss (?:before|after): ([\d.]+) nats per byte", output)
    return [float(loss) for loss in found]


def table_rows(output: str) -> list[tuple[str, ...]]:
    return re.findall(r"│ (\w[\w, ]*\w) +│ +([\d.]+) │ +([\d.]+) │", output)


def loss_after(optimizer: str, *arguments: str, timeout: float) -> float:
    done = run(*TORCHRUN, SCRIPT, "--optimizer", optimizer, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr
    _, after = evaluation_losses(done.stdout)
    return after


def test_one_rank_learns_with_states_of_8_bits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = ["--optimizer", "adamw8bit", "--steps", "12", "--plot", str(tmp_path / "loss.png")]
    done = run(SCRIPT, *TINY, *options)
    assert done.returncode == 0, done.stderr
    before, after = evaluation_losses(done.stdout)
    assert after < before - 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "timeout"),
    [
        (["--hidden", "64", "--layers", "2", "--seq-len", "64", "--steps", "60"], 120),
        ([], 600),
    ],
    ids=["short", "whole"],
)
def test_with_states_of_8_bits_it_learns_as_much_within_a_hundredth(
    tmp_path: Path, arguments: list[str], timeout: float
) -> None:
    pytest.importorskip("transformers")
    arguments = [*arguments, "--plot", str(tmp_path / "loss.png")]
    exact = loss_after("adamw", *arguments, timeout=timeout)
    assert loss_after("adamw8bit", *arguments, timeout=timeout) <= 1.01 * exact


def test_a_missing_data_file_is_named() -> None:
    pytest.importorskip("transformers")
    done = run(SCRIPT, *TINY, "--data", "no/such/file.txt")
    assert done.returncode == 1
    assert "No such file or directory: 'no/such/file.txt'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_jsonl_file_gives_its_texts(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one\\u2028", "id": 1}\n\n{"text": "two"}\n', encoding="utf-8")
    assert read_text(str(file)) == "one\u2028\n\ntwo"


def test_the_documentation_of_python_becomes_blocks_once(tmp_path: Path) -> None:
    path = write_python_documentation(tmp_path)
    before = path.stat()
    assert write_python_documentation(tmp_path).stat() == before
    assert list(tmp_path.iterdir()) == [path]
    train, held_out = text_datasets(path, ByteTokenizer(), seq_len=128, cache_dir=tmp_path / "cache")
    assert held_out.num_labels == pytest.approx(0.05 * (train.num_labels + held_out.num_labels), rel=0.02)


@pytest.mark.parametrize("line", ["{'text': 'x'}", '["x"]', '{"text": 1}', '{"body": "x"}'])
def test_a_bad_line_of_a_jsonl_file_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "x"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: expected "):
        read_text(str(file))


def test_every_twentieth_block_is_held_out() -> None:
    train, held_out = split_blocks(list(range(410)), length=10, world_size=2)
    assert held_out.tolist() == [list(range(190, 200)), list(range(390, 400))]
    assert train.shape == (39, 10)
    assert train[-1].tolist() == list(range(400, 410))


def test_a_text_without_a_held_out_block_for_each_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected at least 400 tokens .* came 399"):
        split_blocks([0] * 399, length=10, world_size=2)


def test_bytes_decode_to_the_text_they_came_from_and_never_to_control_codes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve\n≤ 3")) == "naïve\n≤ 3"
    assert tokenizer.decode([65, 27, 255, 66]) == "A\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}B"
