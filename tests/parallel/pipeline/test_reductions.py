"""The exchanges of chunks: gradients are reduced in their last backward, units gathered."""

from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist

from tests.parallel.pipeline.runs import llama, start, train
from tests.ranks import on_ranks
from zeroshard.sharding.unit import Unit, UnitState


def layers(**actions):
    return {f"model.layers.{number[1:]}": action for number, action in actions.items()}


EARLY = [
    ("1f1b", layers(_0="0B1", _1="0B1"), layers(_2="1B1", _3="1B1")),
    ("interleaved", layers(_0="0B1", _2="2B1"), layers(_1="1B1", _3="3B1")),
    ("zbv", layers(_0="0W1", _3="3W1"), layers(_1="1W1", _2="2W1")),
]
"""For the ranks of both parts, the actions that start the reductions of units."""


@pytest.mark.long_where(schedule=["1f1b", "interleaved"])
@pytest.mark.parametrize(("schedule", "first", "last"), EARLY)
@on_ranks(4)
def test_the_units_of_a_chunk_are_reduced_with_it_and_the_root_at_last(schedule, first, last):
    pipeline = {"schedule": schedule, "num_microbatches": 2}
    engine = start("llama", {"stage": 3, "mesh": {"pp": 2}, "pipeline": pipeline})
    train(engine, [0])
    started, ended, reduce = {}, set(), Unit.reduce

    def reducing(unit):
        assert unit not in ended, "each unit is reduced once"
        started.setdefault(unit.name, engine._runtime.here.action.split()[0])
        goes_on = reduce(unit)
        if not goes_on:
            ended.add(unit)
        return goes_on

    with mock.patch.object(Unit, "reduce", reducing):
        train(engine, [1])
    want, end = last if dist.get_rank() // 2 else first, started[""]
    assert started == want | {"": end}
    assert end in want.values()
    everyone = [None] * 4
    dist.all_gather_object(everyone, [*started.items()])
    assert everyone[::2] == everyone[1::2]  # data-parallel ranks have one order


# ---------------------------------------------------------------------------------------- gathers

NUM_MICROBATCHES, LAYERS = 2, 8


@pytest.mark.long_where(schedule=["interleaved"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@on_ranks(4)
def test_units_are_gathered_once_a_batch_where_they_stay_and_else_for_each_micro_batch(schedule):
    """Few are whole at once then. Counted are the gathers of each unit, and the elements that are whole."""
    move = Unit._move
    for reshard in (False, True):
        pipeline = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES, "balance": "memory"}
        config = {"stage": 3, "reshard_after_forward": reshard, "mesh": {"pp": 2}, "pipeline": pipeline}
        config["num_prefetch"] = 1
        engine, found = start(llama(num_hidden_layers=LAYERS).double(), config), Counter()
        train(engine, [0])

        def counted(unit, state, found=found):
            found[unit.name] += state is UnitState.GATHERING
            move(unit, state)

        meter = engine._runtime.context.meter
        meter.peak = meter.now
        with mock.patch.object(Unit, "_move", counted):
            train(engine, [1])
        sizes, most = {unit.name: unit.numel for unit in engine.units}, meter.peak // 8
        assert meter.now == 0
        if reshard:
            assert found.keys() == sizes.keys()
            assert max(found.values()) == 2 * NUM_MICROBATCHES
            assert most <= sizes[""] + 3 * max(sizes.values())  # one, the next one, and one gathered ahead
        else:
            assert found == dict.fromkeys(sizes, 1)
            assert most == sum(sizes.values())
        engine.close(restore=False)
