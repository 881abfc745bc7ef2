"""Hybrid sharding: R groups of G ranks; and a second copy of the parameters over S ranks for backward.

A second copy changes no bit; with groups the fuzz compares the numbers with plain PyTorch. Per step of k
micro-batches a rank sends

    inside its group    (2kP - k kept + kP) (G - 1) / G elements
    across groups       2k (P / G) (R - 1) / R
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroshard
from tests.distributed.training import (
    SendCounter,
    build,
    caught,
    micro_batches,
    padded_size,
    start,
    step,
    token_loss,
)
from tests.ranks import on_ranks


@pytest.mark.long_where(stage=[1])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_a_step_sends_what_the_table_says(stage):
    size = k = 2
    options = {"stage": stage, "shard_group_size": size, "gradient_accumulation_steps": k}
    engine, _ = start(build("GPT"), "SGD", **options)
    found = []
    for number in range(3):
        engine.reset_comm_report()
        with mock.patch.object(dist, "isend", SendCounter()) as counter:
            micro_batches(engine, k)(number)
        sent = engine.comm_report().bytes_sent
        found.append((counter.elements, (sent["all_gather"] + sent["reduce_scatter"]) // 4))
    P, num_groups = padded_size(engine), dist.get_world_size() // size
    kept = sum(unit.numel for unit in engine.units if unit.kept)
    inside = {1: 2 * P, 3: 3 * k * P - k * kept}[stage] * (size - 1) // size
    num_reductions = 1 if stage == 1 else k
    across = 2 * num_reductions * (P // size) * (num_groups - 1) // num_groups
    estimate = zeroshard.estimate(build("GPT"), dist.get_world_size(), engine.config)
    want, estimated = inside + across, estimate.wire_bytes_per_step // 4
    assert found == [(want, want)] * 3
    assert estimated == want


def data_and_loss():
    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    rows = torch.arange(16).float().reshape(16, 1).expand(16, 4)
    data = torch.utils.data.TensorDataset(rows, torch.zeros(16, 1))
    config = {"shard_group_size": 2, "micro_batch_size": 4}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, _, loader, _ = zeroshard.initialize(
        model, optimizer, config, training_data=data, loss_fn=F.mse_loss
    )
    (batch,) = list(loader)
    engine.load_state_dict({"weight": torch.full((1, 4), 2.0), "bias": torch.zeros(1)})
    shown = {name: value.clone() for name, value in engine.full_state_dict().items()}
    return sorted(batch[0][:, 0].tolist()), engine.train_batch(*batch).item(), shown


def test_data_is_spread_and_losses_are_averaged_over_all_ranks(ranks):
    results = ranks(4, data_and_loss)
    assert sorted(row for rows, _, _ in results for row in rows) == [float(row) for row in range(16)]
    want = sum((8.0 * row) ** 2 for row in range(16)) / 16
    assert [loss for _, loss, _ in results] == [pytest.approx(want)] * 4
    assert torch.equal(results[0][2]["weight"], torch.full((1, 4), 2.0))
    assert [shown for _, _, shown in results[1:]] == [{}, {}, {}]


# ------------------------------------------------------------------- a second copy from forward to backward


@on_ranks(4)
def test_a_second_copy_is_never_stale():
    """Two forwards before a backward, evaluation between, a failed forward, no_sync."""
    found = []

    def run(**options):
        engine, optimizer = start(build("GPT"), "SGD", **options)
        for number in range(3):
            first, second = token_loss(engine, number), token_loss(engine, number + 10)
            first.backward()
            second.backward()
            with torch.no_grad():
                token_loss(engine, number + 20)
            abandoned = token_loss(engine, number + 30)
            optimizer.step()
            del abandoned
            with engine.no_sync():
                token_loss(engine, number + 40).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict(), engine.memory_report().unsharded

    want, _ = run()
    got, at_rest = run(reshard_after_forward=2)
    found += [name for name in want if not torch.equal(want[name], got[name])]
    assert (found, at_rest) == ([], 0)


# --------------------------------------------------------------------------------------------- bad input


@on_ranks(4)
def test_groups_that_do_not_fit_are_refused_with_the_numbers():
    groups, second, in_group, differing = [
        caught(start, build("GPT"), shard_group_size=3),
        caught(start, build("GPT"), reshard_after_forward=3),
        caught(start, build("GPT"), shard_group_size=2, reshard_after_forward=4),
        caught(start, build("GPT"), shard_group_size=2 if dist.get_rank() else 4),
    ]
    assert groups == (
        "ValueError: 4 rank(s) cannot be arranged with shard_group_size=3: expected a multiple of 3"
    )
    assert second == (
        "ValueError: reshard_after_forward=3: expected a divisor of the 4 ranks over which parameters "
        "are sharded"
    )
    assert "reshard_after_forward=4: expected a divisor of the 2 ranks" in in_group
    assert "rank(s) 0 have config shard_group_size=4; rank(s) 1, 2, 3 have" in differing


@on_ranks(4)
def test_backward_gathers_among_a_few_ranks_as_many_bytes_as_estimated():
    among, model = 2, build("tied GPT")
    engine, optimizer = start(model, reshard_after_forward=among)
    estimate = zeroshard.estimate(build("tied GPT"), dist.get_world_size(), engine.config)
    for number in range(2):
        engine.reset_comm_report()
        step(engine, optimizer, token_loss, number)
    P, kept = padded_size(engine), sum(unit.numel for unit in engine.units if unit.kept)
    size, sent = dist.get_world_size(), engine.comm_report().bytes_sent
    assert sent["all_gather"] == 4 * (P * (size - 1) // size + (P - kept) * (among - 1) // among)
    assert sent["all_gather"] + sent["reduce_scatter"] == estimate.wire_bytes_per_step
    assert engine.memory_report().unsharded == 0
