"""Models without memory, sharded: the same training as of an ordinary model, whatever each rank's seed."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.distributed.training import differences, start, train
from tests.ranks import on_ranks


def make():
    return nn.Sequential(
        nn.Embedding(50, 16),
        nn.LayerNorm(16),
        *(nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16)) for _ in range(2)),
        nn.Linear(16, 50),
    )


def grouped(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        ],
        lr=1e-2,
    )


@on_ranks(1)
def test_an_optimizer_whose_state_has_no_values_is_refused():
    with zeroshard.deferred_init():
        model = make()
    with pytest.raises(ValueError, match=r"^Adagrad has made its state for '0.weight' on the meta device"):
        zeroshard.initialize(model, torch.optim.Adagrad)


def loss_of(model, number):
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(number))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("config", [{"stage": 0}, {"stage": 3, "precision": {"param_dtype": "bf16"}}])
@on_ranks(2)
def test_a_model_without_memory_trains_as_an_ordinary_one(config):
    runs = []
    for context in (zeroshard.deferred_init(), nullcontext()):
        torch.manual_seed(dist.get_rank())  # rank 0's values count
        with context:
            model = make()
        runs.append(train(*start(model, grouped, **config), 3, loss_of))
    return differences("deferred", *runs)


@on_ranks(2)
def test_what_needs_memory_is_refused_while_a_model_is_recorded_and_works_afterwards():
    engine, optimizer = start(make(), grouped)
    with zeroshard.deferred_init():
        model = make()
        for call, name in ((zeroshard.initialize, "initialize"), (zeroshard.shard, "shard")):
            with pytest.raises(RuntimeError, match=rf"^{name} inside zeroshard\.deferred_init\(\)"):
                call(model)
        refused = r"^a sharded model cannot be called inside zeroshard\.deferred_init\(\)"
        with pytest.raises(RuntimeError, match=refused):
            engine(torch.arange(9)[None])
    for each in ((engine, optimizer), start(model, grouped)):
        train(*each, 1, loss_of)
