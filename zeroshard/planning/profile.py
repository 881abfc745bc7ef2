"""The profile of a model: seconds of the forward and backward of each unit, and the bytes that it keeps.

A run without memory counts: operations of products and of attention, bytes that other operations read and
write, bytes that stay for the backward, and exchanges with tensor ranks. Seconds follow from the rates of a
machine: operations by its products, bytes by its memory. On the device at hand the same copy of the model
runs with memory, and its units are timed; alike units count as one, by the median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zeroshard.comm.streams import has_streams
from zeroshard.config.sections import Config
from zeroshard.internals import pytree
from zeroshard.internals.nested import find_tensors
from zeroshard.memory.activations import FusedAttention, LiveBytes, LossOf, prepared
from zeroshard.parallel.pipeline.profile import Assumed
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.plan.buffers import Setting
from zeroshard.plan.units import UnitSpec
from zeroshard.planning.machine import Cluster


class UnitProfile(NamedTuple):
    """A unit in one micro-batch, on one tensor rank."""

    name: str
    forward: float
    """Seconds of its forward, without exchanges."""
    backward: float
    """Seconds of its backward."""
    saved: float
    """Bytes that its backward needs."""
    given: float
    """Bytes of its inputs."""
    sent: float = 0.0
    """Bytes that it sends to the other tensor ranks in a forward, and as many in a backward."""
    calls: float = 0.0
    """The exchanges of a forward with them."""
    products: float = 0.0
    """Operations of its forward, by which pipelines are cut."""


Profiles = Mapping[int, Sequence[UnitProfile]]
"""The units of a model, the root first, by the samples of a micro-batch."""


def profile_of(profiles: Profiles, samples: int) -> list[UnitProfile]:
    """Return the profile for a number of samples, from the numbers that are there: on a line between two.

    A single one is multiplied.
    """
    known = sorted(profiles)
    if len(known) == 1:
        return [_mixed(unit, unit, samples / known[0] - 1, 0) for unit in profiles[known[0]]]
    at = min(max(1, int(np.searchsorted(known, samples))), len(known) - 1)
    low, high = known[at - 1], known[at]
    share = (samples - low) / (high - low)
    return [_mixed(a, b, share, share) for a, b in zip(profiles[low], profiles[high], strict=True)]


def _mixed(one: UnitProfile, other: UnitProfile, more: float, less: float) -> UnitProfile:
    """Return the sum of `other` times `more` and of `one` times the rest, 1 - `less`."""
    numbers = (max(0.0, a * (1 - less) + b * more) for a, b in zip(one[1:-1], other[1:-1], strict=True))
    values: dict[str, Any] = dict(zip(UnitProfile._fields[1:-1], numbers, strict=True))
    return one._replace(**values | {"calls": one.calls})


class _Work(LiveBytes):
    """Counts operations of products, and bytes that all other operations read and write."""

    def __init__(self, left_out: Sequence[Tensor]) -> None:
        from torch.utils.flop_counter import flop_registry  # it loads much of torch

        super().__init__(left_out)
        self._registry: Any = flop_registry
        self.flops = self.traffic = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if (count := self._registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=results)
        elif not func.is_view:
            self.traffic += sum(
                one.nbytes for one in pytree.tree_leaves((args, results)) if isinstance(one, Tensor)
            )
        return results


class _Trace:
    """Gives each change of some counters to the unit in whose forward or backward it happens.

    What is in no unit, such as the loss, is the root's.

    Args:
        specs: the units, the root first.
        read: the counters now.
    """

    def __init__(self, specs: Sequence[UnitSpec], read: Callable[[], Any]) -> None:
        self._read, self._names = read, [spec.name for spec in specs]
        self.given = dict.fromkeys(self._names, 0)
        self.restart()
        for spec in specs[1:]:
            spec.module.register_forward_pre_hook(partial(self._enter, spec.name), with_kwargs=True)
            spec.module.register_forward_hook(self._leave)

    def restart(self) -> None:
        """Begin with a forward of the root."""
        self._last = self._read()
        self.both = [{name: np.zeros(len(self._last)) for name in self._names} for _ in range(2)]
        """What has happened in the forward, and in the backward, by unit."""
        self._into, self._within = self.both[0], self._names[:1]

    def note(self) -> None:
        """Give what has happened to the unit under way."""
        now = self._read()
        self._into[self._within[-1]] += now - self._last
        self._last = now

    def begin_backward(self) -> None:
        """End the forward; the backward of the root begins."""
        self.note()
        self._into = self.both[1]

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.note()
        self._within.append(name)
        inputs = (one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        self.given[name] = sum(one.nbytes for one in inputs if one.requires_grad)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.note()
        name = self._within.pop()
        for one in find_tensors(output)[0]:
            if one.requires_grad:
                one.register_hook(partial(self._begin_backward_of, name))

    def _begin_backward_of(self, name: str, gradient: Tensor) -> None:
        self.note()
        self._within[-1] = name


def count_units(
    model: nn.Module,
    config: Config,
    setting: Setting,
    loss_of: LossOf,
    cluster: Cluster,
    tp_plan: Plan | None = None,
) -> list[UnitProfile]:
    """Return the profile of a micro-batch on a machine that is not there, without memory.

    Args:
        model: the model; it does not change, and is not read.
        config, setting: the config, and the setting of its plans.
        loss_of: computes the loss on the meta device.
        cluster: the rates of its machine, and the share that layers reach.
        tp_plan: see `plan_division`.

    Raises:
        ValueError: the forward or backward does not run without values.
    """
    with torch.random.fork_rng(devices=[]):
        runs, specs, over = prepared(model, config, setting, tp_plan)
        work, attention = _Work([*runs.parameters(), *runs.buffers()]), FusedAttention()

        def read() -> Any:
            own = work.flops, attention.products, work.traffic, work.now, over.sent, over.calls
            return np.array(own, dtype=float)

        trace = _Trace(specs, read)
        assumed = Assumed()  # type: ignore[no-untyped-call]
        try:
            with torch.device("meta"), torch.enable_grad(), attention, assumed, work:
                loss = loss_of(runs)
                trace.begin_backward()
                loss.backward()
                trace.note()
        except Exception as error:  # of any kind, as the model and the loss are the user's
            raise ValueError(
                f"the forward and backward of {type(model).__name__} run without memory to be planned, and "
                f"raise {type(error).__name__}: {error}"
            ) from error
    machine = cluster.machine
    dtype = str(config.precision.param_dtype or torch.float32).removeprefix("torch.")
    if dtype not in machine.flops:
        raise ValueError(f"cluster: expected a rate of {dtype} in flops, got {', '.join(machine.flops)}")
    rate = machine.flops[dtype] * cluster.efficiency
    found = []
    for name, (flops, products, traffic, saved, sent, calls) in trace.both[0].items():
        again, _, moved, *_ = trace.both[1][name]
        found.append(
            UnitProfile(
                name,
                forward=(flops + products) / rate + traffic / machine.bandwidth,
                backward=(again + 2 * products) / rate + moved / machine.bandwidth,
                saved=max(0.0, saved),
                given=trace.given[name],
                sent=sent,
                calls=calls,
                products=flops + products,
            )
        )
    return found


def time_units(
    model: nn.Module,
    config: Config,
    setting: Setting,
    device: torch.device,
    tp_plan: Plan | None = None,
) -> Callable[[LossOf], dict[str, tuple[float, float]]]:
    """Return a function that runs a copy of the model on a device, and times its units.

    The copy has other values than the model, and memory of its own: of its parameters, their gradients and a
    micro-batch. The function takes one that computes the loss, with tensors on the device. It gives the
    seconds of forward and backward by unit, without exchanges.

    Args:
        model: the model; it does not change.
        config, setting, tp_plan: see `count_units`.
        device: the device.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        runs, specs, _ = prepared(model, config, setting, tp_plan)
        runs.to_empty(device=device)
        for parameter in runs.parameters():
            parameter.normal_(std=0.02) if parameter.is_floating_point() else parameter.zero_()
        values = dict(model.named_buffers())
        for name, buffer in runs.named_buffers():
            buffer.zero_() if values[name].is_meta else buffer.copy_(values[name])
    alike: dict[tuple[Any, ...], list[str]] = {}
    for spec in specs:
        shapes = tuple(p.shape for p in spec.module.parameters())
        alike.setdefault((type(spec.module), shapes), []).append(spec.name)

    def read() -> Any:
        if has_streams(device):
            torch.accelerator.synchronize(device)
        return np.array([time.perf_counter()])

    trace = _Trace(specs, read)

    def run(loss_of: LossOf) -> dict[str, tuple[float, float]]:
        trace.restart()
        with device, torch.enable_grad():
            loss = loss_of(runs)
            trace.begin_backward()
            loss.backward()
            trace.note()
        runs.zero_grad()
        found: dict[str, tuple[float, float]] = {}
        for names in alike.values():
            first, second = (statistics.median(float(own[name][0]) for name in names) for own in trace.both)
            found |= dict.fromkeys(names, (first, second))
        return found

    return run
