"""Elements on the wire per step, against the table of the stages.

P is the padded size, `kept` the padded size of the units that `engine.units` lists as kept, k the number
of micro-batches. Per step a rank sends, times (N - 1) / N:

    stage   all-gather       reduce-scatter
    0       P                P               (the all-reduce of the gradients)
    1       P                P
    2       P                kP
    3       2kP - k kept     kP

With R groups of G ranks (hybrid sharding) it sends these times (G - 1) / G inside its group, and across
groups 2k (P / G) (R - 1) / R elements. A second copy of the parameters, over a few ranks for the backward,
changes no bit.
"""

import contextlib
import itertools
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroshard
from tests.distributed.models import Block, tiny
from tests.distributed.training import (
    ALL_STAGES,
    SOME_STAGES,
    STAGES,
    SendCounter,
    build,
    caught,
    different,
    micro_batches,
    padded_size,
    small_gpt,
    start,
    step,
    token_loss,
)
from tests.ranks import on_ranks


def expected(engine, stage, k):
    """(all-gather, reduce-scatter) elements that one rank sends per step."""
    P, n = padded_size(engine), dist.get_world_size()
    kept = sum(unit.numel for unit in engine.units if unit.kept)
    gathered = {0: P, 1: P, 2: P, 3: 2 * k * P - k * kept}[stage]
    scattered = {0: P, 1: P, 2: k * P, 3: k * P}[stage]
    assert P % n == 0
    return gathered * (n - 1) // n, scattered * (n - 1) // n


def measure(engine, stage, k=1, element_bytes=(4, 4)):
    """Require that each step's traffic is as expected."""
    take_step = micro_batches(engine, k)
    for number in range(2):
        engine.reset_comm_report()
        with mock.patch.object(dist.ProcessGroup, "send", SendCounter()) as counter:
            take_step(number)
        sent = engine.comm_report().bytes_sent
        want = expected(engine, stage, k)
        got = sent["all_gather"] / element_bytes[0], sent["reduce_scatter"] / element_bytes[1]
        assert got == want, (stage, k, number)
        assert (counter.elements, sent["all_reduce"], sent["point_to_point"]) == (sum(want), 0, 0)


@pytest.mark.long_where(num_ranks=[3])
@pytest.mark.parametrize(("num_ranks", "k"), [(2, 1), (3, 3)])
@on_ranks()
def test_the_first_and_later_steps_send_what_the_table_says(k):
    for stage in ALL_STAGES:
        engine, _ = start(small_gpt(), stage=stage, gradient_accumulation_steps=k)
        measure(engine, stage, k)


@on_ranks(2)
def test_units_that_stay_gathered_are_listed_as_kept_and_not_sent_again():
    """Among them an embedding, of which backward needs no parameters, and blocks that all stay gathered."""
    for options, kept in (
        (
            {"units": lambda m: isinstance(m, Block) or getattr(m, "num_embeddings", 0) > 100},
            ["", "tokens", "blocks.2"],
        ),
        ({"reshard_after_forward": False}, ["", "blocks.0", "blocks.1", "blocks.2"]),
        ({"num_prefetch": 5}, ["", "blocks.2"]),
        ({"units": ["Block", "Sequential"]}, None),
        ({"units": lambda m: False}, [""]),
    ):
        engine, _ = start(build("GPT", width=24), stage=3, **options)
        measure(engine, 3)
        assert kept in (None, [unit.name for unit in engine.units if unit.kept])


@on_ranks(2)
def test_bf16_halves_the_bytes_of_parameters_and_reduce_dtype_those_of_gradients():
    """Parameters travel in the compute dtype, gradients in the reduce dtype."""
    for stage, (reduce_dtype, size) in product(SOME_STAGES, ((None, 4), ("bf16", 2))):
        precision = {"param_dtype": "bf16", "reduce_dtype": reduce_dtype}
        engine, _ = start(small_gpt(), stage=stage, precision=precision)
        measure(engine, stage, element_bytes=(4 if stage == 0 else 2, size))


