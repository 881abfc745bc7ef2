"""The seconds of a step and the bytes of a rank, for one configuration: a list schedule over units.

    compute    | F1 | F2 | F3 | B3 | B2 | B1 | step      one resource does one thing after another
    network    | G1 G2 G3        G2 R3 G1 R2   R1         G gather, R reduction
    link                         S3   S2   S1             states to the device and back

An action begins when its resource is free and what it needs is there: a forward needs its gather, which is
issued when the unit before begins; a reduction follows its backward; states travel after the reduction. On
ranks that share their cores with exchanges, the network is the compute. In a pipeline each chunk is scheduled
so; the times of chunks go into the simulator of `parallel/pipeline/simulate.py`. Bytes are those of
`zeroshard.estimate`, by its own functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from zeroshard.assemble import specify_units
from zeroshard.config.sections import Config
from zeroshard.forwards.budget import SHARE
from zeroshard.memory.activations import DryRun, without_memory
from zeroshard.memory.estimate import Counted, Estimate, estimate_of_rank, setting_of
from zeroshard.memory.tiered import States, bytes_sent
from zeroshard.parallel.pipeline.actions import Schedule, loop
from zeroshard.parallel.pipeline.chunked import Chunked, Outline
from zeroshard.parallel.pipeline.cut import require_handed_on
from zeroshard.parallel.pipeline.partition import BlockProfile, partition
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.simulate import ActionCosts, ScheduleTimes, count_activations, simulate
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.plan.buffers import BufferPlan, Setting, UnitPlan, plan_units
from zeroshard.plan.placement import DP_SHARD, SUMMANDS
from zeroshard.plan.tiers import Tier
from zeroshard.plan.units import UnitSpec
from zeroshard.planning.machine import Cluster
from zeroshard.planning.profile import Profiles, Subject, count_units, profile_of

COMPUTE, NETWORK, LINK = "compute", "network", "link"
"""The resources of a rank."""
TIERS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme"))
"""Tiers of optimizer states and of parameters, the nearest first."""
BITS = (32, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A point of the space that is searched."""

    stage: int = 3
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    """Chunks on each pipeline rank."""
    tiers: tuple[str, str] = ("none", "none")
    """Of optimizer states, and of parameters."""
    recompute: str = "none"
    samples: int = 1
    """Of a micro-batch."""
    bits: int = 32
    """Of each state of the optimizer."""

    def __str__(self) -> str:
        values = {"stage": self.stage, "micro-batch": self.samples, "tp": self.tp, "pp": self.pp}
        parts = [f"{name} {value}" for name, value in values.items() if value > 1 or name not in ("tp", "pp")]
        parts += [self.schedule, f"{self.chunks} chunks"][: 1 + (self.chunks > 1)] if self.pp > 1 else []
        parts += [] if self.recompute == "none" else [f"recompute {self.recompute}"]
        parts += [] if self.tiers == TIERS[0] else [f"offload {'/'.join(self.tiers)}"]
        return ", ".join([*parts, *(["8-bit states"] if self.bits == 8 else [])])


class Interval(NamedTuple):
    """Something that a row, a resource or a pipeline rank, does."""

    row: str
    label: str
    start: float
    end: float


class Prediction(NamedTuple):
    """A step of a configuration.

    - busy: the seconds in which each resource is busy, on the rank that takes longest.
    - bubble: the share of the time in which pipeline ranks wait.
    """

    choice: Choice
    seconds: float
    busy: dict[str, float]
    spans: tuple[Interval, ...]
    estimate: Estimate
    bubble: float = 0.0

    @property
    def bound(self) -> str:
        """The resource that is busy longest."""
        return max(self.busy, key=lambda name: self.busy[name])


