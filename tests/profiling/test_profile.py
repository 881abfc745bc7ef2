"""Profiles of engines: their parts add up to the time inside, they leave nothing behind, and their table."""

import json
import time
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.distributed.models import tiny
from tests.distributed.training import square_loss, start, take_steps
from tests.ranks import on_ranks

LOST, CLOCK_S = 0.1, 0.02
"""The parts add up to the time inside, but for 10 % between ranges, and some ms of a busy machine."""

ON_HOST = {"optimizer": "cpu", "parameters": "cpu"}
CASES = {
    "parameters on the host, accumulated": {
        "stage": 3,
        "gradient_accumulation_steps": 2,
        "offload": ON_HOST,
        "precision": {"main_dtype": "bf16"},
    },
    "stepped in the backward": {"stage": 3, "offload": {"optimizer": "cpu", "step_in_backward": True}},
    "parameters in files": {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}},
}
COPIED = {"parameters on the host, accumulated", "parameters in files"}
"""Cases whose main parameters are not where compute reads them."""


def traces(engine):
    """All that a profile could leave behind: attributes, classes, hooks and modes."""
    runtime = engine._runtime
    units = runtime.units
    holders = [
        *(engine, runtime, runtime.here, runtime.reducer, runtime.context.memory, runtime.context.meter),
        *units,
        *(buffer for unit in units for buffer in unit.buffers),
        *(gradients for unit in units for gradients in unit.gradients),
    ]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = [len(getattr(m, name)) for m in engine.module.modules() for name in hooks]
    of_parameters = [len(p._post_accumulate_grad_hooks or ()) for p in engine.module.parameters()]
    optimizer = engine.optimizer
    of_optimizer = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    own = [(type(holder), sorted(getattr(holder, "__dict__", ()))) for holder in holders]
    return own, of_modules, of_parameters, of_optimizer, modes


@pytest.mark.long_where(case=["parameters in files", "stepped in the backward"])
@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_the_parts_of_steps_add_up_and_nothing_is_left(tmp_path, case):
    config = CASES[case]
    if "nvme" in config["offload"].values():
        config = config | {"offload": config["offload"] | {"nvme_path": str(tmp_path)}}
    num = config.get("gradient_accumulation_steps", 1)
    engine, _ = start(tiny(), "AdamW", **config)
    take_steps(engine, range(2 * num))
    before, outside = traces(engine), time.perf_counter()
    with zeroshard.profile(engine) as profile:
        begun = time.perf_counter()
        assert traces(engine) != before
        losses = take_steps(engine, range(2 * num, 5 * num))
        inside = time.perf_counter() - begun
    outside = time.perf_counter() - outside
    assert traces(engine) == before
    plain, _ = start(tiny(), "AdamW", **config)
    take_steps(plain, range(2 * num))
    assert losses == take_steps(plain, range(2 * num, 5 * num))
    own, theirs = engine.full_state_dict(), plain.full_state_dict()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    assert profile.num_steps == 3
    parts = sum(profile.phases.values()) * profile.num_steps
    assert (1 - LOST) * inside - CLOCK_S <= parts <= outside
    assert all(profile.phases[kind] > 0 for kind in ("forward", "backward", "step", "wait"))
    assert (profile.phases["copy"] > 0) == (case in COPIED)
    block = profile.units["unit 'blocks.1'"]
    assert all(block[kind] > 0 for kind in ("forward", "backward", "gather", "reduce", "wait"))
    assert profile.phases["wait"] == pytest.approx(sum(profile.waits.values()))
    for name in ("all-gather of unit 'blocks.", "reduce-scatter"):
        assert any(name in waited for waited in profile.waits)


# ------------------------------------------------------------------------------------------- exceptions


