"""Parameters without a gradient: none of any rank's is None, some rank's count zeros.

The reference is DDP with find_unused_parameters=True; two ranks, so equal to the bit. Weight decay and
momentum would move a parameter whose gradient is zeros instead of None.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.models import Gated
from tests.distributed.training import (
    STAGES,
    adamw,
    differences,
    finish,
    numbers,
    plain,
    replicate,
    start,
)
from tests.ranks import on_ranks

WIDTH = 20


class Wrapped(nn.Module):
    """A block: layers that are left out on demand."""

    def __init__(self):
        super().__init__()
        self.inner = Gated(WIDTH)

    def forward(self, x, what):
        if what == "constant":
            return torch.zeros_like(x)
        return x if what == "input" else self.inner(x, what == "layers")


class Branching(nn.Module):
    """`plan`: block number -> what it does other than compute."""

    def __init__(self, num_blocks=4):
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Wrapped() for _ in range(num_blocks))
        self.last, self.never = nn.Linear(WIDTH, 3), nn.Linear(5, 5)

    def forward(self, x, plan):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, plan.get(number))
        return self.last(x)


def names_with_gradient(model):
    return {name for name, p in model.named_parameters() if p.grad is not None}


def follow(plans, optimizer, **config):
    """Where training with a plan for each step and rank differs from DDP's."""
    torch.manual_seed(0)
    model, found = Branching(), []
    replica = replicate(model, find_unused=True)
    plain_optimizer = optimizer(replica.parameters())

    def run(net, its_optimizer, names):
        losses = []
        for number, plan in enumerate(plans):
            loss = net(numbers(number, 5, 7), plan[dist.get_rank()]).square().mean()
            loss.backward()
            names.append(names_with_gradient(plain(net)))
            its_optimizer.step()
            its_optimizer.zero_grad()
            losses.append(loss.item())
        return finish(net, losses)

    wanted_names = []
    want = run(replica, plain_optimizer, wanted_names)
    for stage in STAGES:
        sharded = copy.deepcopy(model)
        engine, made = start(sharded, optimizer(sharded.parameters()), stage=stage, **config)
        got_names = []
        got = run(engine, made, got_names)
        found += differences(f"stage {stage}", got, want)
        found += [(stage, a ^ b) for a, b in zip(got_names, wanted_names, strict=True) if a != b]
    assert not any("never" in name or "unused" in name for names in wanted_names for name in names)
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1)


def follow_with_both(plans):
    return follow(plans, adamw) + follow(plans, sgd, num_prefetch=2)


@on_ranks(2)
def test_layers_left_out_inside_a_unit_on_one_rank_count_zeros():
    layers = [{}, {1: "layers"}, {0: "layers", 2: "layers"}, {3: "layers"}]
    plans = [(layers[0], layers[0]), (layers[1], {}), ({}, layers[2]), (layers[3], layers[1]), ({}, {})]
    return follow_with_both(plans)
