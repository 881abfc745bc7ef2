"""The files of tokens and blocks: written once, by one process, and never used half-written."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from blocks import TextDatasets, text_datasets
from tests.data.tokenizers import CHATML, Bytes, letters
from tests.endings import Forks, run
from tests.ranks import Ranks

__all__ = ["run"]


def corpus(folder: Path, num_documents: int = 30) -> Path:
    file = folder / "corpus.jsonl"
    lines = [f'{{"text": "document {"x" * number} {number}"}}\n' for number in range(num_documents)]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def tokens_of(datasets: TextDatasets) -> list[list[list[int]]]:
    return [
        [block["input_ids"].tolist() for block in map(part.__getitem__, range(len(part)))]
        for part in datasets
    ]


# ------------------------------------------------------------------------------------------- when it is used


def test_a_second_call_reads_nothing_and_any_change_makes_other_files(tmp_path: Path) -> None:
    file, calls = corpus(tmp_path), []
    options: dict[str, Any] = {"seq_len": 16, "cache_dir": tmp_path / "cache"}

    def is_written(tokenizer: Any = None, **changes: Any) -> bool:
        calls.clear()
        text_datasets(
            file, tokenizer or Bytes(), progress=lambda *now: calls.append(now), **(options | changes)
        )
        return bool(calls)

    assert is_written()
    assert calls[-1] == (file.stat().st_size, file.stat().st_size)
    assert not is_written()
    assert is_written(seq_len=17)
    assert is_written(held_out=0.1)
    assert is_written(pack=False)
    assert is_written(letters())
    assert is_written(letters(CHATML))
    assert not is_written(letters(CHATML))
    os.utime(file, (1, 1))
    assert is_written()
    file.write_text(file.read_text() + '{"text": "one more"}\n')
    assert is_written()
    assert not is_written()


# ------------------------------------------------------------------------------------------ what may happen


def write_killed(file: str, cache_dir: str) -> None:
    def kill(done: int, total: int) -> None:
        if 0 < done >= total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    text_datasets(file, Bytes(), seq_len=16, cache_dir=cache_dir, progress=kill)


def test_what_a_killed_process_has_written_is_never_used(run: Forks, tmp_path: Path) -> None:
    file, cache_dir = corpus(tmp_path), tmp_path / "cache"
    arguments = f"{str(file)!r}, {str(cache_dir)!r}"
    [(end,)] = run(f"from tests.data.test_cache import write_killed\nwrite_killed({arguments})", num_ranks=1)
    assert end.code == -signal.SIGKILL, end.output
    assert len(list(cache_dir.glob("*.partial"))) == 1
    assert not list(cache_dir.glob("*/index.json"))
    found = text_datasets(file, Bytes(), seq_len=16, cache_dir=cache_dir)
    assert tokens_of(found) == tokens_of(
        text_datasets(file, Bytes(), seq_len=16, cache_dir=tmp_path / "other")
    )
    assert not list(cache_dir.glob("*.partial"))


# ------------------------------------------------------------------------------------------------- the ranks


def datasets_of_rank(file: str, cache_dir: str, pause_s: float) -> tuple[int, Any]:
    calls = []

    def slowly(done: int, total: int) -> None:
        calls.append(done)
        time.sleep(pause_s)

    dist.barrier()
    found = text_datasets(file, Bytes(), seq_len=16, cache_dir=cache_dir, progress=slowly)
    return len(calls), tokens_of(found)


def test_one_of_the_ranks_writes_and_all_get_the_same(ranks: Ranks, tmp_path: Path) -> None:
    file = corpus(tmp_path)
    results = ranks(3, datasets_of_rank, str(file), str(tmp_path / "cache"), 0.01)
    assert sorted(num_calls for num_calls, _ in results) == [0, 0, 30]
    alone = tokens_of(text_datasets(file, Bytes(), seq_len=16, cache_dir=tmp_path / "other"))
    assert [tokens for _, tokens in results] == [alone] * 3
