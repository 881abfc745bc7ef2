"""A checkpoint is one of torch.distributed.checkpoint: torch alone reads it."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.runs import read_whole, saved, state, write
from tests.distributed.training import different
from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.places import Box, file_of
from zeroshard.checkpoint.save import write_part
from zeroshard.checkpoint.tensors import TensorReader, TensorSlice, open_checkpoint
from zeroshard.stores.store import TierMemory


def saved_here(folder, config):
    engine = saved(folder, config, tag="here")
    found = state(engine)
    names = {name: name if isinstance(name, str) else f"optimizer/{'/'.join(name)}" for name in found.tensors}
    shapes = {p.fqn: tuple(p.full_shape) for _, p in engine.named_parameters()}
    return {
        names[name]: value if isinstance(name, str) else value.view(shapes[name[0]])
        for name, value in found.tensors.items()
        if isinstance(name, str) or name[1] != "step"
    }


@pytest.fixture(scope="module")
def checkpoint(ranks, tmp_path_factory):
    """The directory of a checkpoint, and all tensors that it must hold in their full shapes."""
    folder = tmp_path_factory.mktemp("saved")
    want = ranks(2, saved_here, folder, {"stage": 3})[0]
    return find(folder, "here"), want


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_and_zeroshard_read_full_tensors_under_the_plain_names_and_all_names_of_tied_ones(checkpoint):
    directory, want = checkpoint
    assert {"tokens.weight", "head.weight", "mix", "gain", "empty", "count"} < want.keys()
    assert {"optimizer/mix/exp_avg", "optimizer/gain/exp_avg_sq", "optimizer/empty/exp_avg"} < want.keys()
    got = {name: torch.full_like(value, 7) for name, value in want.items()}
    dcp.load(got, storage_reader=FileSystemReader(directory), no_dist=True)
    assert different(got, want) == []
    stored = open_checkpoint(directory)
    assert stored.tensors.keys() == want.keys() - {"head.weight"}  # which is tokens.weight
    assert different(read_whole(stored) | {"head.weight": want["head.weight"]}, want) == []


def test_a_tensor_of_which_a_part_is_missing_is_named(checkpoint):
    directory, _ = checkpoint
    stored = open_checkpoint(directory)
    holed = stored.tensors["mix"]
    assert isinstance(holed.parts[0].box, Box)
    stored.tensors["mix"] = replace(holed, boxes=holed.boxes[1:])
    with (
        TensorReader(stored) as reader,
        pytest.raises(RuntimeError, match=r"\d of 1300 elements of .mix"),
    ):
        reader.read(TensorSlice("mix", (5, 20, 13), 0, torch.empty(1300)))


# ------------------------------------------------------------------------------------ the file of a rank

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64, torch.int8, torch.int64]


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_views_single_values_and_empty_tensors_come_back_to_the_bit(tmp_path, dtype):
    memory = (8 * torch.randn(60)).to(dtype)
    tensors = {"view": memory[7:42].view(7, 5), "value": memory[3], "empty": memory[:0].view(0, 3)}
    write(tmp_path, [TensorSlice(n, tuple(t.shape), 0, t.reshape(-1)) for n, t in tensors.items()])
    directory = find(tmp_path)
    ours = read_whole(open_checkpoint(directory))
    theirs = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(theirs, checkpoint_id=directory)
    for name, tensor in tensors.items():
        for found in (ours[name], theirs[name]):
            assert (found.dtype, found.shape) == (dtype, tensor.shape)
            assert torch.equal(raw(found), raw(tensor))
    assert (directory / "__0_0.distcp").stat().st_size < 3 * 2048 + memory.nbytes


def test_the_file_of_a_rank_is_synced_when_all_of_it_is_written(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    memory = TierMemory(torch.device("cpu"), None)
    write_part(tmp_path, [TensorSlice("weight", (600,), 0, torch.ones(600))], 1, memory)
    file = (tmp_path / file_of(1)).stat()
    assert [(one.st_ino, one.st_size) for one in synced] == [(file.st_ino, file.st_size)]
