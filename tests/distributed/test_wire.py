"""Elements on the wire per step, against the table of the stages.

P is the padded size, `kept` the padded size of the units that `engine.units` lists as kept, k the number
of micro-batches. Per step a rank sends, times (N - 1) / N:

    stage   all-gather       reduce-scatter
    0       P                P               (the all-reduce of the gradients)
    1       P                P
    2       P                kP
    3       2kP - k kept     kP
"""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import Block
from tests.distributed.training import (
    ALL_STAGES,
    STAGES,
    SendCounter,
    build,
    micro_batches,
    padded_size,
    start,
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


def measure(engine, take_step, stage, k, element_bytes=(4, 4), num_steps=3):
    """Where a step's traffic is not as expected."""
    found = []
    for number in range(num_steps):
        engine.reset_comm_report()
        with mock.patch.object(dist, "isend", SendCounter()) as counter:
            take_step(number)
        sent = engine.comm_report().bytes_sent
        want = expected(engine, stage, k)
        got = sent["all_gather"] / element_bytes[0], sent["reduce_scatter"] / element_bytes[1]
        if got != want or counter.elements != sum(want) or sent["all_reduce"] or sent["point_to_point"]:
            found.append((stage, k, number, got, counter.elements, want, dict(sent)))
    return found


@pytest.mark.long_where(num_ranks=[3])
@pytest.mark.parametrize(("num_ranks", "k"), [(2, 1), (3, 3)])
@on_ranks()
def test_the_first_and_later_steps_send_what_the_table_says(k):
    found = []
    for stage in ALL_STAGES:
        engine, _ = start(build("tied GPT"), stage=stage, gradient_accumulation_steps=k)
        found += measure(engine, micro_batches(engine, k), stage, k)
    return found


@on_ranks(2)
def test_units_that_stay_gathered_are_listed_as_kept_and_not_sent_again():
    """Among them an embedding, of which backward needs no parameters, and blocks that all stay gathered."""
    found, kinds = [], {}
    for name, options in {
        "embedding": {"units": lambda m: isinstance(m, Block) or getattr(m, "num_embeddings", 0) > 100},
        "all kept": {"reshard_after_forward": False},
        "no prefetch": {"num_prefetch": 0},
        "far prefetch": {"num_prefetch": 5},
        "blocks in blocks": {"units": ["Block", "Sequential"]},
        "one unit": {"units": lambda m: False},
    }.items():
        engine, _ = start(build("GPT"), stage=3, **options)
        found += [(name, *line) for line in measure(engine, micro_batches(engine, 1), 3, 1)]
        kinds[name] = [unit.name for unit in engine.units if unit.kept]
    kept = kinds
    assert found == []
    assert kept["embedding"] == ["", "tokens", "blocks.2"]
    assert kept["all kept"] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert kept["no prefetch"] == kept["far prefetch"] == ["", "blocks.2"]
    assert kept["one unit"] == [""]


@on_ranks(2)
def test_bf16_halves_the_bytes_of_parameters_and_reduce_dtype_those_of_gradients():
    """Parameters travel in the compute dtype, gradients in the reduce dtype."""
    found = []
    for stage in STAGES:
        for reduce_dtype, size in ((None, 4), ("bf16", 2)):
            precision = {"param_dtype": "bf16", "reduce_dtype": reduce_dtype}
            engine, _ = start(build("tied GPT"), stage=stage, precision=precision)
            found += measure(
                engine, micro_batches(engine, 1), stage, 1, (4 if stage == 0 else 2, size), num_steps=2
            )
    return found


@on_ranks(2)
def test_under_no_sync_gradients_are_sent_once():
    """Three micro-batches, one reduction."""
    found = []
    for stage in ALL_STAGES:
        engine, optimizer = start(build("tied GPT"), stage=stage)

        def take_step(number, engine=engine, optimizer=optimizer):
            for micro in range(3):
                with engine.no_sync() if micro < 2 else contextlib.nullcontext():
                    token_loss(engine, 3 * number + micro).backward()
            optimizer.step()
            optimizer.zero_grad()

        P = padded_size(engine)
        for number in range(2):
            engine.reset_comm_report()
            take_step(number)
            sent = engine.comm_report().bytes_sent
            if sent["reduce_scatter"] != 4 * P // 2:
                found.append((stage, number, "reduce_scatter", dict(sent), P))
            gathered = expected(engine, stage, 3 if stage == 3 else 1)[0]
            if sent["all_gather"] != 4 * gathered:
                found.append((stage, number, "all_gather", dict(sent), 4 * gathered))
    return found


@on_ranks(2)
def test_evaluation_gathers_each_unit_once_at_stage_3_and_sends_nothing_at_others():
    """At rest nothing is gathered at stages 0 to 2; at stage 3 each unit once."""
    model = build("tied GPT")
    for stage in ALL_STAGES:
        engine, _ = start(copy.deepcopy(model), stage=stage)
        for number in range(2):
            engine.reset_comm_report()
            with torch.no_grad():
                token_loss(engine, number)
            sent = dict(engine.comm_report().bytes_sent)
            sent = sent["all_gather"] / 4 / padded_size(engine), sent["reduce_scatter"]
            assert sent == (0.5 if stage == 3 else 0.0, 0)


@on_ranks(1)
def test_one_rank_sends_nothing_and_calls_nothing():
    for stage in ALL_STAGES:
        engine, optimizer = start(build("tied GPT"), stage=stage)
        with mock.patch.object(dist, "isend", SendCounter()) as counter:
            token_loss(engine, 0).backward()
            optimizer.step()
        report = engine.comm_report()
        assert not any(report.bytes_sent.values()), report
        assert not any(report.calls.values()), report
        assert not counter.elements
