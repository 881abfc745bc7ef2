"""The exchanges of chunks: gradients are reduced in their last backward, units gathered."""

from collections import Counter

import pytest

from tests.parallel.pipeline.runs import MODELS, llama, start, train
from zeroshard.sharding.unit import Unit, UnitState


def reductions(schedule, num_microbatches, name, options):
    """In a batch, the action that starts the reduction of each unit."""
    pipeline = {"schedule": schedule, "num_microbatches": num_microbatches}
    engine = start(name, {"mesh": {"pp": 2}, "pipeline": pipeline, **options})
    train(engine, [0])
    status, started, start_reduce = engine._runtime.here, {}, Unit.start_reduce

    def starting(unit):
        assert unit.name not in started or engine.dp_world_size == 1, "each unit is reduced once"
        started[unit.name] = status.action.split()[0]
        return start_reduce(unit)

    Unit.start_reduce = starting
    try:
        train(engine, [1])
    finally:
        Unit.start_reduce = start_reduce
    engine.close(restore=False)
    return started


def layers(**actions):
    return {f"model.layers.{number[1:]}": action for number, action in actions.items()}


EARLY = [
    ("1f1b", 2, layers(_0="0B1", _1="0B1"), layers(_2="1B1", _3="1B1")),
    ("interleaved", 2, layers(_0="0B1", _2="2B1"), layers(_1="1B1", _3="3B1")),
    ("zbv", 2, layers(_0="0W1", _3="3W1"), layers(_1="1W1", _2="2W1")),
]


@pytest.mark.long_where(schedule=["1f1b", "interleaved"])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(("schedule", "num_microbatches", "first", "last"), EARLY)
def test_the_units_of_a_chunk_are_reduced_with_it_and_the_root_at_last(
    ranks, schedule, num_microbatches, first, last, stage
):
    found = ranks(4, reductions, schedule, num_microbatches, "llama", {"stage": stage})
    for number, started in enumerate(found):
        want = last if number // 2 else first
        [end] = {action for name, action in started.items() if not name}
        assert started == want | {"": end}
        assert end in want.values()
        assert list(started.items()) == list(found[number // 2 * 2].items())  # one order


# ---------------------------------------------------------------------------------------- gathers

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


@pytest.mark.long_where(schedule=["interleaved"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_else_units_are_gathered_for_each_micro_batch_and_few_are_whole_at_once(ranks, schedule):
    for found, most, sizes, at_rest in ranks(4, gathers, schedule, True):
        assert found.keys() == sizes.keys()
        assert max(found.values()) == 2 * NUM_MICROBATCHES
        assert most <= sizes[""] + 3 * max(sizes.values())  # one, the next one, and one gathered ahead
        assert at_rest == 0
