"""The seconds of a step and the bytes of a rank, for one configuration.

A step is the list schedule of `timeline.py`. In a pipeline each chunk is scheduled so; the times of chunks go
into the simulator of `parallel/pipeline/simulate.py`. Bytes are those of `zeroshard.estimate`, by its own
functions.

[Note: Bounds] `Predictor.least` gives seconds that a prediction never goes below, for any tiers: the
busiest resource of each chunk; in a pipeline also the forwards that its first micro-batch needs on other
ranks, and the backwards that its last one leaves to them. `Predictor.least_held` gives the activations before
the first backward of a pipeline, for which no schedule is built.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from zeroshard.assemble import specify_units
from zeroshard.config.sections import Config
from zeroshard.forwards.budget import SHARE
from zeroshard.forwards.dryrun import without_memory
from zeroshard.forwards.keeping import Interval
from zeroshard.memory.estimate import Estimate, estimate_of_rank, setting_of
from zeroshard.memory.tiered import States, bytes_sent
from zeroshard.memory.typical import DryRun
from zeroshard.parallel.pipeline.actions import Schedule
from zeroshard.parallel.pipeline.chunked import Chunked, Outline
from zeroshard.parallel.pipeline.cut import require_handed_on
from zeroshard.parallel.pipeline.partition import BlockProfile, partition
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.simulate import ActionCosts, ChunkBytes, ScheduleTimes, count_bytes, simulate
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.plan.buffers import BufferPlan, Setting, UnitPlan, plan_units
from zeroshard.plan.exchange import Exchange
from zeroshard.plan.placement import DP_SHARD, STAGES, SUMMANDS
from zeroshard.plan.tiers import Tier
from zeroshard.plan.units import UnitSpec
from zeroshard.planning.machine import Cluster
from zeroshard.planning.profile import Profiles, Subject, count_units, names_in_order, profile_of
from zeroshard.planning.timeline import COMPUTE, LINK, NETWORK, TIERS, Choice, Costs, Line, Prediction


class _Rows(NamedTuple):
    """The rows of a profile: the root, units, and parts of the root.

    With several pipeline ranks the parts have the parameters of the root, else they have none.
    """

    specs: list[UnitSpec]
    is_unit: Any
    """True for units other than the root, [rows]."""
    alike: list[int]
    """The first unit whose plan is the same but for the name, of each unit; other rows are like no other."""


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
        self.names = names_in_order(subject.model)
        self.units = specify_units(subject.model, Config.parse(subject.given))
        count: Callable[[int], Profiles] = lambda tp: {1: count_units(subject, tp, 1, cluster)}  # noqa: E731
        self.profiles = functools.cache(count) if timed is None else timed.__getitem__
        self.profile = functools.cache(lambda tp, num: profile_of(self.profiles(tp), num))
        self.cut, self.rows = functools.cache(self._cut), functools.cache(self._rows)
        self._divided = functools.cache(partial(plan_division, subject.model, self.units, subject.tp_plan))
        self.usage, self._held = functools.cache(self._usage), functools.cache(self._held_in_pipeline)
        self.waiting = functools.cache(lambda tp: subject.waiting(tp, self.on_cpu))
        self._units, self._plans = functools.cache(self._planned), functools.cache(self._costs)
        self._states, self._of_rank = functools.cache(self._of_ranks), functools.cache(self._estimated)
        self._built, self._simulated = functools.cache(build_schedule), functools.cache(simulate)

    def on(self, cluster: Cluster) -> Predictor:
        """Return what predicts for a cluster of as many ranks with other rates or memory."""
        other = copy.copy(self)
        other.cluster = cluster
        other._plans = functools.cache(other._costs)
        return other

    # -- what configurations share --------------------------------------------------------------------

    @functools.cached_property
    def outline(self) -> Outline:
        """The order in which a pipeline cuts the model. Raises ValueError if none can."""
        chunked = Chunked(without_memory(self.subject.model))
        require_handed_on(chunked, torch.device("cpu"))
        return chunked.outline

    def _rows(self, tp: int, is_cut: bool) -> _Rows:
        (root, *units), parts = self._divided(tp).specs, list[UnitSpec]()
        for name in self.profile(1, 1).names[len(units) + 1 :]:
            module = self.subject.model.get_submodule(name)
            inside = set(module.modules()) if is_cut else set()
            own = [one for one in root.originals if any(owner in inside for owner, _ in one.owners)]
            parts.append(UnitSpec(name, module, own))
        rows = [replace(root, originals=[] if is_cut else root.originals), *units, *parts]
        is_unit = np.array([False, *(True for _ in units), *(False for _ in parts)])
        kinds = [(at == len(units), _kind_of(one)) if is_unit[at] else at for at, one in enumerate(rows)]
        return _Rows(rows, is_unit, list(map(kinds.index, kinds)))

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

    def _cut(self, num_chunks: int) -> tuple[list[list[int]], Sequence[range]]:
        """Return the rows of each chunk in the order of a forward, and its blocks; the root is the last one.

        Raises:
            ValueError: the model cannot be cut, or has too few blocks.
        """
        profile, names = self.profile(1, 1), self.names
        places = [
            next((at for at, name in enumerate(names) if f"{row}.".startswith(f"{name}.")), len(names))
            for row in profile.names
        ]
        order = [*sorted(range(1, len(places)), key=places.__getitem__), 0]
        if num_chunks == 1:
            return [order], ()
        before, last = len(self.outline.before), len(self.outline.blocks) - 1
        own, times = [min(max(0, place - before), last) for place in places], [0] * (last + 1)
        for block, products in zip(own, profile.products, strict=True):
            times[block] += int(products)
        runs = partition([BlockProfile(time=max(1, time)) for time in times], num_chunks)
        return [[row for row in order if own[row] in run] for run in runs], runs

    def _planned(self, choice: Choice) -> tuple[Config, Setting, dict[int, UnitPlan]]:
        """Return the config, the setting of plans, and the plans of the first of all rows that are alike."""
        rows, config = self.rows(choice.tp, choice.pp > 1), Config.parse(self._config_of_states(choice))
        setting = setting_of(config, self.cluster.num_ranks, host_computes=self.on_cpu)
        plans = {row: plan_units([rows.specs[row]], setting)[0] for row in sorted({*rows.alike})}
        return config, setting, plans

    # -- bytes ------------------------------------------------------------------------------------------

    def _usage(self, tp: int, recompute: str, samples: int) -> int:
        """Return the activations of a micro-batch without a pipeline, counted for one sample.

        A second sample, counted for the whole model, shows the bytes that do not grow with the samples.
        """
        if samples > 2 or (samples == 2 and (tp, recompute) != (1, "none")):
            fixed = 2 * self.usage(1, "none", 1) - self.usage(1, "none", 2)
            return samples * self.usage(tp, recompute, 1) - (samples - 1) * fixed
        model = self.subject.without_memory(samples)
        return model.usage(*self.subject.setting(tp, self.on_cpu, recompute)).peak

    def activations(self, choice: Choice) -> tuple[int, ...]:
        """Return the most bytes of activations on each pipeline rank."""
        if choice.pp > 1:
            return self._held(replace(choice, stage=0, tiers=TIERS[0], bits=32))
        if choice.recompute != "auto":
            return (self.usage(choice.tp, choice.recompute, choice.samples),)
        most, least = (self.usage(choice.tp, how, choice.samples) for how in ("none", "unit"))
        return (min(most, max(least, self.room - self.states(choice)[0].peak)),)

    def _kept(self, choice: Choice) -> tuple[Any, Any]:
        """Return bytes from the forward to the backward, and those of units that are computed again."""
        own, is_unit = self.profile(choice.tp, choice.samples), self.rows(choice.tp, True).is_unit
        again = is_unit * own.saved * (choice.recompute == "unit")
        return np.where(again, own.made, own.saved), again

    def least_held(self, choice: Choice) -> Any:
        """Return bytes of activations that each rank of a pipeline holds at least; see [Note: Bounds]."""
        last, num = choice.pp * choice.chunks, self.num_microbatches(choice)
        most = [min(num, choice.pp, last - chunk) for chunk in range(last)]
        first = [num] * last if choice.schedule == "gpipe" else most
        return np.bincount(choice.placement, first * self._of_chunks(choice, self._kept(choice)[0]))

    def _held_in_pipeline(self, choice: Choice) -> tuple[int, ...]:
        (kept, again), found = self._kept(choice), list[ChunkBytes]()
        made, runs = self.profile(choice.tp, choice.samples).made, self.cut(choice.pp * choice.chunks)[0]
        waits = choice.samples * self.waiting(choice.tp) if choice.schedule in HALVED else 0 * kept
        for run in runs:
            output = 0 if run is runs[-1] else made[run[-1]]
            before, after = np.cumsum(kept[run]) - kept[run], waits[run].sum() - np.cumsum(waits[run])
            most = output + (before + after + again[run]).max()
            found.append(ChunkBytes(*map(int, (output, sum(kept[run]), most, sum(waits[run])))))
        return count_bytes(self._schedule(choice), found)

    def _schedule(self, choice: Choice) -> Schedule:
        """Return the schedule of a pipeline. Raises ValueError if there is none with these numbers."""
        return self._built(choice.schedule, choice.pp, self.num_microbatches(choice), choice.chunks)

    def states(self, choice: Choice) -> list[Estimate]:
        """Return the bytes of each pipeline rank without activations."""
        shared = replace(choice, recompute="none", samples=0)
        return self._states(shared, self.num_microbatches(choice) > 1)

    def _of_ranks(self, choice: Choice, accumulates: bool) -> list[Estimate]:
        plans, alike = _of_plans(choice), self.rows(choice.tp, choice.pp > 1).alike
        ranks: list[list[int]] = [[] for _ in range(choice.pp)]
        for rank, run in zip(choice.placement, self.cut(choice.pp * choice.chunks)[0], strict=True):
            ranks[rank] += run
        return [self._of_rank(plans, accumulates, tuple(alike[row] for row in sorted(own))) for own in ranks]

    def _estimated(self, choice: Choice, accumulates: bool, own: Sequence[int]) -> Estimate:
        """Return the bytes of a rank with some rows, of which alike ones are the same one."""
        (config, setting, units), rows = (
            self._units(replace(choice, bits=32)),
            self.rows(choice.tp, choice.pp > 1),
        )
        parts = chain.from_iterable(rows.specs[row].originals for row in own if not rows.is_unit[row])
        originals = list({id(one): one for one in parts}.values())  # of tied parts each once
        root = plan_units([replace(rows.specs[0], originals=originals)], setting)
        part, states = [*root, *(units[row] for row in own if rows.is_unit[row])], States(bits=choice.bits)
        return estimate_of_rank((part, 0), setting, config, 1 + accumulates, states, DryRun())

    def bytes(self, choice: Choice, activations: Sequence[int] | None = None) -> Estimate:
        """Return the bytes of the pipeline rank that has most, with its own activations, or with others."""
        held = self.activations(choice) if activations is None else activations
        most, there = max(zip(self.states(choice), held, strict=True), key=lambda one: one[0].peak + one[1])
        return replace(most, activations=there)

    def fits(self, own: Estimate) -> bool:
        """True if a rank, and its node, have the memory."""
        machine, num = self.cluster.machine, min(self.cluster.num_ranks, self.cluster.ranks_per_node)
        return own.peak <= self.room and num * own.host <= SHARE * machine.host_bytes

    # -- seconds ----------------------------------------------------------------------------------------

    def _costs(self, choice: Choice) -> Any:
        """Return the costs of the plans of all rows, [fields of Costs, rows]; alike ones are counted once."""
        (_, setting, units), rows = self._units(replace(choice, bits=32)), self.rows(choice.tp, choice.pp > 1)
        last, found = int(rows.is_unit.sum()), []
        for row, unit in units.items():
            is_root = not rows.is_unit[row]
            is_kept = unit.is_kept(setting.placements, is_root=is_root, ends_forward=row == last)
            own = [self._cost(choice, one, setting, is_kept) for one in unit.buffers]
            found.append(sum(map(np.array, own), np.zeros(len(Costs._fields))))
        return np.array(found)[np.searchsorted([*units], rows.alike)].T

    def _cost(self, choice: Choice, buffer: BufferPlan, setting: Setting, is_kept: bool) -> Costs:
        total, item = buffer.layout.total, buffer.compute_dtype.itemsize
        sizes, machine = setting.sizes, self.cluster.machine
        wire, is_gathered = (buffer.reduce_dtype.itemsize, buffer.wide_dtype.itemsize), not buffer.is_resident
        rates = [machine.to_host, machine.from_host]
        rates += [machine.disk_read, machine.disk_write] if "nvme" in choice.tiers else []
        slowest = min([rate for rate in rates if rate], default=machine.bandwidth)
        is_far = is_gathered and (buffer.copy_tier or buffer.main_tier) is not Tier.DEVICE
        owned, width = buffer.main_size * buffer.trainable, choice.bits / 4  # bytes of both states
        main, span = owned * buffer.main_dtype.itemsize, choice.tp * sizes[DP_SHARD]
        travelling = width * owned * buffer.travels + main * (buffer.main_tier is not Tier.DEVICE)

        def exchange(path: Sequence[Exchange], *items: int, adds: bool = False) -> float:
            sent = bytes_sent(path, total, sizes, *items)
            return float(self.cluster.exchange(sent, len(path), span=span, adds=adds))

        first, link = exchange(buffer.gathers, item), buffer.main_size * item * is_far / slowest
        return Costs(
            forward=0.0,
            backward=total * (item + wire[0]) * buffer.trainable / machine.bandwidth,
            first=first,
            gather=first * is_gathered,
            regather=0.0 if is_kept else exchange(buffer.regathers, item),
            reduce=exchange(buffer.reductions, *wire, adds=True),
            link=link,
            relink=link * (not is_kept),
            states=travelling / slowest,
            step=(2 * width * owned + 3 * main) / machine.bandwidth,
        )

    def times(self, choice: Choice, plans: Any, share: Any) -> Any:
        """Return the costs of all rows, [..., fields of Costs, rows].

        Args:
            choice: the configuration.
            plans: the costs of plans, [..., fields of Costs, rows].
            share: the share of the units that recompute, [..., 1].
        """
        own, cluster = self.profile(choice.tp, choice.samples), self.cluster
        tensor = cluster.exchange(own.sent, own.calls, span=choice.tp, adds=True) if choice.tp > 1 else 0.0
        again = share * self.rows(choice.tp, choice.pp > 1).is_unit * (own.forward + tensor)
        found = plans + np.zeros((*np.shape(share), 1))
        found[..., 0, :] += own.forward + tensor
        found[..., 1, :] += own.backward + tensor + again
        return found

    def share(self, choice: Choice) -> float:
        """Return the share of the units that recompute."""
        if choice.recompute != "auto":
            return float(choice.recompute == "unit")
        kept, least = (self.usage(choice.tp, how, choice.samples) for how in ("none", "unit"))
        return (kept - self.activations(choice)[0]) / max(1, kept - least)

    def __call__(self, choice: Choice) -> Prediction:
        """Predict a step. Raises ValueError if the configuration does not exist."""
        return self.step(choice)._replace(estimate=self.bytes(choice))

    def step(self, choice: Choice) -> Prediction:
        """Predict the seconds of a step alone. Raises ValueError if its schedule does not exist."""
        own = Costs(*self.times(choice, self._plans(_of_plans(choice)), self.share(choice)).tolist())
        return self._pipelined(choice, own) if choice.pp > 1 else self._alone(choice, own)

    def _alone(self, choice: Choice, own: Costs) -> Prediction:
        num, line = self.num_microbatches(choice), Line(self.on_cpu)
        (order,), each, reduced = self.cut(1)[0], STAGES[choice.stage].gradient != SUMMANDS, 0.0
        nothing = [0.0] * len(own.link)
        for number in range(min(num, 3)):
            start, busy = line.end, dict(line.busy)
            gather = own.gather if number else own.first
            reduce = own.reduce if each or number == min(num, 3) - 1 else nothing
            line.run("F", order, own.forward, own.link, gather, nothing)
            reduced = line.run("B", order[::-1], own.backward, own.relink, own.regather, reduce)
            if number == 1 and num > 3:  # the micro-batches in the middle are alike
                more = (num - 3) * (line.end - start)
                line.ends = {row: end + more for row, end in line.ends.items()}
                line.busy = {row: one + (num - 3) * (one - busy[row]) for row, one in line.busy.items()}
        line.step(own, order, reduced)
        return Prediction(choice, line.end, line.busy, partial(iter, line.spans))

    def _pipelined(self, choice: Choice, own: Costs) -> Prediction:
        schedule, num = self._schedule(choice), self.num_microbatches(choice)
        nothing, transfer = [0.0] * len(own.link), self._transfer(choice)
        costs, tails = list[ActionCosts](), [0.0] * choice.pp
        busy = [dict.fromkeys((COMPUTE, NETWORK, LINK), 0.0) for _ in range(choice.pp)]
        for rank, run in zip(schedule.placement, self.cut(choice.pp * choice.chunks)[0], strict=True):
            line, end = Line(self.on_cpu), Line(self.on_cpu)
            line.run("F", run, own.forward, own.link, own.gather, nothing)
            forward = line.end
            line.run("B", run[::-1], own.backward, own.relink, own.regather, nothing)
            half = (line.end - forward) / 2
            costs.append(
                ActionCosts(forward=forward, backward_input=half, backward_weight=half, transfer=transfer)
            )
            sent = sum(own.reduce[row] + own.first[row] - own.gather[row] for row in run)
            end.step(own, run, end.add(NETWORK, "R", 0.0, sent))
            # On an accelerator gradients are reduced while the last micro-batch goes back.
            tails[rank] += max(end.busy[COMPUTE], end.end - (0.0 if self.on_cpu else 2 * half))
            for row in busy[rank]:
                busy[rank][row] += num * line.busy[row] + end.busy[row]
        found = self._simulated(schedule, tuple(costs))
        seconds = max(own[-1].end + tail for own, tail in zip(found.spans, tails, strict=True))
        most = max(busy, key=lambda one: max(one.values()))
        return Prediction(choice, seconds, most, partial(_intervals, found, tails), found.bubble_share)

    def _transfer(self, choice: Choice) -> float:
        """Return the seconds from the end of an action to its arrival at another pipeline rank."""
        made, run = self.profile(choice.tp, choice.samples).made, self.cut(choice.pp * choice.chunks)[0][0]
        return float(self.cluster.exchange(max(made[run]), 1, span=self.cluster.num_ranks // choice.pp + 1))

    def least(self, choice: Choice) -> Any:
        """Return the least seconds of a step, [no unit recomputes or all, stages]; see [Note: Bounds]."""
        stages = (_of_plans(replace(choice, stage=stage)) for stage in range(len(STAGES)))
        plans = np.array([*map(self._plans, stages)])
        found = self.times(choice, plans, np.array([[[0.0]], [[1.0]]]))
        own = Costs(*np.moveaxis(self._of_chunks(choice, found), -2, 0))
        most = np.sum if self.on_cpu else np.max
        ahead = most([own.forward, own.gather, own.link], 0)
        behind = most([own.backward, own.regather, own.relink], 0)
        reduce = (own.reduce + own.first - own.gather) * (choice.pp > 1)
        ranks = np.equal.outer(choice.placement, range(choice.pp))
        tail = (own.step + np.maximum(0, reduce - behind)) @ ranks
        # Ranks before begin before; with whole backwards they end after, and the first one steps last.
        is_whole = choice.schedule not in HALVED
        others = (ahead + behind * is_whole)[..., : choice.pp]
        total = self.num_microbatches(choice) * ((ahead + behind) @ ranks) + np.cumsum(others, -1) - others
        return (1 - 1e-9) * (total + tail[..., : 1 if is_whole else None]).max(-1)

    def _of_chunks(self, choice: Choice, of_rows: Any) -> Any:
        """Return sums of values of rows, [..., chunks]."""
        runs = self.cut(choice.pp * choice.chunks)[0]
        starts = np.cumsum([0, *map(len, runs[:-1])])
        return np.add.reduceat(of_rows[..., [*chain(*runs)]], starts, -1)


HALVED = ("zb-h1", "zbv")
"""Schedules whose backwards come in two halves."""


def _of_plans(choice: Choice) -> Choice:
    """Return what the costs of plans depend on; in a pipeline stage 2 is stage 1."""
    stage = 1 if choice.pp > 1 and choice.stage == 2 else choice.stage
    return Choice(stage=stage, tp=choice.tp, pp=choice.pp, tiers=choice.tiers, bits=choice.bits)


def _kind_of(spec: UnitSpec) -> tuple[object, ...]:
    """Return what is the same for units with the same plan."""
    found: list[object] = [type(spec.module)]
    for one in spec.originals:
        given = one.parameter
        found += [one.whole_shape, tuple(one.summands), one.cut is None, one.placements is None]
        found += [one.compute_dtype, given.dtype, given.requires_grad, type(given)]
        found += (type(owner) for owner, _ in one.owners)
    return tuple(found)


def _intervals(found: ScheduleTimes, tails: Sequence[float]) -> Iterator[Interval]:
    for rank, (actions, tail) in enumerate(zip(found.spans, tails, strict=True)):
        row, end = f"rank {rank}", actions[-1].end
        yield from (Interval(row, str(one.action), one.start, one.end) for one in actions)
        if tail:
            yield Interval(row, "step", end, end + tail)
