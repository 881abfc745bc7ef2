"""Copies, pickles and wrappers of a sharded model are refused with the remedy, or work as before."""

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

import zeroshard
from tests.distributed.models import Stemmed, tiny
from tests.distributed.training import SOME_STAGES, square_loss, start, take_steps, train_sharded
from tests.ranks import on_ranks


@on_ranks(2)
def test_what_cannot_hold_a_sharded_model_is_refused_with_the_remedy():
    """What each attempt to copy, pickle or wrap raises, by stage."""
    remedies = {
        "copy": "load engine.full_state_dict() (called on all ranks) into another model",
        "pickle": "engine.save_checkpoint",
        "saved": "engine.save_checkpoint",
        "DDP": "leave DistributedDataParallel out",
        "fully_shard": "leave fully_shard out",
    }
    attempts = {
        "copy of the engine": copy.deepcopy,
        "copy of the model": lambda engine: copy.deepcopy(engine.module),
        "copy of a unit": lambda engine: copy.deepcopy(engine.module.blocks[0]),
        "copy of a part": lambda engine: copy.deepcopy(engine.module.blocks[0][0]),
        "copy of an optimizer": lambda engine: copy.deepcopy(engine.optimizer),
        "pickle of the engine": pickle.dumps,
        "saved engine": lambda engine: torch.save(engine, io.BytesIO()),
        "saved model": lambda engine: torch.save(engine.module, io.BytesIO()),
        "DDP of the engine": DistributedDataParallel,
        "DDP of the model": lambda engine: DistributedDataParallel(engine.module),
        "fully_shard of the engine": fully_shard,
        "fully_shard of the model": lambda engine: fully_shard(engine.module),
        "fully_shard of a part": lambda engine: fully_shard(engine.module.blocks[0][0]),
    }
    for stage in SOME_STAGES:
        engine, _ = start(tiny(), stage=stage)
        for name, attempt in attempts.items():
            with pytest.raises(RuntimeError, match=re.escape(remedies[name.split()[0]])):
                attempt(engine)
        with engine.unsharded(), pytest.raises(RuntimeError, match="hooks of its engine"):
            copy.deepcopy(engine.module)
        engine.backward(square_loss(engine, 0))
        assert engine.step()
        engine.close()
        copy.deepcopy(engine.module)


@on_ranks(2)
def test_saving_a_state_dict_of_slices_warns_and_names_what_saves_the_model():
    """By stage, the texts of warnings when slices, whole parameters and a copy are saved."""
    for stage in SOME_STAGES:
        engine, _ = start(tiny(), stage=stage)
        texts = []
        for source in (engine, engine.module, engine.module.blocks[0]):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state = source.state_dict()
                torch.save({"model": state}, file := io.BytesIO())
                texts.append([str(warning.message) for warning in caught if warning.filename == __file__])
            file.seek(0)
            loaded = torch.load(file, weights_only=True)["model"]
            assert all(torch.equal(loaded[name], value) for name, value in state.items())
            assert state._metadata.keys() == loaded._metadata.keys()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copy.deepcopy(engine.state_dict())
            torch.save(engine.full_state_dict(), io.BytesIO())
            with engine.unsharded():
                torch.save(engine.state_dict(), io.BytesIO())
        for text in texts:
            assert len(text) == 1
            assert "engine.full_state_dict()" in text[0]
            assert "engine.save_pretrained(folder)" in text[0]


@pytest.mark.long_where(wrap=[torch.compile])
@pytest.mark.parametrize("wrap", [torch.compile, DataParallel])
@on_ranks(2, timeout=120.0)
def test_an_engine_inside_torch_compile_or_data_parallel_trains_as_before(wrap):
    want = train_sharded(tiny(), "AdamW", 2, square_loss, stage=3).losses
    engine, _ = start(tiny(), stage=3)
    wrapped = wrap(engine, backend="eager") if wrap is torch.compile else wrap(engine)
    losses = take_steps(engine, range(2), lambda _, number: square_loss(wrapped, number))
    torch._dynamo.reset()
    assert losses == want


@on_ranks(2)
def test_a_model_that_is_distributed_already_is_refused_by_name_with_the_remedy():
    mesh = init_device_mesh("cpu", (2,))
    partly, wrapped = Stemmed(), DistributedDataParallel(Stemmed())
    partly.head.bias = nn.Parameter(distribute_tensor(partly.head.bias.detach(), mesh, [Replicate()]))
    for model, text in (
        (partly, "parameter 'head.bias' is a DTensor"),
        (fully_shard(Stemmed(), mesh=mesh), "the model is a FSDPModule of torch.*leave fully_shard out"),
        (nn.Sequential(fully_shard(Stemmed(), mesh=mesh), nn.ReLU()), "module '0' is a FSDPModule"),
        (
            FullyShardedDataParallel(Stemmed(), device_id=torch.device("cpu")),
            "the model is a FullyShardedDataParallel",
        ),
        (wrapped, "the model is a DistributedDataParallel.*the model inside, its attribute `module`"),
    ):
        with pytest.raises(ValueError, match=text):
            zeroshard.initialize(model)
    assert zeroshard.initialize(wrapped.module, torch.optim.AdamW).engine.global_step == 0
