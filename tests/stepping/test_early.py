"""Steps during the backward have the bits of steps after it, and leave few gradients."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeroshard
from tests.checkpoint import runs
from tests.ranks import on_ranks
from tests.stores.tiers import BF16, BF16_MAIN, FILES, OPTIMIZERS

EARLY = {"stage": 3, "offload": {"optimizer": "cpu", "step_in_backward": True}}


class Stepped:
    """Counts the units that are stepped in the backward."""

    def __init__(self, engine):
        self.names, step = [], engine._early._step

        def counted(unit):
            self.names.append(unit.name)
            step(unit)

        engine._early._step = counted


def watch(engine):
    """What hooks of tensors see of the optimizer in a backward; what they see outside is in it, too."""
    optimizer = engine.optimizer

    def seen():
        return tuple(len(group["params"]) for group in optimizer.param_groups), len(
            optimizer._optimizer_step_post_hooks
        )

    found = {seen()}
    for block in engine.module.blocks:
        block.register_forward_hook(lambda *it: it[-1].register_hook(lambda _: found.add(seen())) and None)
    return found


def run(config, make, *, num_steps=4, loss=runs.token_loss):
    engine = runs.start({"stage": 3} | config, make)
    steps = Stepped(engine) if engine._early is not None else None
    seen = watch(engine)
    losses = runs.train(engine, range(num_steps), loss)
    assert len(seen) == 1, f"a hook saw parts of a step: {seen}"
    found = runs.state(engine, losses)
    engine.close(restore=False)
    return found, [] if steps is None else steps.names


RUNS = {
    "host": ("AdamW", {}, {}),
    "files": ("AdamW", {}, FILES),
    "groups": ("groups", {}, FILES),
    "bf16": ("bitsandbytes", BF16, FILES),
    "bf16 main": ("8-bit", BF16_MAIN, FILES),
    "accumulated": ("AdamW", {"gradient_accumulation_steps": 2}, {}),
    "replicas": ("AdamW", {"shard_group_size": 1}, {}),
    "recomputed": ("AdamW", {"recompute": "unit"}, {}),
}
ALONE = {"LAMB": ("LAMB", BF16_MAIN, {}), "Muon": ("Muon", BF16_MAIN, {})}
"""On one rank, which waits for nobody, optimizers that ask all ranks step in the backward, too."""


@on_ranks(1, 2, timeout=300)
@runs.without_numba
def test_steps_in_the_backward_have_the_bits_of_steps_after_it(tmp_path):
    """Where runs differ; the fuzz has other optimizers, precisions and tiers together."""
    found = []
    for name, (make, config, tier) in (RUNS if dist.get_world_size() > 1 else ALONE).items():
        own = {"optimizer": "cpu", "step_in_backward": True}
        own |= {"optimizer": "nvme", "nvme_path": str(tmp_path), **tier} if tier else {}
        want, _ = run(config, OPTIMIZERS[make])
        got, stepped = run(config | {"offload": own}, OPTIMIZERS[make])
        found += [f"{name}: losses"] * (got.losses != want.losses)
        found += [f"{name}: {text}" for text in runs.differences(got, want)]
        # The root has an unused parameter, so it is stepped after the backward.
        num_steps = 4 // config.get("gradient_accumulation_steps", 1)
        if sorted(stepped) != ["blocks.0"] * num_steps + ["blocks.1"] * num_steps:
            found.append(f"{name}: stepped {stepped} in {num_steps} steps")
    return found


@pytest.mark.parametrize(("num_ranks", "precision"), [(2, {}), (1, {}), (1, {"param_dtype": "bf16"})])
@on_ranks()
def test_few_gradients_are_left_after_a_backward(num_ranks, precision):
    """One rank in fp32 computes with main parameters, in bf16 with a copy of them."""
    size = 4 * 16 * 64 * 64
    for is_early in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(16)))
        offload = {"optimizer": "cpu", "step_in_backward": is_early}
        config = {"stage": 3, "offload": offload, "precision": precision}
        estimated = zeroshard.estimate(model, num_ranks, config, host_computes=True).gradients
        engine = runs.start(config, OPTIMIZERS["AdamW"], model=model)
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        held = engine.memory_report().gradients
        assert held == 0 if is_early else held >= size // num_ranks
        assert 0 < estimated <= size // 8 or not is_early
        assert engine.step()
        engine.close(restore=False)


class Reader(nn.Linear):
    """A unit whose backward reads the weight once more after its gradient is there."""

    def forward(self, x):
        return super().forward(nn.functional.linear(x, self.weight.detach()))


class Product(torch.autograd.Function):
    """A product that keeps its weight where torch does not watch it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, None


