"""The exchanges of chunks: gradients are reduced in their last backward or at a reduce, units gathered."""

from collections import Counter

import pytest

from tests.parallel.pipeline.runs import MODELS, compare_bits, llama, start, train
from zeroshard.parallel.pipeline.actions import END_BACKWARD, Action, Kind, Schedule, frozen
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.training import PipelineTraining
from zeroshard.sharding.unit import Unit, UnitState

APART = (
    "0F0,0F1,2F0,2F1,2B0,2B1,0I0,2REDUCE_GRAD,0I1,0W0,0W1,0REDUCE_GRAD,STEP\n"
    "1F0,1F1,3F0,3B0,3F1,3B1,3REDUCE_GRAD,1B0,1REDUCE_GRAD,1B1,1REDUCE_GRAD,STEP\n"
)
"""Chunk 2 is reduced behind the first half of a backward of chunk 0."""


def reductions(schedule, num_microbatches, name, options):
    """In a batch: the action that starts the reduction of each unit; units on their way as actions begin."""
    pipeline = {"schedule": schedule, "num_microbatches": num_microbatches}
    engine = start(name, {"mesh": {"pp": 2}, "pipeline": pipeline, **options})
    train(engine, [0])
    status, reducer, started, under_way = engine._runtime.here, engine._runtime.reducer, {}, {}
    start_reduce, enter = Unit.start_reduce, PipelineTraining.enter

    def starting(unit):
        assert unit.name not in started or engine.dp_world_size == 1, "each unit is reduced once"
        started[unit.name] = status.action.split()[0]
        return start_reduce(unit)

    def entering(pipelined, action):
        under_way[str(action)] = [unit.name for unit in reducer.under_way]
        enter(pipelined, action)

    Unit.start_reduce, PipelineTraining.enter = starting, entering
    try:
        train(engine, [1])
    finally:
        Unit.start_reduce, PipelineTraining.enter = start_reduce, enter
    engine.close(restore=False)
    return started, under_way


def layers(**actions):
    return {f"model.layers.{number[1:]}": action for number, action in actions.items()}


EARLY = [
    ("1f1b", 2, layers(_0="0B1", _1="0B1"), layers(_2="1B1", _3="1B1")),
    ("interleaved", 2, layers(_0="0B1", _2="2B1"), layers(_1="1B1", _3="3B1")),
    ("zbv", 2, layers(_0="0W1", _3="3W1"), layers(_1="1W1", _2="2W1")),
    (APART, 2, layers(_0="0W1", _2="2REDUCE_GRAD"), layers(_1="1B1", _3="3B1")),
]


@pytest.mark.long_where(schedule=["1f1b", "interleaved"])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(("schedule", "num_microbatches", "first", "last"), EARLY)
def test_the_units_of_a_chunk_are_reduced_with_it_and_the_root_at_last(
    ranks, schedule, num_microbatches, first, last, stage
):
    found = ranks(4, reductions, schedule, num_microbatches, "llama", {"stage": stage})
    for number, (started, _) in enumerate(found):
        want = last if number // 2 else first
        [end] = {action for name, action in started.items() if not name}
        assert started == want | {"": end}
        assert end in want.values()
        assert started == found[number // 2 * 2][0], "data-parallel ranks have one order"
        assert list(started) == list(found[number // 2 * 2][0])


def test_later_actions_go_on_beside_the_reductions(ranks):
    found = ranks(4, reductions, APART, 2, "llama", {"stage": 2})
    for _, under_way in found[:2]:
        assert under_way["2REDUCE_GRAD"] == []
        assert under_way["0I1"] == under_way["0W0"] == under_way["0W1"] == ["model.layers.2"]
    for _, under_way in found[2:]:
        assert under_way["1B0"] == under_way["1B1"] == ["model.layers.3"]


def with_reduces(name, behind):
    """A list whose chunks are reduced so many actions behind their last backward; None: at the end of all."""
    schedule, lists = build_schedule(name, 2, 4), []
    for own in schedule.lists:
        ends = {action.chunk: index for index, action in enumerate(own) if action.kind in END_BACKWARD}
        row = []
        for index, action in enumerate(own):
            row.append(action)
            ended = (chunk for chunk, end in ends.items() if behind is not None and index == end + behind)
            row += [Action(Kind.REDUCE, chunk, None) for chunk in ended]
        reduced = {action.chunk for action in row if action.kind is Kind.REDUCE}
        row += [Action(Kind.REDUCE, chunk, None) for chunk in ends if chunk not in reduced]
        lists.append(row)
    return str(Schedule(schedule.placement, 4, frozen(lists)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "name", "options"),
    [
        (4, "llama", {"stage": 2, "precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}),
        (6, "tied llama", {"stage": 1, "precision": {"param_dtype": "bf16", "main_dtype": "bf16"}}),
    ],
)
def test_all_places_of_a_reduce_give_the_same_bits(ranks, num_ranks, name, options):
    """With a reduce at the end of the list, nothing is reduced before the last backward of the rank."""
    own = [with_reduces("zbv", None), with_reduces("zbv", 2), with_reduces("interleaved", 1)]
    compare_bits(ranks, num_ranks, name, ["1f1b", "interleaved", "zb-h1", "zbv", *own], options)


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


@pytest.mark.long_where(schedule=["1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_else_units_are_gathered_for_each_micro_batch_and_few_are_whole_at_once(ranks, schedule):
    for found, most, sizes, at_rest in ranks(4, gathers, schedule, True):
        assert found.keys() == sizes.keys()
        assert max(found.values()) == 2 * NUM_MICROBATCHES
        assert most <= sizes[""] + 3 * max(sizes.values())  # one, the next one, and one gathered ahead
        assert at_rest == 0
