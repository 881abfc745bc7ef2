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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroshard.assemble import specify_units
from zeroshard.config.sections import Config
from zeroshard.forwards.budget import SHARE
from zeroshard.memory.activations import DryRun, LossOf, without_memory
from zeroshard.memory.estimate import Counted, Estimate, estimate_of_rank, setting_of
from zeroshard.memory.tiered import States, bytes_sent
from zeroshard.parallel.pipeline.actions import Schedule
from zeroshard.parallel.pipeline.chunked import Chunked, Outline
from zeroshard.parallel.pipeline.cut import require_handed_on
from zeroshard.parallel.pipeline.partition import BlockProfile, partition
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.simulate import ActionCosts, ScheduleTimes, count_activations, simulate
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.plan.buffers import BufferPlan, Setting, UnitPlan, plan_units
from zeroshard.plan.placement import DP_SHARD, SUMMANDS
from zeroshard.plan.tiers import Tier
from zeroshard.plan.units import UnitSpec
from zeroshard.planning.machine import Cluster
from zeroshard.planning.profile import Profiles, UnitProfile, count_units, profile_of

_RECOMPUTED = {"unit": ("recompute",), "auto": ("recompute some",)}
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
        tiers = zip(("optimizer", "parameters"), self.tiers, strict=True)
        parts = [
            f"stage {self.stage}",
            *([f"tp {self.tp}"] if self.tp > 1 else []),
            *([f"pp {self.pp} {self.schedule}"] if self.pp > 1 else []),
            *([f"{self.chunks} chunks"] if self.chunks > 1 else []),
            f"micro-batch {self.samples}",
            *(
                [{"unit": "recompute", "auto": "recompute some"}[self.recompute]]
                if self.recompute != "none"
                else []
            ),
            *(f"{name} on {tier}" for name, tier in tiers if tier != "none"),
            *(["8-bit states"] if self.bits == 8 else []),
        ]
        return ", ".join(parts)