class UnwatchedReader(nn.Linear):
    def forward(self, x):
        return super().forward(Product.apply(x, self.weight.detach()))


class HookedReader(nn.Linear):
    def forward(self, x):
        x = x * 1
        x.register_hook(lambda gradient: gradient * self.weight.mean())
        return super().forward(x)


def losses_of_a_reader(kind, options, is_early):
    config = {"stage": 3, "units": [kind.__name__]} | options
    config["offload"] = options.get("offload", {}) | {"step_in_backward": is_early}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), kind(8, 8), kind(8, 8))
    engine = runs.start(config, OPTIMIZERS["fused"], model=model)
    losses = runs.train(engine, range(3), lambda model, n: model(torch.full((2, 8), 0.1 * n)).square().mean())
    engine.close(restore=False)
    return losses


@pytest.mark.long_where(num_ranks=[2])
@on_ranks(1, 2)
def test_a_unit_is_stepped_when_its_backward_reads_its_weights_no_more(tmp_path):
    """One rank in fp32 computes with main parameters; in bf16, or with parameters in files, with a copy."""
    found = []
    files = {"offload": {"optimizer": "nvme", "parameters": "nvme", "nvme_path": str(tmp_path)}}
    for kind in (Reader, UnwatchedReader, HookedReader):
        for options in ({}, BF16, files, BF16_MAIN | files):
            late, early = (losses_of_a_reader(kind, options, is_early) for is_early in (False, True))
            found += [f"{kind.__name__}, {options}"] * (late != early)
    return found


@on_ranks(2)
def test_a_late_gradient_is_an_error_where_another_rank_steps_in_its_backward(tmp_path):
    """One rank looks at gradients, so steps late, and gets one late; then batches go on."""
    files = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    engine = runs.start({"stage": 3, "offload": files}, OPTIMIZERS["AdamW"], loss_fn=token_loss)
    if dist.get_rank() == 1:
        engine.optimizer.register_step_pre_hook(lambda *_: None)
    tokens = runs.batch(0)
    for _ in range(2):
        engine.train_batch(tokens[:, :-1], tokens[:, 1:])
    engine.save_checkpoint(tmp_path / "saved")
    delay_a_gradient(engine)
    message = runs.refusal(lambda: engine.train_batch(tokens[:, :-1], tokens[:, 1:]))
    assert "after another had stepped its unit" in message
    engine.load_checkpoint(tmp_path / "saved")
    steps = Stepped(engine)
    engine.train_batch(tokens[:, :-1], tokens[:, 1:])
    assert steps.names == []


