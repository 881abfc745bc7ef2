"""Profiles of all ways to train: their parts add up to the time inside, and leave nothing behind."""

import time

import pytest
import torch

import zeroshard
from tests.distributed.models import Tiny
from tests.distributed.training import square_loss, start

NUM_STEPS = 4
LOST, CLOCK_S = 0.1, 0.02
"""The parts add up to the time inside, but for 10 % between ranges, and some ms of a busy machine."""

ON_HOST = {"optimizer": "cpu", "parameters": "cpu"}
CASES = {
    "accumulated": {"stage": 2, "gradient_accumulation_steps": 2, "offload": {"optimizer": "cpu"}},
    "parameters on the host": {"stage": 3, "offload": ON_HOST, "precision": {"main_dtype": "bf16"}},
    "stepped in the backward": {"stage": 3, "offload": {"optimizer": "cpu", "step_in_backward": True}},
    "parameters in files": {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}},
}
COPIED = {"parameters on the host", "parameters in files"}
"""Cases whose main parameters are not where compute reads them."""


def tiny():
    torch.manual_seed(0)
    return Tiny(num_blocks=3)


def train(engine, numbers, num_micro_batches=1):
    losses = []
    for number in numbers:
        for part in range(num_micro_batches):
            loss = square_loss(engine, num_micro_batches * number + part)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


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


def timed(engine, work, **options):
    """A profile of some work, the times around both, and what else is told of it."""
    before, outside = traces(engine), time.perf_counter()
    with zeroshard.profile(engine, **options) as profile:
        begun = time.perf_counter()
        is_attached = traces(engine) != before
        losses = work()
        inside = time.perf_counter() - begun
    outside = time.perf_counter() - outside
    profile.operations = None  # torch's own stays on its rank
    return profile, (inside, outside), losses, is_attached and traces(engine) == before


def add_up(profile, around):
    parts = sum(profile.phases.values()) * profile.num_steps
    inside, outside = around
    assert (1 - LOST) * inside - CLOCK_S <= parts <= outside


def with_path(config, folder):
    offload = config.get("offload", {})
    return config | {"offload": offload | {"nvme_path": folder}} if "nvme" in offload.values() else config


def profiled(config, folder):
    config = with_path(config, folder)
    number = config.get("gradient_accumulation_steps", 1)
    engine, _ = start(tiny(), "AdamW", **config)
    train(engine, range(2), number)
    later = range(2, 2 + NUM_STEPS)
    profile, around, losses, is_clean = timed(engine, lambda: train(engine, later, number))
    plain, _ = start(tiny(), "AdamW", **config)
    want = train(plain, range(2 + NUM_STEPS), number)[2 * number :]
    own, theirs = engine.full_state_dict(), plain.full_state_dict()
    is_same = losses == want and all(torch.equal(own[name], theirs[name]) for name in own)
    return profile, around, is_clean, is_same


@pytest.mark.long_where(case=["parameters in files"])
@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_steps_add_up_and_nothing_is_left(ranks, tmp_path, case):
    for profile, around, is_clean, is_same in ranks(2, profiled, CASES[case], str(tmp_path)):
        assert is_clean
        assert is_same
        assert profile.num_steps == NUM_STEPS
        add_up(profile, around)
        assert all(profile.phases[kind] > 0 for kind in ("forward", "backward", "step", "wait"))
        assert (profile.phases["copy"] > 0) == (case in COPIED)


# ------------------------------------------------------------------------------------------- exceptions


class Failing(torch.optim.SGD):
    """An optimizer whose step fails if it is told to."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise LookupError("a step that fails")
        return super().step(closure)


def fail_in_forward(engine):
    def fail(*_):
        raise LookupError("a forward that fails")

    with engine.module.blocks[1].register_forward_pre_hook(fail):
        train(engine, range(1, 2))


def fail_in_backward(engine):
    def fail(_):
        raise LookupError("a backward that fails")

    output = engine(torch.ones(5, 7))
    output.register_hook(fail)
    engine.backward(output.square().mean())


def fail_in_step(engine):
    engine.optimizer.fails = True
    try:
        train(engine, range(1, 2))
    finally:
        engine.optimizer.fails = False


def interrupted(fail, inside):
    """Profiles around a failure, inside of which or after which training goes on."""
    model = tiny()
    engine, _ = start(model, Failing(model.parameters(), lr=0.1), stage=3)
    train(engine, range(1))
    before, message = traces(engine), ""
    try:
        with zeroshard.profile(engine) as profile:
            train(engine, range(1))
            try:
                fail(engine)
            except LookupError as error:
                message = str(error)
                engine.optimizer.zero_grad()
                if not inside:
                    raise
            train(engine, range(1, 4))
    except LookupError:
        pass
    is_clean = traces(engine) == before
    with zeroshard.profile(engine) as later:
        train(engine, range(4, 6))
    return profile.phases, profile.num_steps, message, is_clean, later.num_steps


@pytest.mark.parametrize(
    ("fail", "inside"), [(fail_in_forward, True), (fail_in_backward, False), (fail_in_step, True)]
)
def test_a_step_that_fails_is_not_counted_and_the_profile_is_filled(ranks, fail, inside):
    for phases, num_steps, message, is_clean, num_later in ranks(2, interrupted, fail, inside):
        assert message.endswith("that fails")
        assert is_clean
        assert num_steps == (4 if inside else 1)
        assert phases["forward"] > 0
        assert num_later == 2