class Times(NamedTuple):
    """The seconds of all units on each resource, the root first.

    - link: parameters that come to the device for a forward or a backward.
    - states: states and main parameters to the device and back, once a step.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    gather: Sequence[float]
    regather: Sequence[float]
    reduce: Sequence[float]
    link: Sequence[float]
    states: Sequence[float]
    step: Sequence[float]


class _Planned(NamedTuple):
    """The plans of all units of a whole model; `sent` has a column [units] for each number of `_sent`."""

    config: Config
    setting: Setting
    units: list[UnitPlan]
    sent: Any
    is_resident: Sequence[bool]


class _Line:
    """The time line of a rank."""

    def __init__(self, shares_cores: bool) -> None:
        self._network = COMPUTE if shares_cores else NETWORK
        self.ends = dict.fromkeys((COMPUTE, NETWORK, LINK), 0.0)
        self.busy = dict(self.ends)
        self.spans: list[Interval] = []

    @property
    def end(self) -> float:
        """The time at which all is done."""
        return max(self.ends.values())

    def add(self, row: str, label: str, ready: float, seconds: float) -> float:
        """Do something as soon as its resource is free, not before `ready`; return its end."""
        if not seconds:
            return ready
        row = self._network if row == NETWORK else row
        start = max(self.ends[row], ready)
        self.ends[row] = start + seconds
        self.busy[row] += seconds
        self.spans.append(Interval(row, label, start, self.ends[row]))
        return self.ends[row]

    def forward(self, own: Times, order: Sequence[int], stay: Sequence[bool], *, is_first: bool) -> None:
        """Add a forward of some units; the first one of a step gathers those that stay gathered."""
        begin = before = self.ends[COMPUTE]
        for unit in order:
            ready = self.add(LINK, "L", before, own.link[unit])
            seconds = own.gather[unit] if is_first or not stay[unit] else 0.0
            ready = self.add(NETWORK, "G", begin if stay[unit] else ready, seconds)
            before = max(ready, self.ends[COMPUTE])  # the next gather is issued as this forward begins
            self.add(COMPUTE, "F", ready, own.forward[unit])

    def backward(self, own: Times, order: Sequence[int], *, reduces: bool) -> float:
        """Add a backward; return the time at which the last gradient is reduced."""

        def gather(unit: int, ready: float) -> float:
            ready = self.add(LINK, "L", ready, own.link[unit] if own.regather[unit] else 0.0)
            return self.add(NETWORK, "G", ready, own.regather[unit])

        first, *others = reversed(order)
        ready = end = gather(first, self.ends[COMPUTE])
        for unit, following in zip((first, *others), (*others, -1), strict=True):
            start = max(ready, self.ends[COMPUTE])
            end = self.add(COMPUTE, "B", ready, own.backward[unit])
            ready = gather(following, start) if following >= 0 else ready
            end = self.add(NETWORK, "R", end, own.reduce[unit] if reduces else 0.0)
        return end

    def step(self, own: Times, order: Sequence[int], ready: float) -> None:
        """Add the step of some units."""
        for unit in reversed(order):
            self.add(COMPUTE, "s", self.add(LINK, "S", ready, own.states[unit]), own.step[unit])


class Predictor:
    """Predicts the steps of one model on one cluster, with the pieces that configurations share.

    Args:
        subject: the model.
        cluster: the cluster.
        samples: the samples of a step, of all ranks together.
        timed: the profiles by tensor ranks, if they were measured; None counts.
    """

    def __init__(
        self, subject: Subject, cluster: Cluster, samples: int, timed: Mapping[int, Profiles] | None = None
    ) -> None:
        self.subject, self.cluster, self.samples = subject, cluster, samples
        self.on_cpu = cluster.shares_cores
        count: Callable[[int], Profiles] = lambda tp: {1: count_units(subject, tp, 1, cluster)}  # noqa: E731
        self.profiles = functools.cache(count) if timed is None else timed.__getitem__
        self.profile = functools.cache(lambda tp, num: profile_of(self.profiles(tp), num))
        self.cut, self.specs = functools.cache(self._cut), functools.cache(self._specs)
        self._plans, self._states = functools.cache(self._planned), functools.cache(self._estimated)
        self._counted = functools.cache(
            lambda num: Counted(subject.model, loss_of=subject.loss_of(num), tp_plan=subject.tp_plan)
        )
        self.usage, self._held = functools.cache(self._usage), functools.cache(self._held_in_pipeline)

    # -- what configurations share --------------------------------------------------------------------

    @functools.cached_property
    def outline(self) -> Outline:
        """The order in which a pipeline cuts the model. Raises ValueError if none can."""
        chunked = Chunked(without_memory(self.subject.model))
        require_handed_on(chunked, torch.device("cpu"))
        return chunked.outline

    def _specs(self, tp: int) -> Sequence[UnitSpec]:
        model = self.subject.model
        specs = specify_units(model, Config.parse(self.subject.given))
        return plan_division(model, specs, self.subject.tp_plan, tp).specs

    def num_microbatches(self, choice: Choice) -> int:
        """Return the micro-batches of a rank in a step."""
        return self.samples * choice.tp * choice.pp // (self.cluster.num_ranks * choice.samples)

    def config(self, choice: Choice) -> dict[str, Any]:
        """Return the configuration as a dict for `initialize`; the bits are the optimizer's."""
        found, num = self._config_of_states(choice), self.num_microbatches(choice)
        found |= {"micro_batch_size": choice.samples, "recompute": choice.recompute}
        if choice.recompute == "auto":
            found["memory_budget"] = self.room
        if choice.pp == 1:
            return found | {"gradient_accumulation_steps": num}
        _, runs = self.cut(choice.pp * choice.chunks)
        split = [self.outline.blocks[run.start] for run in runs[1:]]
        pipeline = {"num_microbatches": num, "num_chunks": choice.chunks, "split": split}
        return found | {"pipeline": {"schedule": choice.schedule, **pipeline}}

    def _config_of_states(self, choice: Choice) -> dict[str, Any]:
        offload = dict(zip(("optimizer", "parameters"), choice.tiers, strict=True))
        if "nvme" in choice.tiers:
            offload["nvme_path"] = "."
        mesh = {"pp": choice.pp, "tp": choice.tp}
        return {**self.subject.given, "stage": choice.stage, "mesh": mesh, "offload": offload}

    @property
    def room(self) -> int:
        """The bytes of a device that a plan may use."""
        return int(SHARE * self.cluster.machine.device_bytes)

    def plan(self, choice: Choice) -> _Planned:
        """Return the plans of the units of a configuration."""
        shared = Choice(stage=choice.stage, tp=choice.tp, pp=choice.pp, tiers=choice.tiers)
        return self._plans(shared, self.num_microbatches(choice) > 1)

    def _planned(self, choice: Choice, accumulates: bool) -> _Planned:
        num = {"num_microbatches" if choice.pp > 1 else "gradient_accumulation_steps": 1 + accumulates}
        own = {"pipeline": num} if choice.pp > 1 else num
        config = Config.parse(self._config_of_states(choice) | own)
        setting = setting_of(config, self.cluster.num_ranks, host_computes=self.on_cpu)
        units, sent = plan_units(self.specs(choice.tp), setting), []
        for number, unit in enumerate(units):
            ends, is_root = number == len(units) - 1, number == 0
            is_kept = unit.is_kept(setting.placements, is_root=is_root, ends_forward=ends)
            parts = [_sent(buffer, setting, is_kept) for buffer in unit.buffers]
            sent.append(np.sum([_NOTHING, *parts], 0))
        return _Planned(config, setting, units, np.array(sent).T, [unit.is_resident for unit in units])

    def _cut(self, num_chunks: int) -> tuple[list[list[int]], Sequence[range]]:
        """Return the numbers of the units of each chunk, and its blocks; the root is in the last one.

        Raises:
            ValueError: the model cannot be cut, or has too few blocks.
        """
        profile = self.profile(1, 1)
        rest = [*range(1, len(profile.names)), 0]
        if num_chunks == 1:
            return [rest], ()
        last = len(self.outline.blocks) - 1
        names = {name: at for at in range(last + 1) for name in self.outline.chunk(range(at, at + 1))}
        places, times = [], [0] * (last + 1)
        for unit, products in zip(profile.names, profile.products, strict=True):
            around = (at for name, at in names.items() if f"{unit}.".startswith(f"{name}."))
            places.append(next(around, last))
            times[places[-1]] += int(products)
        runs = partition([BlockProfile(time=max(1, time)) for time in times], num_chunks)
        return [[number for number in rest if places[number] in run] for run in runs], runs

    # -- bytes ------------------------------------------------------------------------------------------

    def _usage(self, tp: int, recompute: str, samples: int) -> int:
        """Return the activations of a micro-batch without a pipeline, counted for 1 and for 2 samples."""
        if samples > 2:
            one, two = (self.usage(tp, recompute, number) for number in (1, 2))
            return one + (two - one) * (samples - 1)
        return self._counted(samples).usage(*self.subject.setting(tp, self.on_cpu, recompute)).peak

    def activations(self, choice: Choice) -> tuple[int, ...]:
        """Return the most bytes of activations on each pipeline rank."""
        if choice.pp > 1:
            return self._held(replace(choice, stage=0, tiers=TIERS[0], bits=BITS[0]))
        if choice.recompute == "auto":
            least = self.usage(choice.tp, "unit", choice.samples)
            most = self.usage(choice.tp, "none", choice.samples)
            return (min(most, max(least, self.room - self.states(choice)[0].peak)),)
        return (self.usage(choice.tp, choice.recompute, choice.samples),)

    def _held_in_pipeline(self, choice: Choice) -> tuple[int, ...]:
        profile, (runs, _) = self.profile(choice.tp, choice.samples), self.cut(choice.pp * choice.chunks)
        schedule, saved = self.schedule(choice), [[int(profile.saved[n]) for n in run] for run in runs]
        if choice.recompute == "none":
            return count_activations(schedule, list(map(sum, saved))).per_rank
        given = [sum(int((profile.given if n else profile.saved)[n]) for n in run) for run in runs]
        counts = count_activations(schedule, given).per_rank
        again = (max(max(saved[chunk]) for chunk in own) for own in schedule.chunks)
        return tuple(map(sum, zip(counts, again, strict=True)))

    def schedule(self, choice: Choice) -> Schedule:
        """Return the schedule of a pipeline. Raises ValueError if there is none with these numbers."""
        return build_schedule(choice.schedule, choice.pp, self.num_microbatches(choice), choice.chunks)

    def states(self, choice: Choice) -> list[Estimate]:
        """Return the bytes of each pipeline rank without activations."""
        shared = replace(choice, recompute="none", samples=0)
        return self._states(shared, self.num_microbatches(choice) > 1)

    def _estimated(self, choice: Choice, accumulates: bool) -> list[Estimate]:
        shared = Choice(stage=choice.stage, tp=choice.tp, pp=choice.pp, tiers=choice.tiers)
        config, setting, units, *_ = self._plans(shared, accumulates)
        found, (runs, blocks) = [], self.cut(choice.pp * choice.chunks)
        for rank in range(choice.pp):
            chunks = [number for number, place in enumerate(placement(choice)) if place == rank]
            own = sorted(number for chunk in chunks for number in runs[chunk] if number)
            root = (
                [units[0]]
                if choice.pp == 1
                else self._root_in([blocks[c] for c in chunks], choice.tp, setting)
            )
            part = [*root, *(units[number] for number in own)], 0
            found.append(estimate_of_rank(part, setting, config, States(bits=choice.bits), DryRun()))
        return found

    def _root_in(self, chunks: Sequence[range], tp: int, setting: Setting) -> list[UnitPlan]:
        """Return the plan of the root with those of its parameters that the modules of some chunks have."""
        names = chain.from_iterable(map(self.outline.chunk, chunks))
        inside = {module for name in names for module in self.subject.model.get_submodule(name).modules()}
        root = self.specs(tp)[0]
        own = [one for one in root.originals if any(module in inside for module, _ in one.owners)]
        return plan_units([replace(root, originals=own)], setting)

    def bytes(self, choice: Choice) -> Estimate:
        """Return the bytes of the pipeline rank that has most."""
        both = zip(self.states(choice), self.activations(choice), strict=True)
        return max((replace(one, activations=held) for one, held in both), key=lambda one: one.peak)

    def fits(self, found: Estimate) -> bool:
        """True if a rank, and its node, have the memory."""
        machine, num = self.cluster.machine, min(self.cluster.num_ranks, self.cluster.ranks_per_node)
        return found.peak <= self.room and num * found.host <= SHARE * machine.host_bytes

    # -- seconds ----------------------------------------------------------------------------------------

    def compute(self, choice: Choice) -> tuple[Any, Any]:
        """Return the seconds of forward and backward of all units, with the exchanges of tensor ranks."""
        own, cluster = self.profile(choice.tp, choice.samples), self.cluster
        tensor = cluster.exchange(own.sent, own.calls, span=choice.tp, adds=True) if choice.tp > 1 else 0.0
        return own.forward + tensor, own.backward + tensor

    def times(self, choice: Choice) -> Times:
        """Return the seconds of all units."""
        (forward, backward), cluster, machine = self.compute(choice), self.cluster, self.cluster.machine
        plan, again = self.plan(choice), np.full(len(forward), self._recomputed(choice))
        again[0] = 0.0  # the root is not computed again
        *exchanged, link, travelling, main_travelling, owned, main, packed = plan.sent
        span, width = choice.tp * plan.setting.sizes[DP_SHARD], choice.bits / 4  # bytes of both states
        rates = [machine.to_host, machine.from_host]
        rates += [machine.disk_read, machine.disk_write] if "nvme" in choice.tiers else []
        rate = min([rate for rate in rates if rate], default=machine.bandwidth)
        columns = (
            forward,
            backward + again * forward + packed / machine.bandwidth,
            *(cluster.exchange(*exchanged[at : at + 2], span=span, adds=at == 4) for at in (0, 2, 4)),
            link / rate,
            (width * travelling + main_travelling) / rate,
            (2 * width * owned + 3 * main) / machine.bandwidth,
        )
        return Times(*(column.tolist() for column in columns))

    def _recomputed(self, choice: Choice) -> float:
        """Return the share of the units that recompute."""
        if choice.recompute != "auto":
            return float(choice.recompute == "unit")
        kept, least = (self.usage(choice.tp, how, choice.samples) for how in ("none", "unit"))
        missing = kept - (self.room - self.states(choice)[0].peak)
        return min(1.0, max(0.0, missing / max(1, kept - least)))

    def __call__(self, choice: Choice) -> Prediction:
        """Predict a step. Raises ValueError if the configuration does not exist."""
        return self._pipelined(choice) if choice.pp > 1 else self._alone(choice)

    def _alone(self, choice: Choice) -> Prediction:
        own, num, line = self.times(choice), self.num_microbatches(choice), _Line(self.on_cpu)
        (order,), plan = self.cut(1)[0], self.plan(choice)
        each, reduced = plan.setting.placements.gradient != SUMMANDS, 0.0
        for number in range(min(num, 3)):
            start, busy = line.end, dict(line.busy)
            line.forward(own, order, plan.is_resident, is_first=number == 0)
            reduced = line.backward(own, order, reduces=each or number == min(num, 3) - 1)
            if number == 1 and num > 3:  # the micro-batches in the middle are alike
                more = (num - 3) * (line.end - start)
                line.ends = {row: end + more for row, end in line.ends.items()}
                line.busy = {row: one + (num - 3) * (one - busy[row]) for row, one in line.busy.items()}
        line.step(own, order, reduced)
        return Prediction(choice, line.end, line.busy, tuple(line.spans), self.bytes(choice))

    def _pipelined(self, choice: Choice) -> Prediction:
        own, schedule, stay = self.times(choice), self.schedule(choice), self.plan(choice).is_resident
        num, span = self.num_microbatches(choice), self.cluster.num_ranks // choice.pp + 1
        given = self.profile(choice.tp, choice.samples).given
        costs, tails = [], [0.0] * choice.pp
        busy = [dict.fromkeys((COMPUTE, NETWORK, LINK), 0.0) for _ in range(choice.pp)]
        for rank, run in zip(schedule.placement, self.cut(choice.pp * choice.chunks)[0], strict=True):
            line, end = _Line(self.on_cpu), _Line(self.on_cpu)
            line.forward(own, run, stay, is_first=False)
            forward = line.end
            line.backward(own, run, reduces=False)
            half = (line.end - forward) / 2
            transfer = self.cluster.exchange(max(given[run]), 1, span=span)
            costs.append(
                ActionCosts(forward=forward, backward_input=half, backward_weight=half, transfer=transfer)
            )
            sent = sum(own.reduce[unit] + stay[unit] * own.gather[unit] for unit in run)
            end.step(own, run, end.add(NETWORK, "R", 0.0, sent))
            # On an accelerator gradients are reduced while the last micro-batch goes back.
            tails[rank] += max(end.busy[COMPUTE], end.end - (0.0 if self.on_cpu else 2 * half))
            for row in busy[rank]:
                busy[rank][row] += num * line.busy[row] + end.busy[row]
        found, spans = _simulated(schedule, tuple(costs)), list[Interval]()
        for rank, (actions, tail) in enumerate(zip(found.spans, tails, strict=True)):
            spans += [Interval(f"rank {rank}", str(one.action), one.start, one.end) for one in actions]
            spans += [Interval(f"rank {rank}", "step", spans[-1].end, spans[-1].end + tail)] if tail else []
        most, seconds = max(busy, key=lambda one: max(one.values())), max(span.end for span in spans)
        return Prediction(choice, seconds, most, tuple(spans), self.bytes(choice), found.bubble_share)


