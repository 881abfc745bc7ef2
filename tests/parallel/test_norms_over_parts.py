"""Optimizers that need norms of whole parameters, and those with states in blocks, over tensor ranks."""

import functools

import pytest
import torch

from tests.checkpoint.runs import without_numba
from tests.parallel.runs import build, compare, divided, initialize, plain
from zeroshard.optim import LAMB, LARS, AdamW8bit

LAYERWISE = {
    "LARS": functools.partial(LARS, lr=0.5, weight_decay=0.01, trust_coefficient=0.02),
    "LAMB": functools.partial(LAMB, lr=1e-2),
}


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "name", "stage"), [(2, "LAMB", 3), (4, "LARS", 0), (4, "LAMB", 2)])
def test_trust_ratios_are_those_of_whole_matrices(ranks, name, num_ranks, stage):
    config = {"stage": stage, "mesh": {"tp": 2}}
    runs = ranks(num_ranks, divided, config, LAYERWISE[name], timeout=120)
    compare(runs, plain(LAYERWISE[name]), losses=1e-9, norms=1e-6, values=1e-9)


# ------------------------------------------------------------------------------------------ states in blocks

OF_8_BITS = functools.partial(AdamW8bit, lr=1e-2, min_8bit_size=600)
"""Matrices of 1024 elements, of which two tensor ranks hold 512 each, have states of 8 bits."""


@without_numba
def states_of(stage):
    engine = initialize(build(0).float(), OF_8_BITS, {"stage": stage, "mesh": {"tp": 2}})
    tokens = torch.arange(20).view(4, 5)
    engine.backward(engine(tokens).square().mean())
    engine.step()
    found = {p.fqn: engine.optimizer.state[p]["exp_avg"].dtype for p in engine.parameters()}
    count = engine.num_parameters()
    engine.close(restore=False)
    return found, count


def test_thresholds_and_counts_are_of_whole_parameters(ranks):
    want = {name: p.numel() >= 600 for name, p in build(0).named_parameters()}
    for found, count in ranks(2, states_of, 3):
        assert {name: dtype is torch.uint8 for name, dtype in found.items()} == want
        assert count == sum(p.numel() for p in build(0).parameters())