@on_ranks(2)
def test_under_no_sync_gradients_are_sent_once():
    """Three micro-batches, one reduction."""
    for stage in STAGES:
        engine, optimizer = start(small_gpt(), stage=stage)
        for number in range(2):
            engine.reset_comm_report()
            for micro in range(3):
                with engine.no_sync() if micro < 2 else contextlib.nullcontext():
                    token_loss(engine, 3 * number + micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent = engine.comm_report().bytes_sent
            assert sent["reduce_scatter"] == 4 * padded_size(engine) // 2, (stage, number)
            gathered = expected(engine, stage, 3 if stage == 3 else 1)[0]
            assert sent["all_gather"] == 4 * gathered, (stage, number)


@on_ranks(2)
def test_evaluation_gathers_each_unit_once_at_stage_3_and_sends_nothing_at_others():
    for stage in ALL_STAGES:
        engine, _ = start(small_gpt(), stage=stage)
        for number in range(2):
            engine.reset_comm_report()
            with torch.no_grad():
                token_loss(engine, number)
            sent = engine.comm_report().bytes_sent
            assert sent["all_gather"] == (2 * padded_size(engine) if stage == 3 else 0)
            assert not sent["reduce_scatter"]


@on_ranks(4)
def test_a_step_sends_what_the_table_says():
    size = k = 2
    options = {"stage": 3, "shard_group_size": size, "gradient_accumulation_steps": k}
    engine, _ = start(small_gpt(), "SGD", **options)
    found = []
    for number in range(2):
        engine.reset_comm_report()
        with mock.patch.object(dist.ProcessGroup, "send", SendCounter()) as counter:
            micro_batches(engine, k)(number)
        sent = engine.comm_report().bytes_sent
        found.append((counter.elements, (sent["all_gather"] + sent["reduce_scatter"]) // 4))
    P, num_groups = padded_size(engine), dist.get_world_size() // size
    kept = sum(unit.numel for unit in engine.units if unit.kept)
    inside = (3 * k * P - k * kept) * (size - 1) // size
    across = 2 * k * (P // size) * (num_groups - 1) // num_groups
    estimate = zeroshard.estimate(small_gpt(), dist.get_world_size(), engine.config)
    want, estimated = inside + across, estimate.wire_bytes_per_step // 4
    assert found == [(want, want)] * 2
    assert estimated == want


@on_ranks(4)
def test_data_is_spread_and_losses_are_averaged_over_all_ranks():
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
    everyone = [None] * 4
    dist.all_gather_object(everyone, batch[0][:, 0].tolist())
    assert sorted(itertools.chain(*everyone)) == [float(row) for row in range(16)]
    want = sum((8.0 * row) ** 2 for row in range(16)) / 16
    assert engine.train_batch(*batch).item() == pytest.approx(want)
    assert torch.equal(shown["weight"], torch.full((1, 4), 2.0)) if dist.get_rank() == 0 else not shown


@on_ranks(4)
def test_a_second_copy_is_never_stale():
    """Two forwards before a backward, evaluation between, a failed forward, no_sync."""
    found = []

    def run(**options):
        engine, optimizer = start(small_gpt(), "SGD", **options)
        for number in range(2):
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
    found += different(got, want)
    assert (found, at_rest) == ([], 0)


@on_ranks(4)
def test_groups_that_do_not_fit_are_refused_with_the_numbers():
    groups, second, in_group, differing = [
        caught(start, tiny(), shard_group_size=3),
        caught(start, tiny(), reshard_after_forward=3),
        caught(start, tiny(), shard_group_size=2, reshard_after_forward=4),
        caught(start, tiny(), shard_group_size=2 if dist.get_rank() else 4),
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
    among, model = 2, small_gpt()
    engine, optimizer = start(model, reshard_after_forward=among)
    estimate = zeroshard.estimate(small_gpt(), dist.get_world_size(), engine.config)
    for number in range(2):
        engine.reset_comm_report()
        step(engine, optimizer, token_loss, number)
    P, kept = padded_size(engine), sum(unit.numel for unit in engine.units if unit.kept)
    size, sent = dist.get_world_size(), engine.comm_report().bytes_sent
    assert sent["all_gather"] == 4 * (P * (size - 1) // size + (P - kept) * (among - 1) // among)
    assert sent["all_gather"] + sent["reduce_scatter"] == estimate.wire_bytes_per_step
    assert engine.memory_report().unsharded == 0
