"""Profiles of engines: the parts of a step, what they leave behind, and their table."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.distributed.models import Tiny
from tests.distributed.training import square_loss, start
from zeroshard.comm.watch.status import RankStatus
from zeroshard.profiling.report import Label, MemorySample, describe


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


def profiled(stage, **options):
    """A profile of three steps. That it changes nothing is in `test_trainings.py`."""
    engine, optimizer = start(tiny(), "AdamW", stage=stage)
    steps(engine, optimizer, range(2))
    with zeroshard.profile(engine, **options) as profile:
        steps(engine, optimizer, range(2, 5))
    return profile


def test_gathers_reductions_and_waits_belong_to_their_units(ranks):
    for profile in ranks(2, profiled, 3):
        block = profile.units["unit 'blocks.1'"]
        assert all(block[kind] > 0 for kind in ("forward", "backward", "gather", "reduce"))
        assert profile.phases["wait"] == pytest.approx(sum(profile.waits.values()))
        assert any("all-gather of unit 'blocks." in name for name in profile.waits)
        assert any("reduce-scatter" in name for name in profile.waits)


def test_the_memory_at_the_peak_names_its_phase_and_the_gathered_units(ranks):
    for profile in ranks(2, profiled, 3):
        assert profile.peak.total == max(sample.total for sample in profile.samples)
        assert all(sum(sample.kinds.values()) == sample.total for sample in profile.samples)
        gathered = [sample for sample in profile.samples if sample.unsharded]
        assert gathered
        assert any(sample.packed for sample in profile.samples)
        kinds = {sample.phase.kind for sample in profile.samples}
        assert kinds == {"forward", "backward", "step", "other"}


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
    try:
        print(empty.seconds_per_step)
    except RuntimeError as error:
        messages.append(str(error))
    losses = steps(engine, optimizer, range(1, 2))
    return outer.num_steps, messages, type(engine._runtime.here) is RankStatus, losses


def test_a_profile_that_goes_wrong_leaves_the_engine_as_it_was(ranks):
    for num_steps, messages, is_clean, losses in ranks(2, in_parts):
        assert num_steps == 1
        assert messages[0].startswith("another profile of this engine is under way")
        assert messages[1] == "a step that fails"
        assert messages[2].startswith("the profile has no step")
        assert is_clean
        assert len(losses) == 1


RANGES = {
    "zeroshard: forward of unit 'blocks.0'",
    "zeroshard: backward of unit 'blocks.1'",
    "zeroshard: step",
}


def operations(path):
    engine, optimizer = start(tiny(), "AdamW")
    with zeroshard.profile(engine, operations=True) as profile:
        steps(engine, optimizer, range(1))
    averages = profile.operations.key_averages()
    trace = f"{path}/{dist.get_rank()}.json"
    profile.operations.export_chrome_trace(trace)
    return {event.key for event in averages}, json.loads(Path(trace).read_text()), profile.seconds


def test_operations_of_torch_have_our_phases_as_ranges(ranks, tmp_path):
    for names, trace, seconds in ranks(2, operations, str(tmp_path)):
        assert "aten::addmm" in names
        assert names >= RANGES
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        ranges = {event["name"]: event for event in events if event["name"] in RANGES}
        assert ranges.keys() == RANGES
        assert sum(event["dur"] for event in ranges.values()) < 1e6 * seconds
        block = ranges["zeroshard: forward of unit 'blocks.0'"]
        end = block["ts"] + block["dur"]
        inside = {event["name"] for event in events if block["ts"] <= event["ts"] < end}
        assert {"aten::addmm", "aten::tanh"} <= inside


def test_the_table_has_units_kinds_and_the_peak():
    engine, optimizer = start(tiny(), "AdamW")
    with zeroshard.profile(engine) as profile:
        steps(engine, optimizer, range(2))
    title, columns, _, *lines = str(profile).splitlines()
    assert title == "a step by unit, mean of 2, ms"
    assert columns.split() == ["unit", *(kind for kind, seconds in profile.phases.items() if seconds), "all"]
    by_unit = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert {"the root unit", "unit 'blocks.0'", "unit 'blocks.1'", "all", "share"} <= by_unit.keys()
    assert by_unit["all"][-1] == f"{1000 * profile.seconds_per_step:.2f}"
    assert by_unit["share"][-1] == "100.0%"
    assert lines[-1].startswith("memory at the peak ")
    assert lines[-1].endswith(str(profile.peak))


def test_the_peak_names_its_phase_and_the_gathered_units():
    units = ("the root unit", *(f"unit 'blocks.{n}'" for n in range(6)))
    sample = MemorySample(1.0, Label("backward", "unit 'blocks.1'"), 3 << 30, 1 << 30, 0, 2 << 20, units)
    assert str(sample) == (
        "backward of unit 'blocks.1'; gathered: the root unit, unit 'blocks.0', unit 'blocks.1', "
        "unit 'blocks.2', 3 more"
    )
    assert str(sample._replace(units=())) == describe(sample.phase) == "backward of unit 'blocks.1'"


def stepped_by_two():
    model = tiny()
    sharded = zeroshard.shard(model, {"stage": 3})
    parameters = list(sharded.module.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:3], parameters[3:])]
    sharded.attach(*optimizers)
    with zeroshard.profile(sharded) as profile:
        for number in range(2):
            square_loss(sharded.module, number).backward()
            for optimizer in optimizers:
                optimizer.step()
    return profile.num_steps


def test_a_step_of_several_optimizers_is_one(ranks):
    assert ranks(2, stepped_by_two) == [2, 2]
