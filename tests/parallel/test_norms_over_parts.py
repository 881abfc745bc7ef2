"""Optimizers that need norms of whole parameters, and those with states in blocks, over tensor ranks."""

import functools

import pytest
import torch

from tests.parallel.trained import check_same, divided, plain
from zeroshard.optim import LAMB, LARS

LAYERWISE = {
    "LARS": functools.partial(LARS, lr=0.5, weight_decay=0.01, trust_coefficient=0.02),
    "LAMB": functools.partial(LAMB, lr=1e-2),
}


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.long_where(stage=[0, 1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("name", LAYERWISE)
def test_trust_ratios_are_those_of_whole_matrices(ranks, name, num_ranks, tp, stage):
    check(ranks, num_ranks, name, {"stage": stage, "mesh": {"tp": tp}})


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERWISE)
def test_shard_groups_count_each_element_once(ranks, name):
    check(ranks, 8, name, {"stage": 2, "mesh": {"tp": 2}, "shard_group_size": 2})


def check(ranks, num_ranks, name, config):
    want = plain(LAYERWISE[name])
    runs = ranks(num_ranks, divided, config, LAYERWISE[name], timeout=120)
    check_same(runs)
    for run in runs:
        assert run.losses == pytest.approx(want.losses, rel=1e-9)
        for key, value in run.state.items():
            torch.testing.assert_close(value, want.state[key], rtol=0, atol=1e-9, msg=key)
