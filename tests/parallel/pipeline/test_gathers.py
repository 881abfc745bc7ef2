"""How often the chunks of a pipeline gather their units at stage 3, and what they hold at most."""

from collections import Counter

import pytest

from tests.parallel.pipeline.runs import MODELS, llama, start, train
from zeroshard.sharding.unit import Unit, UnitState

NUM_MICROBATCHES, LAYERS = 4, 12


def gathers(schedule, reshard):
    """The gathers of each unit in a step, elements that were whole at most, and the elements of the units."""
    MODELS["deep"] = lambda: llama(num_hidden_layers=LAYERS)
    pipeline = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES}
    config = {"stage": 3, "reshard_after_forward": reshard, "mesh": {"pp": 2}, "pipeline": pipeline}
    engine, found, move = start("deep", config), Counter(), Unit._move
    train(engine, [0, 1])

    def counted(unit, state):
        found[unit.name] += state is UnitState.GATHERING
        move(unit, state)

    meter = engine._runtime.context.meter
    meter.peak = meter.now
    Unit._move = counted
    try:
        train(engine, [2])
    finally:
        Unit._move = move
    sizes, most, at_rest = {unit.name: unit.numel for unit in engine.units}, meter.peak // 8, meter.now
    engine.close(restore=False)
    return found, most, sizes, at_rest


@pytest.mark.long_where(schedule=["interleaved"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_each_unit_is_gathered_once_a_batch_where_it_stays(ranks, schedule):
    for found, most, sizes, at_rest in ranks(4, gathers, schedule, False):
        assert found == dict.fromkeys(sizes, 1)
        assert most == sum(sizes.values())
        assert at_rest == 0


@pytest.mark.long_where(schedule=["1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_else_units_are_gathered_for_each_micro_batch_and_few_are_whole_at_once(ranks, schedule):
    for found, most, sizes, at_rest in ranks(4, gathers, schedule, True):
        assert found.keys() == sizes.keys()
        assert max(found.values()) == 2 * NUM_MICROBATCHES
        assert most <= sizes[""] + 3 * max(sizes.values())  # one, the next one, and one gathered ahead
        assert at_rest == 0
