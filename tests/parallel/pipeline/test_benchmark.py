"""The parts of benchmarks/pipeline.py run, and measure what they say."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
SLEEP_S, MICROBATCHES, RANKS, BLOCKS = 0.002, 4, 2, 4


@pytest.fixture
def modules(monkeypatch):
    """Modules of benchmarks import each other by their bare names."""
    monkeypatch.syspath_prepend(BENCHMARKS)


def measured(schedules):
    sys.path.append(BENCHMARKS)
    from pipeline import measure, parse

    given = ["--sleep", str(SLEEP_S * 1e3), "--blocks", BLOCKS, "--microbatches", MICROBATCHES]
    given += ["--batch", MICROBATCHES, "--rounds", 2, "--noted", 2, "--schedules", schedules]
    return measure(parse(list(map(str, given))))


def sleeping(chunks_per_rank):
    """The least time of a schedule without idle time but at its ends: Narayanan et al. 2021, section 2.2."""
    block = 3 * SLEEP_S  # forward and two halves of a backward
    ends = (RANKS - 1) / chunks_per_rank
    return (MICROBATCHES + ends) * block * BLOCKS / RANKS


def test_steps_and_makespans_take_the_time_for_which_blocks_sleep(ranks):
    for rows in ranks(RANKS, measured, "1f1b,interleaved"):
        for name, chunks_per_rank in (("1f1b", 1), ("interleaved", 2)):
            row = rows[name]
            least = sleeping(chunks_per_rank)
            assert row["zeroshard, s a makespan"]["value"] >= least
            assert row["zeroshard, s a step"]["value"] >= least  # other steps than those of the makespan
            assert row["torch layers, s a step"]["value"] >= least
            assert row["predicted, s a makespan"] >= least


@pytest.mark.usefixtures("modules")
def test_chunks_cut_by_hand_compute_as_the_whole_model():
    from pipeline_jobs import Llama, Sleepers

    for job in (Llama(64, BLOCKS, 2, 8), Sleepers(0.0, BLOCKS, 2)):
        inputs, targets = job.batch(0)
        named = job.named(inputs)
        whole = job.model()(**named) if isinstance(named, dict) else job.model()(named)
        for cut in job.cuts:
            value = inputs
            for blocks in (range(1), range(1, 3), range(3, 4)):
                value = job.chunk(blocks, cut)(value)
            torch.testing.assert_close(job.loss(value, targets), job.loss(whole, targets))
