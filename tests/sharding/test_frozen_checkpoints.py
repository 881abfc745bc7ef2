"""Frozen units in a reentrant checkpoint whose second forward some ranks alone run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inside = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))

    def forward(self, x, cuts):
        x = checkpoint(self.inside, self.first(x), use_reentrant=True)
        return self.last(x.detach() if cuts else x).sum()


def gradients(cutting):
    """The gradient of the first layer of this rank's loss; the losses of some ranks do not depend on it."""
    torch.manual_seed(0)
    config = {"stage": 3, "units": ["Linear"], "watchdog_s": 20.0, "reshard_after_forward": True}
    engine = zeroshard.initialize(Net(), None, config).engine
    found = []
    for _ in range(2):
        engine.zero_grad()
        engine(torch.ones(2, 4), dist.get_rank() in cutting).backward()
        found.append(engine.full_gradient("first.weight"))
    return found


def test_ranks_gather_frozen_units_that_others_compute_again(ranks):
    whole = ranks(2, gradients, ())[0]
    for cutting in ((0,), (1,)):
        for found in ranks(2, gradients, cutting):
            for gradient, full in zip(found, whole, strict=True):
                torch.testing.assert_close(gradient, full / 2)
