"""Host memory that a rank needs beside its state to save and load, and bytes that it reads."""

from pathlib import Path

import pytest
import torch

import zeroshard
from tests.checkpoint.peaks import SLACK, Rows, growth, needs_linux
from tests.checkpoint.runs import write
from tests.distributed.training import seeded
from tests.ranks import on_ranks
from zeroshard.checkpoint import files, tensors
from zeroshard.checkpoint import save as saving
from zeroshard.checkpoint.tensors import TensorReader, TensorSlice, open_checkpoint
from zeroshard.plan.layout import Layout

pytestmark = needs_linux


BOX = 16 << 20


def engine_of(large, small):
    model = seeded(Rows, large, small)
    engine = zeroshard.initialize(model, torch.optim.AdamW(model.parameters(), fused=True)).engine
    engine.backward(engine(torch.tensor([1, 2])))
    engine.step()
    return engine


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_a_rank_holds_one_box_more_and_in_the_background_its_shard_once_more(tmp_path):
    """Growth by what is done, and the bytes of this rank's shard."""
    folder = str(tmp_path)
    for blocking in (True, False):  # imports all that it needs
        engine_of(16, 16).save_checkpoint(folder, "warm", blocking=blocking)
    engine = engine_of(20_000, 1_000)

    def in_background():
        engine.save_checkpoint(folder, "background", blocking=False)
        engine._saver.finish()

    def first_in_background():
        engine._saver._buffer = None  # its copy of the shard
        return growth(in_background)

    found = {
        "save": growth(engine.save_checkpoint, folder, "first", times=3),
        "load": growth(engine.load_checkpoint, folder, "first", times=3),
        "background": min(first_in_background() for _ in range(3)),
        "background again": growth(in_background, times=3),
    }
    report = engine.memory_report()
    shard = report.parameters + report.optimizer
    assert shard >= 3 * (BOX + SLACK)
    assert found["save"] <= BOX + SLACK
    assert found["load"] <= BOX + SLACK
    assert found["background"] <= shard + BOX + SLACK
    assert found["background again"] <= BOX + SLACK


SHAPES = [(2_500, 64), (250, 64), *[(64,), (192, 64), (192,), (64, 256)] * 4, (64, 16, 5, 5)]


def slices(num_ranks, rank):
    """What a rank of so many holds of tensors of these shapes."""
    layout = Layout(tuple(torch.Size(shape).numel() for shape in SHAPES), num_ranks)
    for index, shape in enumerate(SHAPES):
        span = layout.owned(index, rank)
        if span.size:
            values = torch.arange(span.start, span.stop, dtype=torch.int32)
            yield TensorSlice(f"{index}", shape, span.start, values)


def num_read():
    """Bytes that this process has read from files."""
    first = Path("/proc/self/io").read_text().splitlines()[0]
    return int(first.removeprefix("rchar: "))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_other_numbers_of_ranks_read_at_most_half_more_than_they_need(tmp_path, monkeypatch):
    for module in (saving, tensors):
        monkeypatch.setattr(module, "MAX_BOX_BYTES", BOX >> 6)
    write(tmp_path, [part for rank in range(2) for part in slices(2, rank)])
    stored = open_checkpoint(files.find(tmp_path))
    for num_ranks in (1, 3, 4, 8):
        for rank in range(num_ranks):
            parts = list(slices(num_ranks, rank))
            expected = [part.data.clone() for part in parts]
            for part in parts:
                part.data.zero_()
            before = num_read()
            with TensorReader(stored) as reader:
                for part in parts:
                    reader.read(part)
            assert num_read() - before <= 1.5 * sum(part.data.nbytes for part in parts)
            assert all(torch.equal(part.data, values) for part, values in zip(parts, expected, strict=True))
