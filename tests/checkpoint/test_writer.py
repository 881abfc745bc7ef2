"""Tensors become files that zeroshard and torch.distributed.checkpoint read."""

import io
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.runs import read_whole, write
from zeroshard.checkpoint import files
from zeroshard.checkpoint.places import file_of
from zeroshard.checkpoint.save import find_elements, write_part
from zeroshard.checkpoint.tensors import TensorSlice, open_checkpoint
from zeroshard.stores.store import TierMemory

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64, torch.int8, torch.int64]


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_views_single_values_and_empty_tensors_come_back_to_the_bit(tmp_path, dtype):
    memory = (8 * torch.randn(60)).to(dtype)
    tensors = {"view": memory[7:42].view(7, 5), "value": memory[3], "empty": memory[:0].view(0, 3)}
    write(tmp_path, [TensorSlice(n, tuple(t.shape), 0, t.reshape(-1)) for n, t in tensors.items()])
    directory = files.find(tmp_path)
    ours = read_whole(open_checkpoint(directory))
    theirs = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(theirs, checkpoint_id=directory)
    for name, tensor in tensors.items():
        for found in (ours[name], theirs[name]):
            assert (found.dtype, found.shape) == (dtype, tensor.shape)
            assert torch.equal(raw(found), raw(tensor))
    assert (directory / "__0_0.distcp").stat().st_size < 3 * 2048 + memory.nbytes


def test_elements_are_found_in_the_archive_of_their_tensor():
    archive = io.BytesIO()
    torch.save(torch.full((300,), 2, dtype=torch.uint8), archive)
    start = find_elements(archive)
    assert archive.getvalue()[start : start + 300] == bytes([2]) * 300


def test_the_file_of_a_rank_is_synced_when_all_of_it_is_written(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    memory = TierMemory(torch.device("cpu"), None, 0)
    write_part(tmp_path, [TensorSlice("weight", (600,), 0, torch.ones(600))], 1, memory)
    file = (tmp_path / file_of(1)).stat()
    assert [(one.st_ino, one.st_size) for one in synced] == [(file.st_ino, file.st_size)]
