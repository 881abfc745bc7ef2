"""Activations that are on the host between forward and backward."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.pretend.scenario import Bench, add, scenario
from tests.pretend.scenarios.models import Residual
from tests.pretend.scenarios.plain import BF16
from tests.pretend.trace import Trace
from zeroshard.forwards import activations
from zeroshard.forwards.budget import PLANNED, PROBED

HOST: dict[str, Any] = {"offload": {"activations": "cpu"}}


@contextmanager
def of_any_size() -> Iterator[None]:
    """Inside, engines move tensors of any size, such as those of small models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "LEAST_BYTES", 1)
        yield


def num_copies(trace: Trace) -> tuple[int, int]:
    """The numbers of copies so far: to the host, and back."""
    kernels = trace.kernels.items()
    to_host, to_device = (
        sum(n for (stream, _), n in kernels if stream == s) for s in ("to_host", "to_device")
    )
    return to_host, to_device


def _offloaded(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
    @functools.wraps(run)
    def runs(bench: Bench) -> None:
        with of_any_size():
            run(bench)
        assert min(num_copies(bench.trace)) > 0, "expected copies to the host, and back"
        assert bench.engine.memory_report().host > 0

    return runs


def _train(bench: Bench, **config: Any) -> list[Tensor]:
    """Losses and weights; buffers of the host are used again."""
    torch.manual_seed(0)
    engine, losses, held = bench.start(bench.gpt(5), precision=BF16, **config), [], set()
    for number in range(3):
        losses.append(bench.loss(number))
        engine.backward(losses[-1])
        engine.step()
        held.add(engine.memory_report().host)
    assert len(held) == 1
    with bench.trace.syncs_allowed():
        return [loss.detach() for loss in losses] + list(engine.full_state_dict().values())


def _trained(**config: Any) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        bench.compare_later(_train(bench, **HOST, **config), lambda: _train(bench, **config))

    return _offloaded(run)


add("offloaded_stage3", _trained(stage=3))
for _stage in (1, 3):
    add(f"offloaded_stage{_stage}_recompute", _trained(stage=_stage, recompute="unit"))


@scenario(may_sync=("comm/streams.py",))
@_offloaded
def offloaded_within_a_budget(bench: Bench) -> None:
    """Units keep, recompute, go to the host or send their inputs there, in any order."""
    choices = random.Random(0)
    bench.start(bench.gpt(4), stage=3, precision=BF16, recompute="auto", memory_budget=10**9)
    bench.train(PROBED + 1)
    budget = bench.engine._runtime.budget
    assert budget.names == ["keep"] * 4
    budget._steps = PLANNED
    for number in range(4):
        budget._name(choices.choices(["keep", "recompute", "offload", "offload input"], k=4))
        bench.train(1, first=10 + number)


@scenario()
@_offloaded
def offloaded_graphs_of_all_kinds(bench: Bench) -> None:
    """Two forwards in one backward, units called twice, graphs that are kept, dropped and differentiated."""
    bench.start(Residual(4), stage=3, **HOST)
    order = [0, 1, 0, 2, 3, 1]
    for number in range(2):
        x = bench.values(number).requires_grad_()
        (gradient,) = torch.autograd.grad(bench.engine(x).square().sum(), x, create_graph=True)
        both = bench.engine(x, (), order).square().mean() + bench.engine(x + 1).square().mean()
        bench.engine(x)
        loss = gradient.square().mean() + both
        loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            bench.engine(x)
        bench.engine.step()


@scenario()
@_offloaded
def offloaded_in_vain(bench: Bench) -> None:
    """A backward ends at the input of a block, with activations of the block before on their way back."""
    model, inputs = Residual(5), []
    model.blocks[3].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    bench.start(model, stage=3, **HOST)
    for number in range(2):
        out = bench.engine(bench.values(number))
        torch.autograd.grad(out.sum(), inputs[-1])
        bench.train_on(1, first=number + 10)
        del out
        inputs.clear()


@scenario()
@_offloaded
def offloaded_sizes_differ(bench: Bench) -> None:
    """Batches of other lengths need other buffers, and the earlier ones go while copies are under way."""
    bench.start(bench.gpt(5), stage=3, **HOST)
    for length in (64, 48, 40, 64):
        tokens = torch.arange(16 * length).view(16, length) % 500
        logits = bench.engine(tokens)
        bench.engine.backward(F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
        bench.engine.step()


@scenario()
def offloaded_dropped(bench: Bench) -> None:
    """Engines go while copies are under way, before and after the graphs that need them; one is closed."""
    with of_any_size():
        for is_graph_first in (False, True):
            bench.start(bench.gpt(5), stage=3, **HOST)
            bench.train(1)
            loss = bench.loss(1)
            if is_graph_first:
                del loss
            bench.engine = None
            gc.collect()
            loss = None
        bench.start(bench.gpt(5), stage=3, **HOST)
        bench.train(1)
        bench.engine.close()
