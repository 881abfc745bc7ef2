"""A checkpoint is one of torch.distributed.checkpoint: torch alone reads it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.runs import read_whole, start, state, train
from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.places import Box
from zeroshard.checkpoint.tensors import TensorReader, TensorSlice, open_checkpoint


def saved(folder, config):
    engine = start(config)
    train(engine, range(2))
    engine.save_checkpoint(folder, "here")
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
    want = ranks(4, saved, folder, {"stage": 3, "shard_group_size": 2})[0]
    return find(folder, "here"), want


def unequal(got, want):
    assert got.keys() == want.keys()
    return [
        name
        for name, value in want.items()
        if got[name].dtype != value.dtype or not torch.equal(got[name], value)
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_and_zeroshard_read_full_tensors_under_the_plain_names_and_all_names_of_tied_ones(checkpoint):
    directory, want = checkpoint
    assert {"tokens.weight", "head.weight", "mix", "gain", "empty", "count"} < want.keys()
    assert {"optimizer/mix/exp_avg", "optimizer/gain/exp_avg_sq", "optimizer/empty/exp_avg"} < want.keys()
    got = {name: torch.full_like(value, 7) for name, value in want.items()}
    dcp.load(got, storage_reader=FileSystemReader(directory), no_dist=True)
    assert unequal(got, want) == []
    stored = open_checkpoint(directory)
    assert stored.tensors.keys() == want.keys() - {"head.weight"}  # which is tokens.weight
    assert unequal(read_whole(stored) | {"head.weight": want["head.weight"]}, want) == []


def test_a_tensor_of_which_a_part_is_missing_is_named(checkpoint):
    directory, _ = checkpoint
    stored = open_checkpoint(directory)
    holed = stored.tensors["mix"]
    assert isinstance(holed.parts[0].box, Box)
    stored.tensors["mix"] = replace(holed, boxes=holed.boxes[1:])
    with TensorReader(stored) as reader, pytest.raises(RuntimeError, match=r"1300 elements of 'mix'.* found"):
        reader.read(TensorSlice("mix", (5, 20, 13), 0, torch.empty(1300)))
