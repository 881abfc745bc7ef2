"""Around training: several losses, evaluation, checkpoints, optimizers, edits, streams of the user's."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.pretend.scenario import Bench, add, scenario
from tests.pretend.scenarios.models import Residual
from tests.pretend.scenarios.plain import BF16
from zeroshard.stepping.attach import attach

Config = dict[str, Any]
FP32: dict[str, str] = {}


def at_stages(
    *stages: int, precisions: Iterable[dict[str, str]] = (BF16,), may_sync: Iterable[str] = ()
) -> Callable[[Any], Any]:
    """Make a function a scenario at each stage and precision, whose config it is given."""

    def register(run: Callable[[Bench, Config], None]) -> Callable[[Bench, Config], None]:
        for stage in stages:
            for precision in precisions:
                name = f"{run.__name__}_stage{stage}{'_bf16' if precision else ''}"
                config = {"stage": stage, "precision": precision}
                add(name, functools.partial(run, config=config), may_sync=may_sync)
        return run

    return register


@at_stages(3)
def two_forwards(bench: Bench, config: Config) -> None:
    bench.start(bench.gpt(), **config)
    for number in range(3):
        bench.engine.backward(bench.loss(number) + bench.loss(number + 10))
        bench.engine.step()


@at_stages(1, 3)
def closed(bench: Bench, config: Config) -> None:
    """An engine is closed while gathers after its step are under way; another one goes on."""
    model = bench.gpt()
    for number in range(2):
        bench.start(model, **config)
        bench.train(2, 2 * number)
        bench.engine.close()


@at_stages(3, precisions=(FP32, BF16))
@at_stages(1)
def edits_after_step(bench: Bench, config: Config) -> None:
    """Parameters are read and changed in place between a step and the next forward."""
    bench.start(bench.gpt(), **config)
    average = [parameter.detach().clone() for parameter in bench.engine.parameters()]
    for number in range(3):
        bench.train(1, number)
        with torch.no_grad():
            for mean, parameter in zip(average, bench.engine.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
                parameter.clamp_(-3, 3)


@at_stages(3, may_sync=("full/parameters.py", "zeroshard/byname.py"))
def hooks_and_whole_gradients(bench: Bench, config: Config) -> None:
    """Hooks edit gradients, which are then read whole, and clipped by their largest element."""
    engine = bench.start(bench.gpt(), **config)
    for parameter in engine.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))
    for number in range(3):
        engine.backward(bench.loss(number))
        with engine.unsharded(write_back=True):
            shapes = {name: parameter.shape for name, parameter in engine.named_parameters()}
        assert all(engine.full_gradient(name).shape == shape for name, shape in shapes.items())
        engine.clip_grad_norm_(0.1, norm_type=float("inf"))
        engine.step()


@at_stages(3)
def two_optimizers(bench: Bench, config: Config) -> None:
    engine = bench.start(bench.gpt(), None, **config)
    parameters = list(engine.parameters())
    optimizers = [torch.optim.AdamW(parameters[:10], 1e-3), torch.optim.SGD(parameters[10:], 1e-3)]
    for optimizer in optimizers:
        attach(engine._runtime, engine._guard.rounding, optimizer)
    for number in range(3):
        bench.loss(number).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@at_stages(3, may_sync=("full/parameters.py",))
def full_parameters(bench: Bench, config: Config) -> None:
    """Whole parameters are edited and read between steps and an evaluation."""
    engine = bench.start(bench.gpt(), **config)
    bench.train(1)
    with engine.unsharded(write_back=True), torch.no_grad():
        engine.module.blocks[0].mlp[0].weight.mul_(0.5)
    bench.train(1)
    bench.evaluate()
    bench.train(1)
    engine.full_state_dict()
    bench.train(1)


@scenario()
def two_backwards_no_sync(bench: Bench) -> None:
    engine = bench.start(bench.gpt(), stage=3, precision=BF16)
    for number in range(3):
        with engine.no_sync():
            bench.loss(number).backward()
        bench.loss(number + 5).backward()
        engine.step()


@scenario(may_sync=("full/parameters.py",))
def one_parameter_by_name(bench: Bench) -> None:
    """A parameter, its gradient and its states are read and written between backward, step and forward."""
    engine = bench.start(bench.gpt(2), stage=3, precision=BF16)
    name = next(name for name, parameter in engine.named_parameters() if len(parameter.full_shape) > 1)
    for number in range(2):
        engine.backward(bench.loss(number))
        gradient = engine.full_gradient(name)
        assert gradient is not None
        engine.set_full_gradient(name, gradient / 2)
        engine.step()
        engine.set_full_parameter(name, engine.full_parameter(name) * 0.5)
        states = engine.full_optimizer_state(name)
        engine.set_full_optimizer_state(name, {"exp_avg": states["exp_avg"] * 0.5})


@scenario(may_sync=("zeroshard/checkpoint/",))
def saved_in_background(bench: Bench) -> None:
    engine = bench.start(bench.gpt(2), stage=3, precision=BF16)
    bench.train(1)
    engine.save_checkpoint(bench.folder, blocking=False)
    bench.train(2)
    engine.load_checkpoint(bench.folder)
    bench.train(1)


@scenario()
def generation_with_held_parameters(bench: Bench) -> None:
    engine = bench.start(bench.gpt(), stage=3, precision=BF16)
    bench.train(1)
    with engine.gathered():
        for _ in range(1 + 2 * bench.rank):
            engine.module(bench.tokens(3))
    bench.train(1)


@scenario()
def engines_dropped(bench: Bench) -> None:
    for stage in (1, 2, 3):
        bench.start(bench.gpt(), stage=stage, precision=BF16)
        bench.train(1)
        bench.engine = None
        gc.collect()


@scenario()
def stream_of_the_user(bench: Bench) -> None:
    """Steps in a stream of the user's, evaluation in the default one, each after the other."""
    timeline = bench.trace.timeline
    stream = timeline.stream("user")
    bench.start(bench.gpt(), stage=3, precision=BF16)
    for number in range(3):
        stream.wait_stream(timeline.default)
        with stream:
            bench.train(1, number)
        timeline.default.wait_stream(stream)
        bench.evaluate()


@scenario()
def gradients_of_gradients(bench: Bench) -> None:
    bench.start(Residual(), stage=3)
    for number in range(2):
        x = bench.values(number).requires_grad_()
        before = bench.engine(x).mean()
        (gradient,) = torch.autograd.grad(bench.engine(x).sum(), x, create_graph=True)
        loss = before + gradient.square().mean() - bench.engine(x + 1).mean()
        bench.engine.backward(loss)
        bench.engine.step()
