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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from zeroshard.comm import streams
from zeroshard.config.sections import Config
from zeroshard.forwards.dryrun import ALIVE, FLOPS, TRAFFIC, LossOf, Trace
from zeroshard.memory.activations import ModelWithoutMemory, prepared
from zeroshard.memory.estimate import setting_of
from zeroshard.parallel.pipeline.chunked import outline_of
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

    def without_memory(self, samples: int) -> ModelWithoutMemory:
        """Return the model with the loss of a micro-batch."""
        return ModelWithoutMemory(self.model, self.loss_of(samples), self.tp_plan)

    def waiting(self, tp: int, on_cpu: bool) -> Any:
        """Return the bytes of a sample between the halves of a backward, [rows]."""
        halves = self.without_memory(1).trace(*self.setting(tp, on_cpu), rows, is_halved=True)
        return np.array([int(row.forward[ALIVE] + row.backward[ALIVE]) for row in halves.rows.values()])


def names_in_order(model: nn.Module) -> Sequence[str]:
    """Return the names of the modules along which a pipeline cuts a model; none if it cannot."""
    try:
        return outline_of(model).names
    except (ValueError, NotImplementedError):  # of transformers, for a model without an embedding
        return ()


def rows(model: nn.Module, specs: Sequence[UnitSpec]) -> dict[str, nn.Module]:
    """Return the modules that have a row in a profile: the units, the root first, and parts of the root.

    Parts of the root are the modules of it that a pipeline gives to one of its ranks.

    Args:
        model: the model.
        specs: its units, the root first.
    """
    units = {spec.name: spec.module for spec in specs}
    inside = {spec.module for spec in specs[1:]}
    own = {name: model.get_submodule(name) for name in names_in_order(model)}
    return units | {name: module for name, module in own.items() if inside.isdisjoint(module.modules())}


class UnitProfiles(NamedTuple):
    """The units of a model in one micro-batch, on one tensor rank; arrays [rows].

    The root is the first row, and its parts are the last ones; the root has what is in no other row.

    - forward, backward: seconds, without exchanges.
    - saved, made: bytes that the backward needs, and of the outputs.
    - sent, calls: bytes sent to the other tensor ranks in a forward, and exchanges; a backward has as many.
    - products: operations of a forward, by which pipelines are cut.
    """

    names: Sequence[str]
    forward: Any
    backward: Any
    saved: Any
    made: Any
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


def count_units(subject: Subject, tp: int, samples: int, cluster: Cluster) -> UnitProfiles:
    """Return the profile of a micro-batch on a machine that is not there, without memory.

    Raises:
        ValueError: the forward or backward does not run without values; the layers cannot be divided.
    """
    (config, setting), machine = subject.setting(tp, cluster.shares_cores), cluster.machine
    dtype = str(config.precision.param_dtype or torch.float32).removeprefix("torch.")
    if dtype not in machine.flops:
        raise ValueError(f"cluster: expected a rate of {dtype} in flops, got {', '.join(machine.flops)}")
    counts = subject.without_memory(samples).trace(config, setting, rows).rows
    rate = machine.flops[dtype] * cluster.efficiency
    first, second = np.array([(row.forward, row.backward) for row in counts.values()]).transpose(1, 2, 0)
    flops, products, traffic, saved, sent, calls = first
    return UnitProfiles(
        list(counts),
        forward=(flops + products) / rate + traffic / machine.bandwidth,
        backward=(second[FLOPS] + 2 * products) / rate + second[TRAFFIC] / machine.bandwidth,
        saved=np.maximum(0, saved),
        made=np.array([row.made for row in counts.values()]),
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
        streams.mark_here(device).synchronize()
        return np.array([time.perf_counter()])

    modules = rows(runs, specs)
    trace = Trace(modules, read)
    alike = [(type(one), *(p.shape for p in one.parameters())) for one in modules.values()]
    groups = [[at for at, other in enumerate(alike) if other == one] for one in alike]

    def run(samples: int) -> Any:
        with device, torch.enable_grad():
            trace.run(lambda: subject.loss_of(samples)(runs))
        runs.zero_grad()
        seconds = np.array([[row.forward[0], row.backward[0]] for row in trace.rows.values()])
        return np.array([np.median(seconds[group], 0) for group in groups])

    return run
