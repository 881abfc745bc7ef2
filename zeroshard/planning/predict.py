"""The seconds of a step and the bytes of a rank, for one configuration.

A step is the list schedule of `timeline.py`. In a pipeline each chunk is scheduled so; the times of chunks go
into the simulator of `parallel/pipeline/simulate.py`. Bytes are those of `zeroshard.estimate`, by its own
functions.

[Note: Bounds] `Predictor.bounds` gives seconds and bytes that a prediction never goes below, for all variants
of a place at once: the sums of the busiest resource of a pipeline rank, the forwards that its first
micro-batch needs on other ranks, and the backwards that its last one leaves to them. So a search predicts few
configurations one by one, and finds the best of all.
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
from zeroshard.config.sections import Config, Mesh
from zeroshard.forwards.budget import SHARE
from zeroshard.forwards.keeping import Interval
from zeroshard.memory.activations import DryRun, without_memory
from zeroshard.memory.estimate import Counted, Estimate, estimate_of_rank, setting_of
from zeroshard.memory.tiered import States, bytes_sent, gradient_bytes, parameter_bytes
from zeroshard.parallel.pipeline.actions import Schedule, loop
from zeroshard.parallel.pipeline.chunked import Chunked, Outline
from zeroshard.parallel.pipeline.cut import require_handed_on
from zeroshard.parallel.pipeline.partition import BlockProfile, partition
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.simulate import ActionCosts, ScheduleTimes, count_activations, simulate
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.plan.buffers import BufferPlan, Setting, UnitPlan, plan_units
from zeroshard.plan.exchange import Exchange
from zeroshard.plan.placement import DP_SHARD, SUMMANDS
from zeroshard.plan.tiers import Tier
from zeroshard.plan.units import UnitSpec
from zeroshard.planning.machine import Cluster
from zeroshard.planning.profile import (
    Profiles,
    Subject,
    count_units,
    names_in_order,
    parts_of_root,
    profile_of,
)
from zeroshard.planning.timeline import (
    COMPUTE,
    LINK,
    NETWORK,
    RECOMPUTES,
    TIERS,
    Choice,
    Costs,
    Line,
    Prediction,
)


class _Rows(NamedTuple):
    """The rows of a profile: the root, units, and parts of the root.

    With several pipeline ranks the parts have the parameters of the root, else they have none.
    """

    specs: list[UnitSpec]
    is_unit: Any
    """True for units other than the root, [rows]."""
    alike: list[int]
    """The first row whose plan is the same but for the name, of each row."""


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
        self._counted = functools.cache(
            lambda num: Counted(subject.model, loss_of=subject.loss_of(num), tp_plan=subject.tp_plan)
        )
        self.cut, self.rows = functools.cache(self._cut), functools.cache(self._rows)
        self.specs = functools.cache(self._specs)
        self._parsed = functools.cache(lambda one: Config.parse(self._config_of_states(one)))
        self.usage, self._held = functools.cache(self._usage), functools.cache(self._held_in_pipeline)
        self._units, self._states = functools.cache(self._planned), functools.cache(self._estimated)
        self._plans, self.within = functools.cache(self._costs), functools.cache(self._within)
        self._least, self._offered = functools.cache(self._least_held), functools.cache(self._of_offers)

    def on(self, cluster: Cluster) -> Predictor:
        """Return what predicts for a cluster of as many ranks with other rates or memory."""
        other = copy.copy(self)
        other.cluster = cluster
        other._plans, other._offered = functools.cache(other._costs), functools.cache(other._of_offers)
        return other

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

    def _rows(self, tp: int, is_cut: bool) -> _Rows:
        model, parts = self.subject.model, list[UnitSpec]()
        root, *units = self.specs(tp)
        for name, module in parts_of_root(model, [root, *units]).items():
            inside = set(module.modules()) if is_cut else set()
            own = [one for one in root.originals if any(owner in inside for owner, _ in one.owners)]
            parts.append(UnitSpec(name, module, own))
        rows = [replace(root, originals=[] if is_cut else root.originals), *units, *parts]
        is_unit = np.array([False, *(True for _ in units), *(False for _ in parts)])
        kinds = [(bool(is_unit[at]), at == len(units), _kind_of(one)) for at, one in enumerate(rows)]
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
        profile, names = self.profile(1, 1), names_in_order(self.subject.model)
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

    def rows_of_ranks(self, choice: Choice) -> list[list[int]]:
        """Return the rows of each pipeline rank."""
        chunks = list(zip(placement(choice), self.cut(choice.pp * choice.chunks)[0], strict=True))
        return [[row for place, run in chunks if place == rank for row in run] for rank in range(choice.pp)]

    def _planned(self, choice: Choice) -> tuple[Setting, list[UnitPlan]]:
        """Return the plans of all rows; alike ones are planned once."""
        rows, config = self.rows(choice.tp, choice.pp > 1), self._parsed(replace(choice, tp=1, pp=1))
        mesh, num = Mesh(pp=choice.pp, tp=choice.tp), self.cluster.num_ranks
        setting = setting_of(config, num, host_computes=self.on_cpu, mesh=mesh)
        plans = {row: plan_units([rows.specs[row]], setting)[0] for row in set(rows.alike)}
        both = zip(rows.alike, rows.specs, strict=True)
        return setting, [replace(plans[row], name=spec.name) for row, spec in both]

    # -- bytes ------------------------------------------------------------------------------------------

    def _usage(self, tp: int, recompute: str, samples: int) -> int:
        """Return the activations of a micro-batch without a pipeline, counted for one sample.

        A second sample, counted for the whole model, shows the bytes that do not grow with the samples.
        """
        if samples > 2 or (samples == 2 and (tp, recompute) != (1, "none")):
            fixed = 2 * self.usage(1, "none", 1) - self.usage(1, "none", 2)
            return samples * self.usage(tp, recompute, 1) - (samples - 1) * fixed
        return self._counted(samples).usage(*self.subject.setting(tp, self.on_cpu, recompute)).peak

    def activations(self, choice: Choice) -> tuple[int, ...]:
        """Return the most bytes of activations on each pipeline rank."""
        if choice.pp > 1:
            return self._held(replace(choice, stage=0, tiers=TIERS[0], bits=32))
        if choice.recompute != "auto":
            return (self.usage(choice.tp, choice.recompute, choice.samples),)
        most, least = (self.usage(choice.tp, how, choice.samples) for how in ("none", "unit"))
        return (min(most, max(least, self.room - self.states(choice)[0].peak)),)

    def _kept(self, choice: Choice) -> tuple[Any, Any]:
        """Return the bytes that each row keeps for a micro-batch, and those of its forward."""
        own, rows = self.profile(choice.tp, choice.samples), self.rows(choice.tp, choice.pp > 1)
        saved = np.floor(own.saved)
        if choice.recompute == "none":
            return saved, 0 * saved
        return np.where(rows.is_unit, np.floor(own.given), saved), saved

    def _held_in_pipeline(self, choice: Choice) -> tuple[int, ...]:
        kept, inside = self._kept(choice)
        runs = self.cut(choice.pp * choice.chunks)[0]
        counts = count_activations(self._schedule(choice), [int(kept[run].sum()) for run in runs])
        again = (int(inside[own].max()) for own in self.rows_of_ranks(choice))
        return tuple(map(sum, zip(counts.per_rank, again, strict=True)))

    def _schedule(self, choice: Choice) -> Schedule:
        """Return the schedule of a pipeline. Raises ValueError if there is none with these numbers."""
        return _built(choice.schedule, choice.pp, self.num_microbatches(choice), choice.chunks)

    def states(self, choice: Choice) -> list[Estimate]:
        """Return the bytes of each pipeline rank without activations."""
        shared = replace(choice, recompute="none", samples=0)
        return self._states(shared, self.num_microbatches(choice) > 1)

    def _estimated(self, choice: Choice, accumulates: bool) -> list[Estimate]:
        """Return the bytes of pipeline ranks; those with alike rows are counted once."""
        (setting, units), rows = self._units(_of_units(choice)), self.rows(choice.tp, choice.pp > 1)
        key = "gradient_accumulation_steps" if choice.pp == 1 else "pipeline"
        steps = 1 + accumulates if choice.pp == 1 else {"num_microbatches": 1 + accumulates}
        config, states = Config.parse(self._config_of_states(choice) | {key: steps}), States(bits=choice.bits)
        found, known = [], dict[tuple[int, ...], Estimate]()
        for own in map(sorted, self.rows_of_ranks(choice)):
            kinds = tuple(rows.alike[row] for row in own)
            if kinds not in known:
                parts = chain.from_iterable(rows.specs[row].originals for row in own if not rows.is_unit[row])
                originals = list({id(one): one for one in parts}.values())  # of tied parts each once
                root = plan_units([replace(rows.specs[0], originals=originals)], setting)
                part = [*root, *(units[row] for row in own if rows.is_unit[row])], 0
                known[kinds] = estimate_of_rank(part, setting, config, states, DryRun())
            found.append(known[kinds])
        return found

    def bytes(self, choice: Choice) -> Estimate:
        """Return the bytes of the pipeline rank that has most."""
        both = zip(self.states(choice), self.activations(choice), strict=True)
        return max((replace(one, activations=held) for one, held in both), key=lambda one: one.peak)

    def fits(self, peak: Any, host: Any) -> Any:
        """True if a rank, and its node, have the memory: bytes, or arrays of them."""
        machine, num = self.cluster.machine, min(self.cluster.num_ranks, self.cluster.ranks_per_node)
        return (peak <= self.room) & (num * host <= SHARE * machine.host_bytes)

    # -- seconds ----------------------------------------------------------------------------------------

    def compute(self, choice: Choice) -> tuple[Any, Any]:
        """Return the seconds of forward and backward of all rows, with the exchanges of tensor ranks."""
        own, cluster = self.profile(choice.tp, choice.samples), self.cluster
        tensor = cluster.exchange(own.sent, own.calls, span=choice.tp, adds=True) if choice.tp > 1 else 0.0
        return own.forward + tensor, own.backward + tensor

    def _costs(self, choice: Choice, accumulates: bool) -> Any:
        """Return the costs of the plans of all rows, [fields of Costs, rows]; alike ones are counted once."""
        (setting, units), rows = self._units(_of_units(choice)), self.rows(choice.tp, choice.pp > 1)
        last, found = int(rows.is_unit.sum()), dict[int, Any]()
        for row in set(rows.alike):
            is_root, unit = not rows.is_unit[row], units[row]
            is_kept = unit.is_kept(setting.placements, is_root=is_root, ends_forward=row == last)
            own = [self._cost(choice, one, setting, is_kept, accumulates) for one in unit.buffers]
            found[row] = np.sum([_NOTHING, *own], 0)
        return np.array([found[row] for row in rows.alike]).T

    def _cost(
        self, choice: Choice, buffer: BufferPlan, setting: Setting, is_kept: bool, accumulates: bool
    ) -> Costs:
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
        unpadded = sum(buffer.layout.sizes) * buffer.trainable / (sizes[DP_SHARD] if buffer.is_partial else 1)

        def exchange(path: Sequence[Exchange], *items: int, adds: bool = False) -> float:
            sent = bytes_sent(path, total, sizes, *items)
            return float(self.cluster.exchange(sent, len(path), span=span, adds=adds))

        def held(tier: Tier) -> float:
            gradients = gradient_bytes(buffer, setting, 1 + accumulates, tier)
            return parameter_bytes(buffer, tier) + gradients + width * unpadded * (buffer.state_tier is tier)

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
            held=held(Tier.DEVICE),
            far=held(Tier.HOST),
            unsharded=total * item * is_gathered,
        )

    def times(self, choice: Choice) -> Costs:
        """Return the costs of all rows as lists."""
        forward, backward = self.compute(choice)
        shared = replace(_of_units(choice), bits=choice.bits)
        own = Costs(*self._plans(shared, self.num_microbatches(choice) > 1))
        left = self.room - self.states(choice)[0].peak if choice.recompute == "auto" else 0
        again = self._share(choice, left) * self.rows(choice.tp, choice.pp > 1).is_unit * forward
        own = own._replace(forward=forward, backward=own.backward + backward + again)
        return Costs(*(column.tolist() for column in own))

    def _share(self, choice: Choice, left: Any) -> Any:
        """Return the share of the units that recompute, where so many bytes are left to activations."""
        if choice.recompute != "auto":
            return float(choice.recompute == "unit")
        kept, least = (self.usage(choice.tp, how, choice.samples) for how in ("none", "unit"))
        return np.clip((kept - left) / max(1, kept - least), 0, 1)

    def __call__(self, choice: Choice) -> Prediction:
        """Predict a step. Raises ValueError if the configuration does not exist."""
        return self.step(choice)._replace(estimate=self.bytes(choice))

    def step(self, choice: Choice) -> Prediction:
        """Predict the seconds of a step alone. Raises ValueError if its schedule does not exist."""
        return self._pipelined(choice) if choice.pp > 1 else self._alone(choice)

    def _alone(self, choice: Choice) -> Prediction:
        own, num, line = self.times(choice), self.num_microbatches(choice), Line(self.on_cpu)
        (order,), each, reduced = self.cut(1)[0], self._reduces_each(choice), 0.0
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

    def _reduces_each(self, choice: Choice) -> bool:
        """True if each micro-batch reduces its gradients."""
        setting, _ = self._units(_of_units(choice))
        return setting.placements.gradient != SUMMANDS

    def _pipelined(self, choice: Choice) -> Prediction:
        own, schedule, num = self.times(choice), self._schedule(choice), self.num_microbatches(choice)
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
        found, bubble = _simulated(choice.schedule, choice.pp, num, choice.chunks, tuple(costs))
        seconds = max(own[-1].end + tail for own, tail in zip(found.spans, tails, strict=True))
        most = max(busy, key=lambda one: max(one.values()))
        return Prediction(choice, seconds, most, partial(_intervals, found, tails), bubble)

    def _transfer(self, choice: Choice) -> float:
        """Return the seconds from the end of an action to its arrival at another pipeline rank."""
        given, run = self.profile(choice.tp, choice.samples).given, self.cut(choice.pp * choice.chunks)[0][0]
        return float(self.cluster.exchange(max(given[run]), 1, span=self.cluster.num_ranks // choice.pp + 1))

    # -- bounds -----------------------------------------------------------------------------------------

    def bounds(self, place: Choice, offers: tuple[tuple[tuple[str, str], int], ...]) -> tuple[Any, Any]:
        """Return seconds and bytes that the variants of a place take at least; see [Note: Bounds].

        Args:
            place: a configuration, without tiers and recomputation.
            offers: pairs of tiers and bits, the nearest tiers first.

        Returns:
            Seconds and bytes, [recomputes, offers]; seconds are inf for variants that do not fit, and both
            are nan for those that do not exist.
        """
        num, pp = self.num_microbatches(place), place.pp
        shared, within = _of_units(place), self.within(pp, place.chunks, place.schedule == "zbv", place.tp)
        plans, runs = self._offered(shared, num > 1, offers), self.cut(pp * place.chunks)[0]
        own = Costs(*np.swapaxes(plans @ within.T, 0, 1))
        held = 0.99 * (own.held + (plans[:, -1, None] * within).max(-1))  # states have no padding
        forward, backward = self.compute(place)
        others = [(forward[run].sum(), backward[run].sum()) for run in runs[: pp - 1]]
        ahead, left = np.cumsum([(0, 0), *others], 0).T
        if pp > 1:
            ahead, left = (ahead, left) + self._transfer(place) * np.arange(pp)
        each, once = own.gather + own.regather, own.first - own.gather
        each, once = (each + own.reduce, once) if self._reduces_each(place) else (each, once + own.reduce)
        tail = own.step + once * self.on_cpu
        end = np.maximum(tail, left + tail[:, :1]) if place.schedule in _WHOLE else tail
        seconds, peaks = np.full((2, len(RECOMPUTES), len(offers)), np.nan)
        once_through = within @ (forward + backward) + own.backward
        repeated = within @ (forward * self.rows(place.tp, pp > 1).is_unit)
        for at, how in enumerate(RECOMPUTES[: 3 if pp == 1 else 2]):
            choice = replace(place, stage=0, recompute=how)
            peak = held + self._least(choice)
            busy = once_through + self._share(choice, self.room - held) * repeated
            busy = busy + each if self.on_cpu else np.maximum(busy, np.maximum(each, own.link))
            total = ahead + num * busy + end
            if pp == 1:
                total = np.maximum(total, np.maximum(num * each + once, num * own.link + own.states))
            peaks[at, : len(plans)] = most = peak.max(-1)
            fits = self.fits(most, 0.99 * own.far.min(-1))
            seconds[at, : len(plans)] = np.where(fits, (1 - 1e-9) * total.max(-1), np.inf)
        return seconds, peaks

    def _of_offers(
        self, choice: Choice, accumulates: bool, offers: Sequence[tuple[tuple[str, str], int]]
    ) -> Any:
        """Return the costs of the plans of all offers that exist, [offers, fields of Costs, rows]."""
        existing = [one for one in offers if choice.stage == 3 or one[0] in TIERS[:2]]
        plans = (replace(choice, tiers=tiers, bits=bits) for tiers, bits in existing)
        return np.array([self._plans(one, accumulates) for one in plans])

    def _within(self, pp: int, chunks: int, is_v: bool, tp: int) -> Any:
        """Return 1 for the rows of each pipeline rank, [pipeline ranks, rows]."""
        is_unit = self.rows(tp, pp > 1).is_unit
        place = Choice(pp=pp, chunks=chunks, schedule="zbv" if is_v else "1f1b")
        found = np.zeros((pp, len(is_unit)))
        for rank, own in zip(found, self.rows_of_ranks(place), strict=True):
            rank[own] = 1
        if is_v:  # the first rank has parts of the root at both ends, perhaps with the same parameters
            found[0, ~is_unit] = 0
        return found

    def _least_held(self, place: Choice) -> Any:
        """Return bytes of activations that each pipeline rank holds at least."""
        if place.pp == 1:
            return self.usage(place.tp, "none" if place.recompute == "none" else "unit", place.samples)
        (kept, _), num, pp = self._kept(place), self.num_microbatches(place), place.pp
        held = np.zeros(pp)
        chunks = zip(placement(place), self.cut(pp * place.chunks)[0], strict=True)
        for chunk, (rank, run) in enumerate(chunks):
            first = pp if chunk < pp * (place.chunks - 1) else 0  # the last chunk of a rank comes after these
            together = {"gpipe": num, "zbv": 2 * (pp - chunk) - 1, "interleaved": first}
            held[rank] += max(0, min(num, together.get(place.schedule, pp - rank))) * kept[run].sum()
        return held


_WHOLE = ("1f1b", "gpipe", "interleaved")
"""Schedules with whole backwards: that of the last micro-batch comes back through all ranks before."""
_NOTHING = (0.0,) * len(Costs._fields)


def _of_units(choice: Choice) -> Choice:
    """Return what the plans of units depend on."""
    return Choice(stage=choice.stage, tp=choice.tp, pp=choice.pp, tiers=choice.tiers)


def _kind_of(spec: UnitSpec) -> tuple[object, ...]:
    """Return what is the same for units with the same plan."""
    own = (
        (
            *(one.whole_shape, one.cut is None, tuple(one.summands), one.placements is None),
            *(one.compute_dtype, one.parameter.dtype, one.parameter.requires_grad, type(one.parameter)),
            *(type(owner) for owner, _ in one.owners),
        )
        for one in spec.originals
    )
    return type(spec.module), *own


def placement(choice: Choice) -> Sequence[int]:
    """Return the pipeline rank of each chunk."""
    down = range(choice.pp)
    return (*down, *reversed(down)) if choice.schedule == "zbv" else loop(choice.pp, choice.chunks)


_built = functools.lru_cache(maxsize=256)(build_schedule)


@functools.lru_cache(maxsize=256)
def _simulated(
    name: str, pp: int, num: int, chunks: int, costs: tuple[ActionCosts, ...]
) -> tuple[ScheduleTimes, float]:
    found = simulate(_built(name, pp, num, chunks), costs)
    return found, found.bubble_share


def _intervals(found: ScheduleTimes, tails: Sequence[float]) -> Iterator[Interval]:
    for rank, (actions, tail) in enumerate(zip(found.spans, tails, strict=True)):
        row, end = f"rank {rank}", actions[-1].end
        yield from (Interval(row, str(one.action), one.start, one.end) for one in actions)
        if tail:
            yield Interval(row, "step", end, end + tail)