def token_loss(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def in_batches(options, make, prepare=lambda engine: None, num=3):
    """As `run`, with `train_batch`; and the number of units stepped in each batch."""
    engine = runs.start({"stage": 3} | options, make, loss_fn=token_loss)
    steps, losses, numbers = Stepped(engine) if engine._early is not None else None, [], []
    prepare(engine)
    for number in range(num):
        tokens = runs.batch(number)
        losses.append(engine.train_batch(tokens[:, :-1], tokens[:, 1:]).item())
        if steps is not None:
            numbers.append(len(steps.names))
            steps.names.clear()
    found = runs.state(engine, losses)
    engine.close(restore=False)
    return found, numbers


@pytest.mark.long_where(num_ranks=[1])
@on_ranks(1, 2, timeout=120)
@runs.without_numba
def test_a_batch_steps_in_its_backward_where_nothing_asks_for_its_gradients(tmp_path):
    """Where runs in batches differ; a batch owns its step, so it steps in its backward by itself."""
    found, files = [], {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    for options in ({}, {"gradient_accumulation_steps": 2}, BF16_MAIN):
        want, _ = in_batches(options, OPTIMIZERS["8-bit"])
        got, numbers = in_batches(options | {"offload": files}, OPTIMIZERS["8-bit"])
        found += runs.differences(got, want)
        # The first backward steps nothing; none steps the root, as one of its parameters is unused.
        first = 2 if "gradient_accumulation_steps" in options else 0
        found += [f"{options}: stepped {numbers}"] * (numbers != [first, 2, 2])
    asking = {
        "before a step": lambda engine: engine.optimizer.register_step_pre_hook(halve),
        "after a step": lambda engine: engine.optimizer.register_step_post_hook(check_gradients),
        "of parameters": lambda engine: last_of(engine).register_post_accumulate_grad_hook(halve_one),
        "of one rank": see_on_one_rank,
        "around a step": wrap_step,
        "late": delay_a_gradient,
    }
    plain, _ = in_batches({}, OPTIMIZERS["AdamW"])
    for name, prepare in asking.items():
        looks = name in ("after a step", "of one rank", "late")
        want = plain if looks else in_batches({}, OPTIMIZERS["AdamW"], prepare)[0]
        got, numbers = in_batches({"offload": files}, OPTIMIZERS["AdamW"], prepare)
        found += [f"{name}: {text}" for text in runs.differences(got, want)]
        found += [f"{name}: stepped {numbers}"] * (any(numbers) and name != "of one rank")
    judged = ({"clip_grad_norm": 1.0}, {"nonfinite": "skip"}, {"precision": "fp16"}, {"stage": 2})
    for options in (*judged, {"offload": files | {"step_in_backward": False}}):
        _, numbers = in_batches({"offload": files} | options, OPTIMIZERS["AdamW"], num=2)
        found += [f"{options}: {numbers}"] * any(numbers)
    return found


def delay_a_gradient(engine):
    """A part of a gradient, of zeros, comes on one rank alone after the reduction of its unit."""
    reducer = engine._runtime.reducer
    unit = next(unit for unit in engine._runtime.units if unit.name == "blocks.1")
    (gradients,) = unit.gradients

    def keep(gradient):
        if reducer.step_unit is None:
            reducer.receive(unit, gradients, 0, torch.zeros_like(gradients.buffer.unsharded[0]))

    def hook(module, args):
        if torch.is_grad_enabled():
            args[0].register_hook(keep)

    if dist.get_rank() == dist.get_world_size() - 1:
        engine.module.blocks[0].register_forward_pre_hook(hook)


def wrap_step(engine):
    own = engine.optimizer.step

    def step():
        halve(engine.optimizer)
        return own()

    engine.optimizer.step = step


def see_on_one_rank(engine):
    if dist.get_rank():
        last_of(engine).register_post_accumulate_grad_hook(seen)


def seen(parameter):
    assert parameter.grad is not None


def check_gradients(optimizer, *_):
    assert any(p.grad is not None for p in optimizer.param_groups[0]["params"])


@pytest.mark.long_where(num_ranks=[1])
@on_ranks(1, 2)
def test_torch_refuses_a_backward_through_a_graph_of_before_an_early_step(tmp_path):
    """All units are stepped early."""
    data = torch.ones(2, 64)
    for early in (False, None, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(3)))
        offload = {"optimizer": "nvme", "nvme_path": str(tmp_path), "step_in_backward": early}
        config = {"stage": 3, "offload": offload}
        engine = runs.start(config, OPTIMIZERS["AdamW"], model=model, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            old = engine(data).square().mean()
            engine.train_batch(data, data)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(old)
        engine.close(restore=False)


def last_of(engine):
    return [p for name, p in engine.named_parameters() if "blocks.1" in name][-1]


def halve_one(parameter):
    parameter.grad.mul_(0.5)


def halve(optimizer, *_):
    for p in optimizer.param_groups[0]["params"]:
        if p.grad is not None:
            p.grad.mul_(0.5)


def failing_loss(engine, fails):
    def fail(_):
        raise KeyError("made to fail")

    def hook(module, args, output):
        if fails:
            output.register_hook(fail)

    handle = engine.module.blocks[0].register_forward_hook(hook)
    loss = runs.token_loss(engine, 0)
    handle.remove()
    return loss


REFUSED = {
    "backward": "a backward after a backward that has stepped",
    "clip": "whose gradients are gone",
    "own gradient": "whose gradients are gone",
    "options": "'lr' of group 0",
    "interrupted": "after a step that was interrupted",
    "zero": "call step() to end their step",
    "failure": "Load the last checkpoint",
}


@pytest.mark.long_where(num_ranks=[1])
@on_ranks(1, 2)
def test_what_would_be_wrong_silently_is_refused(num_ranks, tmp_path):
    """Calls that step gradients twice, miss them, or go on from half a step."""

    def check(kind, *calls):
        for call in calls:
            assert REFUSED[kind] in runs.refusal(call)

    engine = runs.start(EARLY, OPTIMIZERS["AdamW"])
    group = engine.optimizer.param_groups[0]
    engine.save_checkpoint(tmp_path, tag="first")
    engine.backward(runs.token_loss(engine, 0))
    parameters = list(engine.parameters())
    name = next(name for name, p in engine.named_parameters() if p.requires_grad)
    check("backward", lambda: runs.token_loss(engine, 1).backward())
    check("backward", lambda: engine.backward(runs.token_loss(engine, 1)))
    check("interrupted", lambda: engine.save_checkpoint("never"))
    check("zero", engine.zero_grad, engine.module.zero_grad, engine.optimizer.zero_grad)
    check("clip", lambda: engine.clip_grad_norm_(1.0))
    check("clip", lambda: nn.utils.clip_grad_norm_(parameters, 1.0))
    check("clip", lambda: nn.utils.clip_grad_value_(parameters, 1.0))
    check("own gradient", lambda: engine.set_full_gradient(name, torch.zeros(())))
    group["lr"] *= 2
    check("options", engine.step, engine.optimizer.step)
    group["lr"] /= 2
    assert engine.step()
    with pytest.raises((KeyError, RuntimeError)):
        engine.backward(failing_loss(engine, fails=dist.get_rank() == 0))
    engine.zero_grad()
    check("failure", engine.step, engine.optimizer.step)
    check("failure", lambda: engine.backward(runs.token_loss(engine, 1)))
    check("failure", lambda: engine.save_checkpoint(tmp_path, tag="second"))
    engine.load_checkpoint(tmp_path, tag="first")
    found = runs.state(engine, runs.train(engine, range(2), runs.token_loss))
    engine.close(restore=False)
    if num_ranks > 1:
        with pytest.raises(ValueError, match="expected an optimizer"):
            runs.start(EARLY, OPTIMIZERS["LAMB"])
    return runs.differences(found, run({}, OPTIMIZERS["AdamW"], num_steps=2)[0])


def own_steps(is_early):
    """Steps of the optimizer by the user, with and without a closure, and hooks that change gradients."""
    engine = runs.start(
        {"stage": 3, "offload": {"optimizer": "cpu", "step_in_backward": is_early}}, OPTIMIZERS["AdamW"]
    )
    losses = []

    def closure():
        engine.optimizer.zero_grad()
        losses.append(runs.token_loss(engine, len(losses)))
        engine.backward(losses[-1])
        return losses[-1]

    for _ in range(2):
        engine.optimizer.step(closure)
        closure()
        engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    for name, parameter in engine.named_parameters():
        if "blocks.1" in name:
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.add_(p.detach()))
    losses += runs.train(engine, range(2), runs.token_loss)
    found = runs.state(engine, losses)
    engine.close(restore=False)
    return found


@on_ranks(2)
def test_own_steps_and_hooks_have_the_bits_of_steps_after_the_backward():
    return runs.differences(own_steps(True), own_steps(False))


@on_ranks(1)
def test_errors_of_a_step_in_the_backward_are_told_and_a_load_goes_on(tmp_path):
    """A step in files ends its backward; then training goes on from a checkpoint."""
    files = {"optimizer": "nvme", "nvme_path": str(tmp_path), "step_in_backward": True}
    engine, steps = runs.start({"stage": 3, "offload": files}, OPTIMIZERS["AdamW"]), []
    engine.save_checkpoint(tmp_path / "saved")
    own_step = engine._early._parts._own_step

    def failing(twin):
        steps.append(len(steps))
        if len(steps) == 2:
            raise OSError("made to fail")
        own_step(twin)

    engine._early._parts._own_step = failing
    with pytest.raises(OSError, match="made to fail") as caught:
        engine.backward(runs.token_loss(engine, 0))
    assert "in failing" in "".join(traceback.format_exception(caught.value))
    assert len(steps) == 2
    engine._early._parts._own_step = own_step
    assert "Load the last checkpoint" in runs.refusal(lambda: engine.backward(runs.token_loss(engine, 1)))
    engine.zero_grad()
    engine.load_checkpoint(tmp_path / "saved")
    got = runs.state(engine, runs.train(engine, range(3)))
    return runs.differences(got, run({}, OPTIMIZERS["AdamW"], num_steps=3)[0])
