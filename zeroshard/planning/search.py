"""The search: all configurations of a model on a cluster, those that fit, the fastest first, and the reasons.

A place is a stage, a division over tensor and pipeline ranks, and a micro-batch; its variants have other
tiers, recomputation and bits. Places come in the order of the seconds that they take at least, see [Note:
Bounds], until these are more than the last of the best takes. Variants that fit are predicted, but for
farther tiers and more bits of what fits on nearer ones.

For `config="auto"` the ranks that are there are the cluster, measured together with the model.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import product
from operator import attrgetter
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zeroshard.assemble import open_data_parallel
from zeroshard.comm.collectives import Axis, on_first
from zeroshard.comm.streams import Stopwatch
from zeroshard.config.sections import Config
from zeroshard.forwards.dryrun import LossOf
from zeroshard.internals import pytree
from zeroshard.memory.activations import OneOfMany
from zeroshard.parallel.pipeline.profile import (
    SampleBatch,
    SampleSource,
    same_random_numbers,
    sample_of,
    sum_of,
)
from zeroshard.parallel.tensor.sequence import Activations
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.planning.machine import Cluster, measure_machine
from zeroshard.planning.predict import Predictor
from zeroshard.planning.profile import Subject, UnitProfiles, count_units, time_units
from zeroshard.planning.timeline import COMPUTE, LINK, NETWORK, TIERS, Choice, Prediction, recomputes
from zeroshard.sharded import shard
from zeroshard.sharding.runtime import DRAIN_S
from zeroshard.tables import format_bytes, render

SAMPLES = (1, 2, 4, 8, 16, 32)
SCHEDULES = (("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4))
"""Schedules of pipelines with their chunks, in the order in which equally fast ones are taken."""
_POWERS = tuple(1 << power for power in range(7))
_MOST_MICROBATCHES = 64
"""Of a pipeline: with more, bubbles are no longer what is lost."""
_WIDEST = 29
"""Characters of a configuration in a table: the other columns take the rest of a line of 79."""


class SearchResult(NamedTuple):
    """The best configurations."""

    best: tuple[Prediction, ...]
    """The fastest first."""
    num: int
    """Configurations of all places, whether they fit or not."""


def divisions(predictor: Predictor, most: tuple[int, int] = (8, 64)) -> Iterator[Choice]:
    """Yield the divisions over tensor and pipeline ranks, at most so many, with samples of micro-batches."""
    cluster = predictor.cluster
    predictor.profiles(1)  # what is wrong with the model or the cluster is an error
    for tp, pp in product(_POWERS, _POWERS):
        if cluster.num_ranks % (tp * pp) or tp > min(most[0], cluster.ranks_per_node) or pp > most[1]:
            continue
        of_rank, rest = divmod(predictor.samples * tp * pp, cluster.num_ranks)
        limit = _MOST_MICROBATCHES if pp > 1 else of_rank
        samples = [one for one in SAMPLES if not (rest or of_rank % one) and 1 <= of_rank // one <= limit]
        for schedule, chunks in (SCHEDULES if pp > 1 else SCHEDULES[:1]) if samples else ():
            with suppress(ValueError, KeyError):  # layers or blocks that cannot be divided so
                predictor.profiles(tp)
                predictor.cut(pp * chunks)
                for num in samples:
                    yield Choice(tp=tp, pp=pp, schedule=schedule, chunks=chunks, samples=num)


def search(
    predictor: Predictor,
    *,
    bits: Sequence[int] = (32,),
    num_best: int = 5,
    most: tuple[int, int] = (8, 64),
    limit: float = np.inf,
) -> SearchResult:
    """Return the fastest configurations that fit, one of each place.

    Args:
        predictor: the model, the cluster and the samples of a step.
        bits: the bits of optimizer states to choose from. They change the numbers of a training.
        num_best: the number of configurations to return.
        most: tensor ranks and pipeline ranks, at most.
        limit: seconds; slower configurations are of no use.

    Raises:
        ValueError: no configuration exists for these samples, or none fits; the text says what needs less.
    """
    machine, peaks = predictor.cluster.machine, list[int]()
    tiers = TIERS if machine.disk_read else TIERS[:3] if machine.to_host else TIERS[:1]
    offers = [[*product(far, sorted(bits))] for far in (*[tiers[:2]] * 3, tiers)]  # by stages
    bounds, best = dict[Choice, float](), dict[Choice, Prediction]()
    for division in divisions(predictor, most):
        least = predictor.least(replace(division, bits=min(bits)))
        for how, stage in product(recomputes(division), range(4)):
            bounds[replace(division, recompute=how, stage=stage)] = least[int(how == "unit"), stage]
    for nearest in sorted(bounds, key=bounds.__getitem__):
        if bounds[nearest] >= limit:
            break
        place = replace(nearest, recompute="none")
        for found in _fitting(predictor, nearest, offers[nearest.stage], limit, peaks):
            best[place] = min(best.get(place, found), found, key=attrgetter("seconds"))
        limit = min([limit, *sorted(one.seconds for one in best.values())[num_best - 1 : num_best]])
    if not best:
        needs = "none exists: take more tokens, or a power of 2 times the ranks in samples"
        if peaks:
            needs = f"the least is {format_bytes(min(peaks))}: take more ranks, or shorter samples"
        where = f"{predictor.samples} samples, {predictor.cluster.num_ranks} ranks, {predictor.cluster.name}"
        room, states = format_bytes(predictor.room), " or ".join(map(str, bits))
        fits = f"no configuration fits into {room} of a device, with states of {states} bits"
        raise ValueError(f"{where}: {fits}; {needs}")
    fastest = sorted(best.values(), key=attrgetter("seconds"))[:num_best]
    return SearchResult(tuple(fastest), sum(len(offers[one.stage]) for one in bounds))


Offers = Sequence[tuple[tuple[str, str], int]]
"""Tiers as in `Choice`, and bits."""


def _fitting(
    predictor: Predictor, nearest: Choice, offers: Offers, limit: float, peaks: list[int]
) -> Iterator[Prediction]:
    """Yield the variants that fit, but for farther tiers and more bits of a stage that fits; note peaks."""
    least = predictor.least_held(nearest) if nearest.pp > 1 else None
    for tiers, bits in offers:
        choice = replace(nearest, tiers=tiers, bits=bits)
        with suppress(ValueError):  # a schedule or a config that does not exist with these numbers
            own = predictor.bytes(choice, least)
            if predictor.fits(own):
                found = predictor.step(choice)
                own = predictor.bytes(choice) if found.seconds < limit else own
            peaks.append(own.peak)
            if predictor.fits(own):
                if found.seconds < limit:
                    Config.parse(predictor.config(choice))
                    yield found._replace(estimate=own)
                if predictor.share(choice) in (0, 1):
                    break  # else fewer units recompute where less is on the device


# ------------------------------------------------------------------------------------------ explanations


def explain(predictor: Predictor, found: SearchResult, **options: Any) -> list[str]:
    """Return sentences: the bound of the best, the loss of the next best, and what would change it."""
    first, *others = found.best
    share = first.busy[first.bound] / first.seconds
    lines = [f"Bound by {first.bound}: {share:.0%} of a step of {first.seconds:.4g} s."]
    if first.bubble:
        lines.append(f"Pipeline ranks wait for {first.bubble:.0%} of the time.")
    for other in others[:1]:
        more = {row: other.busy.get(row, 0.0) - first.busy.get(row, 0.0) for row in (COMPUTE, NETWORK, LINK)}
        row = max(more, key=more.__getitem__)
        why = f"{more[row]:.2g} s more of {row}" if more[row] > 0 else "more waits"
        lines.append(f"The next best takes {other.seconds / first.seconds - 1:.1%} longer: {why}.")
    cluster, machine = predictor.cluster, predictor.cluster.machine
    link: Any = {name: 2 * (getattr(machine, name) or 0) for name in ("to_host", "from_host")}
    rates: dict[str, dict[str, Any]] = {
        "twice the memory": {"machine": replace(machine, device_bytes=2 * machine.device_bytes)},
        "twice the network": {"network": 2 * cluster.network, "between": 2 * cluster.between},
        "twice the link to the host": {"machine": replace(machine, **link)},
        "an optimizer with 8-bit states": {},
    }
    for what, changed in rates.items():
        given = options | {"num_best": 1, "limit": 0.98 * first.seconds} | ({} if changed else {"bits": (8,)})
        with suppress(ValueError):  # nothing is so much faster
            then = search(predictor.on(replace(cluster, **changed)), **given).best[0]
            lines.append(f"With {what}: {1 - then.seconds / first.seconds:.0%} less, {then.choice}.")
    return lines


def table(predictor: Predictor, found: SearchResult) -> str:
    """Return the best configurations as a table."""
    cluster = predictor.cluster
    how = "measured rates" if cluster.is_measured else "predicted, not measured"
    rows = []
    for one in found.best:
        own = f"{one.seconds:.4g} s", f"{predictor.samples / one.seconds:,.1f}"
        room = map(format_bytes, (one.estimate.peak, one.estimate.host))
        rows.append((fill(str(one.choice), _WIDEST), *own, *room))
    title = f"{cluster.num_ranks} ranks of {cluster.name}, {how}: best of {found.num:,} configurations"
    return render(title, ("configuration", "step", "samples/s", "device", "host"), rows)


# ------------------------------------------------------------------------------ the ranks that are there

SAMPLES_PER_RANK = 8
"""Samples of a step of `config="auto"`, for each rank."""
_ROUNDS = 3
_MEASURED = (1, 2)
"""Samples of the micro-batches that are timed for `config="auto"`."""


_WIDTHS = (64, 1280)
"""The widths of square layers whose exchanges are measured: next to no bytes, and 6.5 MB."""
_TAG = 1
"""The tag of the exchanges of tensor ranks."""
_DEPTH = 6
"""Layers of a model of such layers."""
_STEPS = 5
"""Forwards and backwards of such a model in a round; the first one does not count."""


class Ranks:
    """All ranks, which time the units of a model and exchange; collective.

    Small sharded models measure exchanges where they happen: in forwards and backwards. An exchange costs
    more there than alone: hooks run, memory is new, and sums are taken. At stage 2 a layer has one reduction,
    at stage 3 a gather in the forward and one in the backward more, but for the last one.

    Args:
        world: all ranks.
        subject: the model.
        samples: the samples of a step, of all ranks together.
        tensor: the numbers of tensor ranks; layers that cannot be divided so are left out.
    """

    def __init__(self, world: Axis, subject: Subject, samples: int, tensor: Sequence[int]) -> None:
        self._world, self._subject, self._samples = world, subject, samples
        machine, ranks = measure_machine(), int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        if machine.device == "cpu":  # whose memory its ranks share
            machine = replace(machine, device_bytes=machine.device_bytes // ranks)
        self._alone = Cluster(
            name="this one", machine=machine, num_ranks=1, ranks_per_node=ranks, is_measured=True
        )
        self._rates: list[tuple[float, float, float]] = []
        self._seconds = defaultdict[tuple[int, int], list[Any]](list)
        self._models: dict[tuple[int, int], nn.Module] = {}
        self._opened = ExitStack()
        for width, stage in product(_WIDTHS, (0, 2, 3) if world.size > 1 else ()):
            layers = (nn.Linear(width, width, bias=False, device=world.device) for _ in range(_DEPTH))
            self._models[width, stage] = model = nn.Sequential(*layers)
            if stage:
                # One unit is gathered ahead, as for units of a real size.
                config = {"stage": stage, "units": ["Linear"], "num_prefetch": 1, "device": world.device.type}
                self._opened.callback(shard(model, config).close, restore=False)
        self._runs = {tp: run for tp in tensor if (run := self._units(tp))}

    def measure(self, samples: Sequence[int]) -> None:
        """Measure once more, with numbers of samples; what is predicted afterwards is a median."""
        if self._models:
            self._rates.append(self._measured_rates())
        for (tp, run), num in product(self._runs.items(), samples):
            # With tensor ranks the others wait in an exchange, so an error ends this one.
            with suppress(*[torch.OutOfMemoryError] * (tp == 1)):
                self._seconds[tp, num].append(run(num))

    def _units(self, tp: int) -> Callable[[int], Any] | None:
        """Return what times the units; None if layers are not divisible, or memory is short; collective."""
        over: Activations = OneOfMany(1)
        if tp > 1:
            axes = open_data_parallel(Config.parse({"mesh": {"tp": tp}}), self._world)
            self._opened.callback(axes.close, DRAIN_S)
            over = Activations(axes.activations, _TAG)
        run = None
        with suppress(ValueError, torch.OutOfMemoryError):
            run = time_units(self._subject, over, self._world.device)
        is_ready = all(self._world.all_gather_object(run is not None, "units that are timed"))
        return run if is_ready else None

    def _measured_rates(self) -> tuple[float, float, float]:
        """Return bytes per second of gathers, the latency, and bytes per second that are added up."""
        world, per_layer = self._world, dict[tuple[int, int], float]()
        for (width, stage), model in self._models.items():
            inputs, watch = torch.ones(1, width, device=world.device), Stopwatch(world.device)
            for _ in range(_STEPS):
                world.all_gather_object(None, "begin of a measured step")
                with watch:
                    model(inputs).sum().backward()
                model.zero_grad()
            per_layer[width, stage] = statistics.median(watch.read()[1:]) / _DEPTH

        def exchanges(width: int) -> tuple[float, float]:
            """Return the seconds of a reduction and of a gather."""
            reduces = per_layer[width, 2] - per_layer[width, 0]
            gathers = (per_layer[width, 3] - per_layer[width, 2]) / (2 - 1 / _DEPTH)
            return max(1e-7, reduces), max(1e-7, gathers)

        small, large = map(exchanges, _WIDTHS)
        latency, sent = sum(small) / 2, 4 * _WIDTHS[1] ** 2 * (world.size - 1) / world.size
        reduce, gather = (sent / max(1e-7, one - latency) for one in large)
        return gather, latency, 1 / (1 / reduce - 1 / gather) if reduce < gather else 0.0

    def close(self) -> None:
        """Give the memory of all that was measured back."""
        self._runs.clear()
        self._opened.close()

    def cluster(self) -> Cluster:
        """Return the medians of all rounds."""
        network, latency, sums = np.median(self._rates or [(0.0, 0.0, 0.0)], 0).tolist()
        rates = {"network": network, "between": network, "latency": latency, "sums": sums}
        return replace(self._alone, num_ranks=self._world.size, **rates)

    def predictor(self) -> Predictor:
        """Return what predicts steps of this model on these ranks."""
        cluster, timed = self.cluster(), defaultdict[int, dict[int, UnitProfiles]](dict)
        for (tp, num), runs in self._seconds.items():
            counted = count_units(self._subject, tp, num, cluster)
            forward, backward = np.median(runs, 0).T
            none = 0 * counted.sent  # the exchanges of tensor ranks are in the seconds
            timed[tp][num] = counted._replace(forward=forward, backward=backward, sent=none, calls=none)
        return Predictor(self._subject, cluster, self._samples, dict(timed) if 1 in timed else None)


def choose_config(
    world: Axis,
    model: nn.Module,
    source: SampleSource,
    *,
    bits: int,
    tp_plan: Plan | None,
    most: tuple[int, int],
) -> Config:
    """Return the config whose step is fastest on the ranks that are there; collective.

    Args:
        world: all ranks.
        model: the model; it does not change.
        source: the samples of the training.
        bits: the bits of the states of its optimizer.
        tp_plan: see `plan_division`.
        most: tensor ranks and pipeline ranks, at most.

    Raises:
        ValueError: there is nothing to measure with; or no configuration fits.
    """

    def read() -> Any:
        has_tokens = hasattr(getattr(model, "config", None), "get_text_config")
        if source.training_data is None and not has_tokens:
            raise ValueError(
                "config='auto': expected training_data, whose samples are measured, or a causal language "
                "model of transformers; `zeroshard plan` and a config need neither"
            )
        return {num: sample_of(model, source, num) for num in _MEASURED}

    # Tensor ranks exchange activations of the same shapes, so all have the samples of one.
    batches = on_first(world, "samples of config='auto'", read)
    subject = Subject(model, lambda num: _loss_of(batches[num], source), tp_plan=tp_plan)
    tensor = [tp for tp in (1, 2, 4, 8) if tp <= most[0] and world.size % tp == 0]
    samples = SAMPLES_PER_RANK * world.size
    with same_random_numbers(world.device), closing(Ranks(world, subject, samples, tensor)) as ranks:
        for _ in range(_ROUNDS):
            ranks.measure(_MEASURED)

    def best() -> dict[str, Any]:
        predictor = ranks.predictor()
        return predictor.config(search(predictor, bits=(bits,), num_best=1, most=most).best[0].choice)

    return Config.parse(on_first(world, "plan of config='auto'", best))


def _loss_of(batch: SampleBatch, source: SampleSource) -> LossOf:
    """Return the loss of some samples: the model's own, or the sum of its outputs."""
    named = dict(batch.named)
    if source.training_data is None:
        named |= {"labels": named["input_ids"], "use_cache": False}

    def loss_of(runs: nn.Module) -> Tensor:
        device = next(runs.parameters()).device
        args, more = pytree.tree_map_only(Tensor, lambda one: one.to(device), (batch.inputs, named))
        output = runs(*args, **more)
        own: Tensor | None = getattr(output, "loss", None)
        return sum_of(output) if own is None else own

    return loss_of
