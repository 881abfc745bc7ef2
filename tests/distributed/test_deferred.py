"""Models without memory, sharded: the same training as of an ordinary model, whatever each rank's seed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.ranks import on_ranks


def make() -> nn.Module:
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


def train(context: AbstractContextManager[None], config: dict) -> list:
    torch.manual_seed(dist.get_rank())  # rank 0's values count
    with context:
        model = make()
    engine, *_ = zeroshard.initialize(model, grouped, config)
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, 50, (2, 9), generator=generator)
        loss = F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return [losses, {name: value.tolist() for name, value in engine.full_state_dict().items()}]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"stage": 0}, marks=pytest.mark.long),
        {"stage": 3, "precision": {"param_dtype": "bf16"}},
    ],
)
@on_ranks(2)
def test_a_model_without_memory_trains_as_an_ordinary_one(config):
    assert train(zeroshard.deferred_init(), config) == train(nullcontext(), config)


@on_ranks(1)
def test_an_optimizer_whose_state_has_no_values_is_refused():
    with zeroshard.deferred_init():
        model = make()
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        zeroshard.initialize(model, torch.optim.Adagrad)


@on_ranks(2)
def test_what_needs_memory_is_refused_while_a_model_is_recorded_and_works_afterwards():
    engine, *_ = zeroshard.initialize(make(), grouped, {"stage": 3})
    tokens = torch.arange(9)[None]
    with zeroshard.deferred_init():
        model = make()
        for call, name in ((zeroshard.initialize, "initialize"), (zeroshard.shard, "shard")):
            with pytest.raises(RuntimeError, match=rf"^{name} inside zeroshard\.deferred_init\(\)"):
                call(model)
        with pytest.raises(
            RuntimeError, match=r"^a sharded model cannot be called inside zeroshard\.deferred_init\(\)"
        ):
            engine(tokens)
    losses = []
    for made in (engine, zeroshard.initialize(model, grouped, {"stage": 3}).engine):
        loss = F.cross_entropy(made(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        made.backward(loss)
        losses.append(made.step())
    assert losses == [True, True]