class Failing(torch.optim.SGD):
    """An optimizer whose step fails if it is told to."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise LookupError("a step that fails")
        return super().step(closure)


def fail_in_backward(engine):
    def fail(_):
        raise LookupError("a backward that fails")

    output = engine(torch.ones(5, 7))
    output.register_hook(fail)
    engine.backward(output.square().mean())


def fail_in_step(engine):
    engine.optimizer.fails = True
    try:
        take_steps(engine, range(1, 2))
    finally:
        engine.optimizer.fails = False


@pytest.mark.parametrize("how", ["in a backward, the profile ends", "in a step, the profile goes on"])
@on_ranks(2)
def test_a_step_that_fails_is_not_counted_and_the_profile_is_filled(how):
    model = tiny()
    engine, _ = start(model, Failing(model.parameters(), lr=0.1), stage=3)
    take_steps(engine, range(1))
    before = traces(engine)
    with suppress(LookupError), zeroshard.profile(engine) as profile:
        take_steps(engine, range(1))
        if "backward" in how:
            fail_in_backward(engine)
        with pytest.raises(LookupError, match="a step that fails"):
            fail_in_step(engine)
        engine.optimizer.zero_grad()
        take_steps(engine, range(1, 3))
    engine.optimizer.zero_grad()
    assert traces(engine) == before
    assert profile.num_steps == (1 if "backward" in how else 3)
    assert profile.phases["forward"] > 0
    with zeroshard.profile(engine) as later:
        take_steps(engine, range(4, 6))
        with pytest.raises(RuntimeError, match="another profile is under way"):
            zeroshard.profile(engine).__enter__()
    assert later.num_steps == 2


# --------------------------------------------------------------------------------- ranges, and the table

RANGES = {
    "zeroshard: forward of unit 'blocks.0'",
    "zeroshard: backward of unit 'blocks.1'",
    "zeroshard: step",
}


@on_ranks(2)
def test_operations_of_torch_have_our_phases_as_ranges(tmp_path):
    engine, _ = start(tiny(), "AdamW")
    with zeroshard.profile(engine, with_flops=True) as profile:
        take_steps(engine, range(1))
    flops = {event.key: event.flops for event in profile.operations.key_averages()}
    assert flops["aten::addmm"] > 0
    assert flops.keys() >= RANGES
    trace = tmp_path / f"{dist.get_rank()}.json"
    profile.operations.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    ranges = {event["name"]: event for event in events if event["name"] in RANGES}
    assert ranges.keys() == RANGES
    block = ranges["zeroshard: forward of unit 'blocks.0'"]
    end = block["ts"] + block["dur"]
    inside = {event["name"] for event in events if block["ts"] <= event["ts"] < end}
    assert {"aten::addmm", "aten::tanh"} <= inside


def test_the_table_has_units_and_kinds():
    engine, _ = start(tiny(), "AdamW")
    with zeroshard.profile(engine) as profile:
        take_steps(engine, range(2))
    title, columns, _, *lines = str(profile).splitlines()
    assert title == "a step by unit, mean of 2, ms"
    assert columns.split() == ["unit", *(kind for kind, seconds in profile.phases.items() if seconds), "all"]
    by_unit = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert {"the root unit", "unit 'blocks.0'", "unit 'blocks.1'", "all", "share"} <= by_unit.keys()
    assert by_unit["all"][-1] == f"{1000 * sum(profile.phases.values()):.2f}"
    assert by_unit["share"][-1] == "100.0%"
    with zeroshard.profile(engine) as empty:
        pass
    assert empty.num_steps == 0


@on_ranks(2)
def test_a_subscriber_gets_phases_one_after_another_and_the_rest_inside():
    engine, _ = start(tiny(), "AdamW")
    take_steps(engine, range(1))
    before, begun, is_open, steps = traces(engine), [], [], []

    @contextmanager
    def around(work):
        begun.append(work)
        is_open.append(work)
        yield
        assert is_open.pop() == work
        if work.startswith(("forward", "backward", "step", "other")):
            assert not is_open

    with engine.subscribe(around, lambda: steps.append(engine.global_step)):
        take_steps(engine, range(1, 3))
    assert traces(engine) == before
    assert steps == [1, 2]  # before the engine counts it
    phases = [work for work in begun if work.startswith(("forward", "step", "other"))]
    block = [f"forward of unit 'blocks.{number}'" for number in (0, 1)]
    assert [work for work in phases if work in {*block, "step"}] == [*block, "step"] * 2
    assert phases[0] == phases[-1] == "other"
    assert {"gather of unit 'blocks.1'", "reduce of unit 'blocks.0'", "free of unit 'blocks.1'"} <= {*begun}
    assert any(work.startswith("wait of reduce-scatter") for work in begun)


@on_ranks(2)
def test_a_step_of_several_optimizers_is_one():
    sharded = zeroshard.shard(tiny(), {"stage": 3})
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
    assert profile.num_steps == 2
