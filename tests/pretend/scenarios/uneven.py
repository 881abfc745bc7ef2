"""Ranks that go different ways, and calls out of the ordinary order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from tests.pretend.scenario import Bench, add, scenario
from tests.pretend.scenarios.models import Residual
from tests.pretend.scenarios.plain import BF16

Cuts = Callable[[int, int], Collection[int]]
"""(rank, step) -> blocks that have no backward there."""


def _cuts_differ(rank: int, step: int) -> Collection[int]:
    return (3,) if rank and step else ()


def _many_cuts_differ(rank: int, step: int) -> Collection[int]:
    return ((), (1, 2, 4))[(rank + step) % 2]


def _same_cuts(rank: int, step: int) -> Collection[int]:
    return (3,)


def _branches(name: str, cuts: Cuts, **config: Any) -> None:
    def run(bench: Bench) -> None:
        bench.start(Residual(), **config)
        bench.train_on(4, lambda step: cuts(bench.rank, step))

    add(f"branches_{name}", run)


_branches("stage1", _cuts_differ, stage=1)
_branches("stage2", _cuts_differ, stage=2)
_branches("stage3", _cuts_differ, stage=3)
_branches("stage3_prefetch2", _many_cuts_differ, stage=3, num_prefetch=2)
_branches("stage3_recompute", _many_cuts_differ, stage=3, recompute="unit")
_branches("stage3_same", _same_cuts, stage=3)


@scenario()
def order_changes(bench: Bench) -> None:
    """Blocks run in another order at every other step, on all ranks alike."""
    bench.start(Residual(5), stage=3)
    bench.train_on(4, lambda step: (), lambda step: [0, 1, 2, 3, 4] if step % 2 else [0, 3, 2, 1, 4])


@scenario()
def order_differs_stage2(bench: Bench) -> None:
    bench.start(Residual(5), stage=2)
    bench.train_on(4, lambda step: (), lambda step: [0, 1, 2, 3, 4] if bench.rank else [0, 3, 2, 1, 4])


@scenario()
def called_twice(bench: Bench) -> None:
    bench.start(Residual(3), stage=3, precision=BF16)
    bench.train_on(3, lambda step: (), lambda step: [0, 1, 0, 2, 1])


class _Fuse(torch.autograd.Function):
    """Raises where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blows: set[str]) -> Tensor:
        ctx.blows = blows
        if "forward" in blows:
            raise LookupError("blown")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if "backward" in ctx.blows:
            raise LookupError("blown")
        return gradient, None


def fused(block: nn.Module) -> set[str]:
    """What is put into the result makes the block raise there."""
    blows: set[str] = set()
    block.register_forward_pre_hook(lambda module, args: (_Fuse.apply(args[0], blows),))
    return blows


def _exceptions(stage: int) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        model = bench.gpt(4)
        blows = fused(model.blocks[2])
        bench.start(model, stage=stage, precision=BF16)
        bench.train(2)
        for where in ("forward", "backward"):
            blows.add(where)
            try:
                bench.engine.backward(bench.loss(9))
            except LookupError:
                blows.clear()
            assert not blows, "it was raised"
            bench.engine.zero_grad()
            bench.train(1, first=20)

    return run


for _stage in (2, 3):
    add(f"exceptions_stage{_stage}", _exceptions(_stage))


@scenario()
def step_after_a_failed_forward(bench: Bench) -> None:
    """A forward fails while a gather is under way, and the optimizer steps with the gradients before it."""
    model = bench.gpt(5)
    blows = fused(model.blocks[1])
    engine = bench.start(model, stage=3, num_prefetch=2)
    bench.train(1)
    engine.backward(bench.loss(5))
    blows.add("forward")
    try:
        bench.loss(9)
    except LookupError:
        blows.clear()
    engine.step()
    bench.train(1, first=20)