class Span(NamedTuple):
    """Something that a resource does."""

    row: str
    """A resource, or a pipeline rank."""
    label: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step of a configuration."""

    choice: Choice
    seconds: float
    busy: dict[str, float]
    """The seconds in which each resource is busy, on the rank that takes longest."""
    spans: tuple[Span, ...]
    estimate: Estimate
    bubble: float = 0.0
    """The share of the time in which pipeline ranks wait."""

    @property
    def bound(self) -> str:
        """The resource that is busy longest."""
        return max(self.busy, key=lambda name: self.busy[name])


class _Times(NamedTuple):
    """The seconds of a unit on each resource."""

    name: str
    forward: float
    backward: float
    gather: float
    regather: float
    reduce: float
    link: float
    """Parameters that come to the device for a forward or a backward."""
    states: float
    """States and main parameters to the device and back, once a step."""
    step: float
    resident: bool


class _Line:
    """The time line of a rank."""

    def __init__(self, shares_cores: bool) -> None:
        self._network = COMPUTE if shares_cores else NETWORK
        self.ends = dict.fromkeys((COMPUTE, NETWORK, LINK), 0.0)
        self.busy = dict.fromkeys(self.ends, 0.0)
        self.spans: list[Span] = []

    def add(self, row: str, label: str, ready: float, seconds: float) -> float:
        """Do something as soon as its resource is free, not before `ready`; return its end."""
        if not seconds:
            return ready
        row = self._network if row == NETWORK else row
        start = max(self.ends[row], ready)
        self.ends[row] = start + seconds
        self.busy[row] += seconds
        self.spans.append(Span(row, label, start, self.ends[row]))
        return self.ends[row]

    def forward(self, units: Sequence[_Times], *, is_first: bool) -> None:
        """Add a forward; the first one of a step gathers what stays gathered."""
        begin = self.ends[COMPUTE]
        starts = [begin, begin]
        for unit in units:
            ready = begin if unit.resident else starts[-2]
            ready = self.add(LINK, f"L {unit.name}", ready, unit.link)
            seconds = unit.gather if is_first or not unit.resident else 0.0
            ready = self.add(NETWORK, f"G {unit.name}", ready, seconds)
            starts.append(max(ready, self.ends[COMPUTE]))
            self.add(COMPUTE, f"F {unit.name}", ready, unit.forward)

    def backward(self, units: Sequence[_Times], *, reduces: bool) -> float:
        """Add a backward; return the time at which the last gradient is reduced."""
        begin = end = self.ends[COMPUTE]
        order = list(reversed(units))
        ready = self._gather_again(order[0], begin)
        for unit, following in zip(order, [*order[1:], None], strict=True):
            start = max(ready, self.ends[COMPUTE])
            done = self.add(COMPUTE, f"B {unit.name}", ready, unit.backward)
            if following is not None:
                ready = self._gather_again(following, start)
            if reduces:
                done = self.add(NETWORK, f"R {unit.name}", done, unit.reduce)
            end = max(end, done)
        return end

    def _gather_again(self, unit: _Times, ready: float) -> float:
        ready = self.add(LINK, f"L {unit.name}", ready, unit.link if unit.regather else 0.0)
        return self.add(NETWORK, f"G {unit.name}", ready, unit.regather)

    def step(self, units: Sequence[_Times], ready: float) -> None:
        """Add the step of all units."""
        for unit in reversed(units):
            done = self.add(LINK, f"S {unit.name}", ready, unit.states)
            self.add(COMPUTE, f"step {unit.name}", done, unit.step)

    def skip(self, seconds: float) -> None:
        """Let all resources do what they have done in the last so many seconds, once more."""
        self.ends = {row: end + seconds for row, end in self.ends.items()}


class Planned(NamedTuple):
    """The plans of a configuration on one rank of each stage of its pipeline."""

    setting: Setting
    config: Config
    units: list[UnitPlan]


class Predictor:
    """Predicts the steps of one model on one cluster, with the pieces that configurations share.

    Args:
        model: the model, on the meta device if need be.
        cluster: the cluster.
        samples: the samples of a step, of all ranks together.
        loss_of: (samples) -> the function that computes the loss of a micro-batch of so many.
        given: settings that all configurations have, such as precision.
        tp_plan: see `plan_division`.
        timed: the profiles by tensor ranks, if they were measured; None counts.
    """

    def __init__(
        self,
        model: nn.Module,
        cluster: Cluster,
        samples: int,
        loss_of: Callable[[int], LossOf],
        given: dict[str, Any] | None = None,
        *,
        tp_plan: Plan | None = None,
        timed: Mapping[int, Profiles] | None = None,
    ) -> None:
        self.model, self.cluster, self.samples, self.given = model, cluster, samples, given or {}
        self._loss_of, self._tp_plan = loss_of, tp_plan
        self.on_cpu = cluster.shares_cores
        self.specs = functools.cache(self._specs)
        self.profiles = functools.cache(self._profiles) if timed is None else timed.__getitem__
        self.planned = functools.cache(self._planned)
        self.runs, self.cut = functools.cache(self._runs), functools.cache(self._cut)
        self.estimate = functools.cache(self._estimate)
        self._counted = functools.cache(lambda num: Counted(model, loss_of=loss_of(num), tp_plan=tp_plan))
        self._usage = functools.cache(self._usage_of)
        self._held = functools.cache(self._held_in_pipeline)
        self._profile = functools.cache(lambda tp, num: profile_of(self.profiles(tp), num))

    # -- what configurations share --------------------------------------------------------------------

    @functools.cached_property
    def outline(self) -> Outline | str:
        """The order in which a pipeline cuts the model, or the reason why none can."""
        try:
            chunked = Chunked(without_memory(self.model))
            require_handed_on(chunked, torch.device("cpu"))
        except ValueError as error:
            return str(error)
        return chunked.outline

    def _specs(self, tp: int) -> Sequence[UnitSpec]:
        specs = specify_units(self.model, Config.parse(self.given))
        return plan_division(self.model, specs, self._tp_plan, tp).specs

    def _profiles(self, tp: int) -> Profiles:
        config = Config.parse({**self.given, "mesh": {"tp": tp}})
        setting = setting_of(config, tp, host_computes=self.on_cpu)
        loss, rates = self._loss_of(1), self.cluster
        counted = count_units(
            self.model, config, setting, loss, rates.machine, self._tp_plan, rates.efficiency
        )
        return {1: counted}

    def num_data(self, choice: Choice) -> int:
        """Return the ranks that divide a batch."""
        return self.cluster.num_ranks // (choice.tp * choice.pp)

    def num_microbatches(self, choice: Choice) -> int:
        """Return the micro-batches of a rank in a step."""
        return self.samples // (self.num_data(choice) * choice.samples)

    def config(self, choice: Choice) -> dict[str, Any]:
        """Return the configuration as a dict for `initialize`; the bits are the optimizer's."""
        num, found = self.num_microbatches(choice), self._states_config(choice)
        found["micro_batch_size"] = choice.samples
        if choice.pp > 1:
            _, runs = self.cut(choice.pp * choice.chunks)
            assert isinstance(self.outline, Outline), "it has been cut"
            found["pipeline"] = {
                "schedule": choice.schedule,
                "num_microbatches": num,
                "num_chunks": choice.chunks,
                "split": [self.outline.blocks[run.start] for run in runs[1:]],
            }
        elif num > 1:
            found["gradient_accumulation_steps"] = num
        if choice.recompute != "none":
            found["recompute"] = choice.recompute
        if choice.recompute == "auto":
            found["memory_budget"] = self.room
        return found

    def _states_config(self, choice: Choice) -> dict[str, Any]:
        """Return the part of a configuration on which the places of model states depend."""
        found: dict[str, Any] = {**self.given, "stage": choice.stage}
        mesh = {name: size for name, size in (("pp", choice.pp), ("tp", choice.tp)) if size > 1}
        if mesh:
            found["mesh"] = mesh
        optimizer, parameters = choice.tiers
        if choice.tiers != TIERS[0]:
            found["offload"] = {"optimizer": optimizer, "parameters": parameters}
            if "nvme" in choice.tiers:
                found["offload"]["nvme_path"] = "."
        return found

    @property
    def room(self) -> int:
        """The bytes of a device that a plan may use."""
        return int(SHARE * self.cluster.machine.device_bytes)

    def _planned(self, stage: int, tp: int, pp: int, tiers: tuple[str, str], accumulates: bool) -> Planned:
        choice = Choice(stage=stage, tp=tp, pp=pp, tiers=tiers)
        num = {"num_microbatches" if pp > 1 else "gradient_accumulation_steps": 2 if accumulates else 1}
        config = Config.parse(self._states_config(choice) | ({"pipeline": num} if pp > 1 else num))
        setting = setting_of(config, self.cluster.num_ranks, host_computes=self.on_cpu)
        return Planned(setting, config, plan_units(self.specs(tp), setting))

    def plan(self, choice: Choice) -> Planned:
        """Return the plans of the units of a configuration."""
        accumulates = self.num_microbatches(choice) > 1
        return self.planned(choice.stage, choice.tp, choice.pp, choice.tiers, accumulates)

    def _runs(self, pp: int, chunks: int) -> list[list[int]]:
        """Return the numbers of the units of each chunk; the root is in the last one.

        Raises:
            ValueError: the model cannot be cut, or has too few blocks.
        """
        profile = self._profile(1, 1)
        rest = [*range(1, len(profile)), 0]
        if pp == 1:
            return [rest]
        places, runs = self.cut(pp * chunks)
        return [[number for number in rest if places[number] in run] for run in runs]

    def _cut(self, num_chunks: int) -> tuple[list[int], Sequence[range]]:
        """Return the block that each unit is in, or next to; and the blocks of each chunk."""
        profile = self._profile(1, 1)
        if isinstance(self.outline, str):
            raise ValueError(self.outline)
        names = [self.outline.chunk(range(n, n + 1)) for n in range(len(self.outline.blocks))]
        block_of = {name: number for number, own in enumerate(names) for name in own}
        places = [
            next(
                (at for name, at in block_of.items() if f"{unit.name}.".startswith(f"{name}.")),
                len(names) - 1,
            )
            for unit in profile
        ]
        times = Counter[int]()
        for unit, at in zip(profile, places, strict=True):
            times[at] += max(1, int(unit.products or 1e9 * (unit.forward + unit.backward)))
        blocks = [BlockProfile(time=times[number]) for number in range(len(names))]
        return places, partition(blocks, num_chunks)

    # -- bytes ------------------------------------------------------------------------------------------

    def _usage_of(self, tp: int, recompute: str, samples: int) -> int:
        """Return the activations of a micro-batch without a pipeline, counted for 1 and for 2 samples."""
        if samples > 2:
            one, two = (self._usage(tp, recompute, number) for number in (1, 2))
            return one + (two - one) * (samples - 1)
        config = Config.parse({**self.given, "mesh": {"tp": tp}, "recompute": recompute})
        setting = setting_of(config, tp, host_computes=self.on_cpu)
        return self._counted(samples).usage(config, setting).peak

    def activations(self, choice: Choice) -> tuple[int, ...]:
        """Return the most bytes of activations on each pipeline rank."""
        if choice.pp == 1:
            if choice.recompute == "auto":
                least = self._usage(choice.tp, "unit", choice.samples)
                return (max(least, self.room - self.states(choice)[0].peak),)
            return (self._usage(choice.tp, choice.recompute, choice.samples),)
        return self._held(replace(choice, stage=0, tiers=TIERS[0], bits=BITS[0]))

    def _held_in_pipeline(self, choice: Choice) -> tuple[int, ...]:
        profile = self._profile(choice.tp, choice.samples)
        runs = self.runs(choice.pp, choice.chunks)
        is_kept = choice.recompute == "none"
        held = [
            sum(int(profile[n].saved if is_kept or n == 0 else profile[n].given) for n in run) for run in runs
        ]
        schedule = self.schedule(choice)
        counts = count_activations(schedule, held).per_rank
        again = [
            0 if is_kept else max(int(profile[n].saved) for chunk in own for n in runs[chunk])
            for own in schedule.chunks
        ]
        return tuple(map(sum, zip(counts, again, strict=True)))

    def schedule(self, choice: Choice) -> Schedule:
        """Return the schedule of a pipeline. Raises ValueError if there is none with these numbers."""
        return build_schedule(choice.schedule, choice.pp, self.num_microbatches(choice), choice.chunks)

    def states(self, choice: Choice) -> list[Estimate]:
        """Return the bytes of each pipeline rank without activations."""
        key = (choice.stage, choice.tp, choice.pp, choice.tiers, self.num_microbatches(choice) > 1)
        return self.estimate(*key, choice.chunks, choice.bits)

    def _estimate(
        self,
        stage: int,
        tp: int,
        pp: int,
        tiers: tuple[str, str],
        accumulates: bool,
        chunks: int,
        bits: int,
    ) -> list[Estimate]:
        setting, config, units = self.planned(stage, tp, pp, tiers, accumulates)
        states, found = States(bits=bits), []
        runs = self.runs(pp, chunks)
        for rank in range(pp):
            own = sorted({number for chunk in runs[rank::pp] for number in chunk} | {0})
            part = [units[number] for number in own]
            found.append(estimate_of_rank((part, 0), setting, config, states, DryRun()))
        return found

    def bytes(self, choice: Choice) -> Estimate:
        """Return the bytes of the pipeline rank that has most."""
        both = zip(self.states(choice), self.activations(choice), strict=True)
        return max((replace(one, activations=held) for one, held in both), key=lambda one: one.peak)

    def fits(self, found: Estimate) -> bool:
        """True if a rank, and its node, have the memory."""
        machine, num = self.cluster.machine, min(self.cluster.num_ranks, self.cluster.ranks_per_node)
        return found.peak <= self.room and num * found.host <= SHARE * machine.host_bytes

    # -- seconds ----------------------------------------------------------------------------------------

    def times(self, choice: Choice) -> list[_Times]:
        """Return the seconds of all units, in the order of the plans."""
        plan, profile = self.plan(choice), self._profile(choice.tp, choice.samples)
        share = self._recomputed(choice)
        return [
            self._of_unit(unit, own, choice, plan, share if number else 0.0, number)
            for number, (unit, own) in enumerate(zip(plan.units, profile, strict=True))
        ]

    def _recomputed(self, choice: Choice) -> float:
        """Return the share of the units that recompute."""
        if choice.recompute != "auto":
            return float(choice.recompute == "unit")
        all_kept, none_kept = (self._usage(choice.tp, how, choice.samples) for how in ("none", "unit"))
        room = self.room - self.states(choice)[0].peak
        return min(1.0, max(0.0, (all_kept - room) / max(1, all_kept - none_kept)))

    def _of_unit(
        self, unit: UnitPlan, own: UnitProfile, choice: Choice, plan: Planned, recomputed: float, number: int
    ) -> _Times:
        cluster, machine, setting = self.cluster, self.cluster.machine, plan.setting
        is_kept = unit.is_kept(
            setting.placements, is_root=number == 0, ends_forward=number == len(plan.units) - 1
        )
        sent = [0.0, 0.0, 0.0]
        calls = [0, 0, 0]
        link = states = moved = stepped = 0.0
        for buffer in unit.buffers:
            total, item = buffer.layout.total, buffer.compute_dtype.itemsize
            wire = buffer.reduce_dtype.itemsize, buffer.wide_dtype.itemsize
            regathers = () if is_kept else buffer.regathers
            paths = ((buffer.gathers, (item,)), (regathers, (item,)), (buffer.reductions, wire))
            for at, (path, items) in enumerate(paths):
                sent[at] += bytes_sent(path, total, setting.sizes, *items)
                calls[at] += len(path)
            if not buffer.is_resident and (buffer.copy_tier or buffer.main_tier) is not Tier.DEVICE:
                link += buffer.main_size * item
            if buffer.trainable:
                states += _state_traffic(buffer, choice.bits)
                stepped += buffer.main_size * (3 * buffer.main_dtype.itemsize + 4 * choice.bits / 8)
                moved += total * (item + buffer.reduce_dtype.itemsize)
        span = choice.tp * setting.sizes[DP_SHARD]
        seconds = [
            cluster.exchange(num, call, span, adds=at == 2)
            for at, (num, call) in enumerate(zip(sent, calls, strict=True))
        ]
        tensor = cluster.exchange(own.sent, own.calls, choice.tp, adds=True) if choice.tp > 1 else 0.0
        forward = own.forward + tensor
        rates = [rate for rate in (machine.to_host, machine.from_host) if rate]
        disk = [rate for rate in (machine.disk_read, machine.disk_write) if rate and "nvme" in choice.tiers]
        rate = min([*rates, *disk], default=machine.bandwidth)
        return _Times(
            unit.name or "rest",
            forward=forward,
            backward=own.backward + tensor + recomputed * forward + moved / machine.bandwidth,
            gather=seconds[0],
            regather=seconds[1],
            reduce=seconds[2],
            link=link / rate,
            states=states / rate,
            step=stepped / machine.bandwidth,
            resident=unit.is_resident,
        )

    def __call__(self, choice: Choice) -> Prediction:
        """Predict a step. Raises ValueError if the configuration does not exist."""
        return self._pipelined(choice) if choice.pp > 1 else self._alone(choice)

    def _alone(self, choice: Choice) -> Prediction:
        units, num = self.times(choice), self.num_microbatches(choice)
        units = [*units[1:], units[0]]
        reduces = self.plan(choice).setting.placements.gradient != SUMMANDS
        line = _Line(self.on_cpu)
        reduced = 0.0
        for number in range(min(num, 3)):
            before, busy = max(line.ends.values()), dict(line.busy)
            is_last = number == min(num, 3) - 1
            line.forward(units, is_first=number == 0)
            reduced = line.backward(units, reduces=reduces or is_last)
            if number == 1 and num > 3:  # the micro-batches in the middle are alike
                line.skip((num - 3) * (max(line.ends.values()) - before))
                line.busy = {row: one + (num - 3) * (one - busy[row]) for row, one in line.busy.items()}
        line.step(units, reduced)
        return Prediction(
            choice=choice,
            seconds=max(line.ends.values()),
            busy=dict(line.busy),
            spans=tuple(line.spans),
            estimate=self.bytes(choice),
        )

    def _pipelined(self, choice: Choice) -> Prediction:
        times, schedule = self.times(choice), self.schedule(choice)
        profile, cluster = self._profile(choice.tp, choice.samples), self.cluster
        num, span = self.num_microbatches(choice), cluster.num_ranks // choice.pp + 1
        costs, tails = [], [0.0] * choice.pp
        busy = [dict.fromkeys((COMPUTE, NETWORK, LINK), 0.0) for _ in range(choice.pp)]
        for rank, run in zip(schedule.placement, self.runs(choice.pp, choice.chunks), strict=True):
            units, line, end = [times[number] for number in run], _Line(self.on_cpu), _Line(self.on_cpu)
            line.forward(units, is_first=False)
            forward = max(line.ends.values())
            line.backward(units, reduces=False)
            backward = max(line.ends.values()) - forward
            given = max(profile[number].given for number in run)
            costs.append(
                ActionCosts(
                    forward=forward,
                    backward_input=backward / 2,
                    backward_weight=backward / 2,
                    transfer=cluster.exchange(given, 1, span),
                )
            )
            sent = sum(unit.reduce + unit.resident * unit.gather for unit in units)
            end.step(units, end.add(NETWORK, "R", 0.0, sent))
            # On an accelerator gradients are reduced while the last micro-batch goes back.
            hidden = 0.0 if self.on_cpu else backward
            tails[rank] += max(end.busy[COMPUTE], max(end.ends.values()) - hidden)
            for row in busy[rank]:
                busy[rank][row] += num * line.busy[row] + end.busy[row]
        found = _simulated(schedule, tuple(costs))
        spans, ends = [], []
        for rank, (own, tail) in enumerate(zip(found.spans, tails, strict=True)):
            ends.append(own[-1].end + tail)
            spans += [Span(f"rank {rank}", str(one.action), one.start, one.end) for one in own]
            spans += [Span(f"rank {rank}", "step", own[-1].end, ends[-1])] if tail else []
        return Prediction(
            choice=choice,
            seconds=max(ends),
            busy=max(busy, key=lambda own: max(own.values())),
            spans=tuple(spans),
            estimate=self.bytes(choice),
            bubble=found.bubble_share,
        )


def _state_traffic(buffer: BufferPlan, bits: int) -> float:
    """Return the bytes that come to the device for the step of a buffer, and go back."""
    moved = 2 * buffer.main_size * bits / 8 if buffer.travels else 0.0
    return moved + (
        buffer.main_size * buffer.main_dtype.itemsize if buffer.main_tier is not Tier.DEVICE else 0
    )


@functools.lru_cache(maxsize=256)
def _simulated(schedule: Schedule, costs: tuple[ActionCosts, ...]) -> ScheduleTimes:
    return simulate(schedule, costs)
