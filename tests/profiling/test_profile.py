"""Profiles of engines: the parts of a step, what they leave behind, and their table."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.models import Tiny
from tests.distributed.training import square_loss, start
from zeroshard.comm.watch.status import RankStatus


def tiny():
    torch.manual_seed(0)
    return Tiny(num_blocks=2)


def steps(engine, optimizer, numbers):
    losses = []
    for number in numbers:
        loss = square_loss(engine, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def without_operations(profile):
    """torch's own profile stays on its rank."""
    profile.operations = None
    return profile


def profiled(stage, **options):
    """A profile of three steps. That it changes nothing is in `test_trainings.py`."""
    engine, optimizer = start(tiny(), "AdamW", stage=stage)
    steps(engine, optimizer, range(2))
    with zeroshard.profile(engine, **options) as profile:
        steps(engine, optimizer, range(2, 5))
    return without_operations(profile)


def test_gathers_reductions_and_waits_belong_to_their_units(ranks):
    for profile in ranks(2, profiled, 3):
        assert profile.num_steps == 3
        block = profile.units["unit 'blocks.1'"]
        assert all(block[kind] > 0 for kind in ("forward", "backward", "gather", "reduce", "wait"))
        assert profile.phases["wait"] == pytest.approx(sum(profile.waits.values()))
        assert any("all-gather of unit 'blocks." in name for name in profile.waits)
        assert any("reduce-scatter" in name for name in profile.waits)


def in_parts():
    """Profiles that go wrong: two at a time, one that ends in an exception, and one without a step."""
    engine, optimizer = start(tiny(), "AdamW")
    messages = []
    with zeroshard.profile(engine) as outer:
        try:
            with zeroshard.profile(engine):
                pass
        except RuntimeError as error:
            messages.append(str(error))
        steps(engine, optimizer, range(1))
    try:
        with zeroshard.profile(engine):
            raise LookupError("a step that fails")
    except LookupError as error:
        messages.append(str(error))
    with zeroshard.profile(engine) as empty:
        pass
    losses = steps(engine, optimizer, range(1, 2))
    return outer.num_steps, empty.num_steps, messages, type(engine._runtime.here) is RankStatus, losses


def test_a_profile_that_goes_wrong_leaves_the_engine_as_it_was(ranks):
    for num_steps, num_empty, messages, is_clean, losses in ranks(2, in_parts):
        assert (num_steps, num_empty) == (1, 0)
        assert messages[0].startswith("another profile of this engine is under way")
        assert messages[1] == "a step that fails"
        assert is_clean
        assert len(losses) == 1


RANGES = {
    "zeroshard: forward of unit 'blocks.0'",
    "zeroshard: backward of unit 'blocks.1'",
    "zeroshard: step",
}


def operations(path):
    engine, optimizer = start(tiny(), "AdamW")
    with zeroshard.profile(engine, with_flops=True) as profile:
        steps(engine, optimizer, range(1))
    averages = profile.operations.key_averages()
    trace = f"{path}/{dist.get_rank()}.json"
    profile.operations.export_chrome_trace(trace)
    flops = {event.key: event.flops for event in averages}
    return flops, json.loads(Path(trace).read_text())


def test_operations_of_torch_have_our_phases_as_ranges(ranks, tmp_path):
    for flops, trace in ranks(2, operations, str(tmp_path)):
        assert flops["aten::addmm"] > 0
        assert flops.keys() >= RANGES
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        ranges = {event["name"]: event for event in events if event["name"] in RANGES}
        assert ranges.keys() == RANGES
        block = ranges["zeroshard: forward of unit 'blocks.0'"]
        end = block["ts"] + block["dur"]
        inside = {event["name"] for event in events if block["ts"] <= event["ts"] < end}
        assert {"aten::addmm", "aten::tanh"} <= inside


def test_the_table_has_units_and_kinds():
    engine, optimizer = start(tiny(), "AdamW")
    with zeroshard.profile(engine) as profile:
        steps(engine, optimizer, range(2))
    title, columns, _, *lines = str(profile).splitlines()
    assert title == "a step by unit, mean of 2, ms"
    assert columns.split() == ["unit", *(kind for kind, seconds in profile.phases.items() if seconds), "all"]
    by_unit = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert {"the root unit", "unit 'blocks.0'", "unit 'blocks.1'", "all", "share"} <= by_unit.keys()
    assert by_unit["all"][-1] == f"{1000 * sum(profile.phases.values()):.2f}"
    assert by_unit["share"][-1] == "100.0%"


def test_a_profile_needs_an_engine():
    with pytest.raises(
        TypeError, match=r"expected an engine, or a model of zeroshard\.shard, got Sequential"
    ):
        zeroshard.profile(nn.Sequential(nn.Linear(8, 8))).__enter__()


def stepped_by_two():
    model = tiny()
    sharded = zeroshard.shard(model, {"stage": 3})
    parameters = list(sharded.module.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:3], parameters[3:])]
    sharded.attach(*optimizers)
    with pytest.raises(TypeError, match="has no schedule"):
        zeroshard.profile(sharded, schedule=None).__enter__()
    with zeroshard.profile(sharded) as profile:
        for number in range(2):
            square_loss(sharded.module, number).backward()
            for optimizer in optimizers:
                optimizer.step()
    return profile.num_steps


def test_a_step_of_several_optimizers_is_one(ranks):
    assert ranks(2, stepped_by_two) == [2, 2]
