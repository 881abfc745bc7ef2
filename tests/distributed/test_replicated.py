"""Frozen parameters that each rank holds whole at stage 3: the same bits as sharded, and never gathered."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import (
    averaged_step,
    numbers,
    start,
    step,
    unequal,
)
from tests.ranks import on_ranks

WIDTH = 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Seeing(nn.Module):
    """A frozen tower with a table of its own, a trained trunk with a frozen block; [n, 20] -> [n, 3]."""

    def __init__(self):
        super().__init__()
        self.tower = nn.ModuleDict({"stem": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)})
        self.tower["blocks"] = nn.ModuleList(Block() for _ in range(3))
        self.trunk = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.tower.requires_grad_(False)
        self.trunk[1].requires_grad_(False)

    def forward(self, x, sees=True):
        y = x
        if sees:
            y = self.tower["stem"](y)
            for block in self.tower["blocks"]:
                y = block(y)
            y = self.tower["norm"](y)
        for block in self.trunk:
            y = block(y)
        return self.head(y)


def build():
    torch.manual_seed(0)
    return Seeing()


def loss_of(model, number, **others):
    return model(numbers(number, 5, WIDTH), **others).float().square().mean()


# ------------------------------------------------------------------------------------- memory and traffic


def costs(frozen, config):
    """Bytes of a step and at rest, and the estimate of both."""
    model = build()
    config = {"stage": 3, "frozen": frozen, **config}
    want = zeroshard.estimate(copy.deepcopy(model), dist.get_world_size(), config, host_computes=True)
    engine, optimizer = start(model, **config)
    for number in range(3):
        engine.reset_comm_report()
        engine.reset_memory_report()
        step(engine, optimizer, loss_of, number)
    sent, report = engine.comm_report().bytes_sent, engine.memory_report()
    sizes = {unit.name: unit.numel for unit in engine.units}
    with torch.no_grad():
        engine.reset_comm_report()
        loss_of(engine, 0)
    evaluated = engine.comm_report().bytes_sent["all_gather"]
    return sizes, sent, report, want, evaluated


@pytest.mark.parametrize("config", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_nothing_of_replicated_parameters_is_gathered(ranks, config):
    size = 2 if config else 4
    for sizes, sent, report, want, evaluated in ranks(2, costs, "replicate", config):
        trained = ("trunk.0", "trunk.2")
        root = 512  # the head, in two blocks of 256; its frozen neighbours lie in a buffer of their own
        share = root + sum(sizes[name] for name in trained)
        assert evaluated == size * share // 2
        # The root stays gathered up to its backward, and so does the last unit that is gathered.
        assert sent["all_gather"] == size * (share + sizes["trunk.0"]) // 2
        assert sent["reduce_scatter"] == 4 * share // 2
        assert sent["all_gather"] + sent["reduce_scatter"] == want.wire_bytes_per_step
        assert report.parameters == want.parameters
        assert report.peak_unsharded == want.peak_unsharded


@on_ranks(2)
def test_a_rank_may_leave_out_a_tower_that_is_not_gathered():
    """Where runs differ in which ranks leave out the blocks of a tower, with a trained layer before them."""
    model, found = build(), []
    model.tower["stem"].requires_grad_(True)
    replica = copy.deepcopy(model)
    engine, optimizer = start(model, frozen=["tower.blocks"], num_prefetch=2)
    other = torch.optim.AdamW([p for p in replica.parameters() if p.requires_grad], lr=1e-3)
    for number in range(3):
        sees = (dist.get_rank() + number) % 2 == 0

        def loss(net, number, sees=sees):
            return loss_of(net, number, sees=sees)

        got = step(engine, optimizer, loss, number)
        want = averaged_step(replica, other, loss, number)
        found += [] if got == want else [(number, got, want)]
    state = engine.full_state_dict()
    want = {name: value for name, value in replica.state_dict().items() if state}
    return found + list(unequal("parameters", state, want))


# --------------------------------------------------------------------------------------------- the rest


def gathered_when_frozen(frozen):
    """Bytes of evaluation, of a model that is frozen as a whole."""
    engine, *_ = zeroshard.initialize(build().requires_grad_(False), None, {"frozen": frozen})
    engine.reset_comm_report()
    loss_of(engine, 0)
    return engine.comm_report().bytes_sent["all_gather"]


def test_a_model_that_is_frozen_as_a_whole_evaluates_without_exchange(ranks):
    assert ranks(2, gathered_when_frozen, "replicate") == [0, 0]
    assert min(ranks(2, gathered_when_frozen, "shard")) > 0
