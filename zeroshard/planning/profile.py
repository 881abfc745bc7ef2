"""The profile of a model: seconds of the forward and backward of each unit, and the bytes that it keeps.

A run without memory counts: operations of products and of attention, bytes that other operations read and
write, bytes that stay for the backward, and exchanges with tensor ranks. Seconds follow from the rates of a
machine: operations by its products, bytes by its memory. On the device at hand the same copy of the model
runs with memory, and its units are timed; alike units count as one, by the median.

Modules of the root that a pipeline gives to one of its ranks, such as a small embedding, have a row of their
own after the units.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zeroshard.comm import streams
from zeroshard.config.sections import Config
from zeroshard.internals import pytree
from zeroshard.internals.nested import find_tensors
from zeroshard.memory.activations import FusedAttention, LiveBytes, LossOf, OneOfMany, prepared
from zeroshard.memory.estimate import setting_of
from zeroshard.parallel.pipeline.chunked import outline_of
from zeroshard.parallel.pipeline.profile import Assumed
from zeroshard.parallel.tensor.sequence import Activations
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.plan.buffers import Setting
from zeroshard.plan.units import UnitSpec
from zeroshard.planning.machine import Cluster


class Subject(NamedTuple):
    """A model to plan.

    - model: it does not change, and may be on the meta device.
    - loss_of: (samples) -> the function that computes the loss of a micro-batch of so many.
    - given: settings that all configurations have, such as precision.
    - tp_plan: see `plan_division`.
    """

    model: nn.Module
    loss_of: Callable[[int], LossOf]
    given: Mapping[str, Any] = {}
    tp_plan: Plan | None = None

    def setting(self, tp: int, on_cpu: bool, recompute: str = "none") -> tuple[Config, Setting]:
        """Return the config and the setting of tensor ranks alone."""
        config = Config.parse({**self.given, "mesh": {"tp": tp}, "recompute": recompute})
        return config, setting_of(config, tp, host_computes=on_cpu)


def names_in_order(model: nn.Module) -> Sequence[str]:
    """Return the names of the modules along which a pipeline cuts a model; none if it cannot."""
    try:
        return outline_of(model).names
    except (ValueError, NotImplementedError):  # of transformers, for a model without an embedding
        return ()


def parts_of_root(model: nn.Module, specs: Sequence[UnitSpec]) -> dict[str, nn.Module]:
    """Return the modules of the root that a pipeline gives to one of its ranks, by name.

    Args:
        model: the model.
        specs: its units, the root first.
    """
    units = {spec.module for spec in specs[1:]}
    own = {name: model.get_submodule(name) for name in names_in_order(model)}
    return {name: module for name, module in own.items() if units.isdisjoint(module.modules())}


class UnitProfiles(NamedTuple):
    """The units of a model in one micro-batch, on one tensor rank; arrays [rows].

    The root is the first row, and `parts_of_root` are the last ones; the root has what is in no other row.

    - forward, backward: seconds, without exchanges.
    - saved, given: bytes that the backward needs, and of the inputs.
    - sent, calls: bytes sent to the other tensor ranks in a forward, and exchanges; a backward has as many.
    - products: operations of a forward, by which pipelines are cut.
    """

    names: Sequence[str]
    forward: Any
    backward: Any
    saved: Any
    given: Any
    sent: Any
    calls: Any
    products: Any


Profiles = Mapping[int, UnitProfiles]
"""The profile of a model by the samples of a micro-batch."""


def profile_of(profiles: Profiles, samples: int) -> UnitProfiles:
    """Return the profile for a number of samples, on a line between two that are there, or through 0."""
    known = sorted(profiles)
    at = min(max(len(known) > 1, int(np.searchsorted(known, samples))), len(known) - 1)
    high, less = profiles[known[at]], known[at - 1] if at else 0
    low = profiles[less] if at else UnitProfiles(high.names, *(0 * one for one in high[1:]))
    share = (samples - less) / (known[at] - less)
    values = (np.maximum(0, a + (b - a) * share) for a, b in zip(low[1:], high[1:], strict=True))
    return UnitProfiles(high.names, *values)._replace(calls=high.calls)


class _Trace:
    """Gives each change of some counters to the row in whose forward or backward it happens.

    What is in no other row, such as the loss, is the root's.

    Args:
        model: the model.
        specs: its units, the root first.
        read: the counters now.
    """

    def __init__(self, model: nn.Module, specs: Sequence[UnitSpec], read: Callable[[], Any]) -> None:
        self.modules = {spec.name: spec.module for spec in specs} | parts_of_root(model, specs)
        self._read, self._names = read, list(self.modules)
        self.given = dict.fromkeys(self._names, 0)
        for name, module in list(self.modules.items())[1:]:
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(self._leave)

    def run(self, loss_of: Callable[[], Tensor]) -> None:
        """Run a forward and a backward; `both` then has what has happened in each, by unit."""
        self._last = self._read()
        self.both = [{name: np.zeros(len(self._last)) for name in self._names} for _ in range(2)]
        self._into, self._within = self.both[0], self._names[:1]
        loss = loss_of()
        self._note()
        self._into = self.both[1]
        loss.backward()
        self._note()

    def _note(self) -> None:
        now = self._read()
        self._into[self._within[-1]] += now - self._last
        self._last = now

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._note()
        self._within.append(name)
        inputs = (one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        self.given[name] = sum(one.nbytes for one in inputs if one.requires_grad)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._note()
        name = self._within.pop()
        for one in find_tensors(output)[0]:
            if one.requires_grad:
                one.register_hook(partial(self._begin_backward_of, name))

    def _begin_backward_of(self, name: str, gradient: Tensor) -> None:
        self._note()
        self._within[-1] = name


def count_units(subject: Subject, tp: int, samples: int, cluster: Cluster) -> UnitProfiles:
    """Return the profile of a micro-batch on a machine that is not there, without memory.

    Raises:
        ValueError: the forward or backward does not run without values; the layers cannot be divided.
    """
    (config, setting), machine = subject.setting(tp, cluster.shares_cores), cluster.machine
    dtype = str(config.precision.param_dtype or torch.float32).removeprefix("torch.")
    if dtype not in machine.flops:
        raise ValueError(f"cluster: expected a rate of {dtype} in flops, got {', '.join(machine.flops)}")
    with torch.random.fork_rng(devices=[]):
        over = OneOfMany(tp)
        runs, specs = prepared(subject.model, config, setting, subject.tp_plan, over)
        work, attention = LiveBytes([*runs.parameters(), *runs.buffers()]), FusedAttention()

        def read() -> Any:
            own = work.flops, attention.products, work.traffic, work.now, over.sent, over.calls
            return np.array(own, dtype=float)

        trace = _Trace(runs, specs, read)
        assumed = Assumed()  # type: ignore[no-untyped-call]
        try:
            with torch.device("meta"), torch.enable_grad(), attention, assumed, work:
                trace.run(lambda: subject.loss_of(samples)(runs))
        except Exception as error:  # of any kind, as the model and the loss are the user's
            raise ValueError(
                f"{type(subject.model).__name__} cannot be planned: its forward and backward run without "
                f"memory, and raise {type(error).__name__}: {error}"
            ) from error
    rate, names = machine.flops[dtype] * cluster.efficiency, list(trace.modules)
    first, second = (np.array([own[name] for name in names]).T for own in trace.both)
    flops, products, traffic, saved, sent, calls = first
    return UnitProfiles(
        names,
        forward=(flops + products) / rate + traffic / machine.bandwidth,
        backward=(second[0] + 2 * products) / rate + second[2] / machine.bandwidth,
        saved=np.maximum(0, saved),
        given=np.array([trace.given[name] for name in names]),
        sent=sent,
        calls=calls,
        products=flops + products,
    )


def time_units(subject: Subject, over: Activations, device: torch.device) -> Callable[[int], Any]:
    """Return a function that runs a copy of the model on a device, and times its units.

    The copy has other values than the model, and memory of its own: of its parameters, their gradients and a
    micro-batch. The function takes the samples of a micro-batch, and gives the seconds of forward and
    backward of all units, [units, 2], with the exchanges of tensor ranks.

    Args:
        subject: the model.
        over: the exchanges of this tensor rank. With the other ranks, all of them call the function.
        device: the device.
    """
    own = subject.setting(over.size, not streams.has_streams(device))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        runs, specs = prepared(subject.model, *own, subject.tp_plan, over)
        runs.to_empty(device=device)
        for parameter in runs.parameters():
            parameter.normal_(std=0.02) if parameter.is_floating_point() else parameter.zero_()
        values = dict(subject.model.named_buffers(remove_duplicate=False))
        for name, buffer in runs.named_buffers():
            buffer.zero_() if values[name].is_meta else buffer.copy_(values[name])

    def read() -> Any:
        if streams.has_streams(device):
            torch.accelerator.synchronize(device)
        return np.array([time.perf_counter()])

    trace = _Trace(runs, specs, read)
    alike = [(type(one), *(p.shape for p in one.parameters())) for one in trace.modules.values()]
    groups = [[at for at, other in enumerate(alike) if other == one] for one in alike]

    def run(samples: int) -> Any:
        with device, torch.enable_grad():
            trace.run(lambda: subject.loss_of(samples)(runs))
        runs.zero_grad()
        seconds = np.array([[own[name][0] for own in trace.both] for name in trace.modules])
        return np.array([np.median(seconds[group], 0) for group in groups])

    return run