_NOTHING = (0.0,) * 12


def _sent(buffer: BufferPlan, setting: Setting, is_kept: bool) -> tuple[float, ...]:
    """Return what a buffer exchanges, moves and steps.

    Returns:
        Bytes and number of exchanges of a gather, of a gather in the backward, and of a reduction; bytes of
        parameters that come from the host; elements whose states travel, bytes of main parameters that do;
        elements that are stepped, and their bytes; bytes of gradients, as autograd gives them and as they are
        exchanged.
    """
    total, item, sizes = buffer.layout.total, buffer.compute_dtype.itemsize, setting.sizes
    wire, regathers = (buffer.reduce_dtype.itemsize, buffer.wide_dtype.itemsize), buffer.regathers
    is_far = not buffer.is_resident and (buffer.copy_tier or buffer.main_tier) is not Tier.DEVICE
    owned = buffer.main_size * buffer.trainable
    gathers = [(buffer.gathers, (item,)), (() if is_kept else regathers, (item,)), (buffer.reductions, wire)]
    paths = ((bytes_sent(path, total, sizes, *items), len(path)) for path, items in gathers)
    main, packed = owned * buffer.main_dtype.itemsize, total * (item + wire[0]) * buffer.trainable
    travels = owned * buffer.travels, main * (buffer.main_tier is not Tier.DEVICE)
    return *chain.from_iterable(paths), buffer.main_size * item * is_far, *travels, owned, main, packed


def placement(choice: Choice) -> Sequence[int]:
    """Return the pipeline rank of each chunk."""
    down = range(choice.pp)
    return (*down, *reversed(down)) if choice.schedule == "zbv" else loop(choice.pp, choice.chunks)


@functools.lru_cache(maxsize=256)
def _simulated(schedule: Schedule, costs: tuple[ActionCosts, ...]) -> ScheduleTimes:
    return simulate(schedule, costs)
