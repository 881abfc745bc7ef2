"""The search: all configurations of a model on a cluster, those that fit, the fastest first, and the reasons.

Each configuration has a bound: the time of its busiest resource without any wait, which is no more than the
time that is predicted. Bounds of all configurations are sums over units, computed at once. Predictions are
made in the order of bounds, until no bound is below the last of the best. So the best of all are found, and
few are predicted one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from zeroshard.config.sections import Config
from zeroshard.memory.estimate import Estimate
from zeroshard.planning.predict import (
    BITS,
    COMPUTE,
    LINK,
    NETWORK,
    TIERS,
    Choice,
    Prediction,
    Predictor,
    placement,
)
from zeroshard.tables import format_bytes, render

RECOMPUTES = ("none", "auto", "unit")
SAMPLES = (1, 2, 4, 8, 16, 32)
SCHEDULES = (("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4))
"""Schedules of pipelines with their chunks, in the order in which equally fast ones are taken."""
_POWERS = tuple(1 << power for power in range(7))
_MOST_MICROBATCHES = 64
"""Of a pipeline: with more, bubbles are no longer what is lost."""


class SearchResult(NamedTuple):
    """The best configurations."""

    best: tuple[Prediction, ...]
    """The fastest first."""
    num: int
    """Configurations that exist, whether they fit or not."""


def families(predictor: Predictor, most_tp: int = 8, most_pp: int = 64) -> Iterator[Choice]:
    """Yield configurations that stand for others with other tiers, recomputation, micro-batches and bits."""
    cluster = predictor.cluster
    for tp, pp in product(_POWERS, _POWERS):
        if cluster.num_ranks % (tp * pp) or tp > min(most_tp, cluster.ranks_per_node) or pp > most_pp:
            continue
        for schedule, chunks in SCHEDULES if pp > 1 else SCHEDULES[:1]:
            try:
                predictor.profiles(tp)
                predictor.cut(pp * chunks)
            except (ValueError, KeyError):  # layers or blocks that cannot be divided so
                continue
            for stage in range(4):
                yield Choice(stage=stage, tp=tp, pp=pp, schedule=schedule, chunks=chunks)


def _bounds(predictor: Predictor, family: Choice, samples: Sequence[int], bits: Sequence[int]) -> Any:
    """Return the bounds of a family, [tiers, recomputes, samples, bits]; infinite where there is none."""
    machine, pp, (runs, _) = predictor.cluster.machine, family.pp, predictor.cut(family.pp * family.chunks)
    each = [replace(family, samples=num) for num in samples]
    own, plan = predictor.times(each[0]), predictor.plan(each[0])
    within = np.zeros((pp, len(own.forward)))  # the units of each pipeline rank
    for rank, run in zip(placement(family), runs, strict=True):
        within[rank, run] = 1
    forward, backward = np.moveaxis(np.array([predictor.compute(one) for one in each]) @ within.T, 1, 0)
    gather, regather, reduce, step = (
        within @ one for one in (own.gather, own.regather, own.reduce, own.step)
    )
    num = np.array([predictor.num_microbatches(one) for one in each])[:, None]
    is_sharded, sums_each = bool(plan.setting.placements.parameter), family.stage > 1 and pp == 1
    network = num * regather + (num if is_sharded else 1) * gather + (num if sums_each else 1) * reduce
    again = np.array([0, 0, 1])[:, None, None]
    compute = num * (forward * (1 + again) + backward)
    if family.schedule in ("1f1b", "gpipe", "interleaved"):  # other ranks begin earlier and end later
        fill = np.cumsum((forward + backward) / family.chunks, 1)[:, :-1]
        compute = compute + np.concatenate([np.zeros((len(samples), 1)), fill], 1)
    both = compute + network + step if predictor.on_cpu else np.maximum(compute, network)
    rates = [rate for rate in (machine.to_host, machine.from_host) if rate]
    found = np.full((len(TIERS), len(RECOMPUTES), len(samples), len(bits)), np.inf)
    for at, (optimizer, parameters) in enumerate(TIERS):
        is_there = at == 0 or (rates and (machine.disk_read or "nvme" not in TIERS[at]))
        if is_there and (parameters == "none" or is_sharded):
            link = (
                np.array(bits) / 4 * sum(plan.sent[-3]) / pp / min(rates)
                if optimizer != "none"
                else np.zeros(len(bits))
            )
            found[at] = np.maximum(both.max(-1)[:, :, None], link)
    if pp > 1:  # a budget of memory is for whole models
        found[:, 1] = np.inf
    return found


def search(
    predictor: Predictor, *, bits: Sequence[int] = BITS, num_best: int = 5, most: tuple[int, int] = (8, 64)
) -> SearchResult:
    """Return the fastest configurations that fit.

    Args:
        predictor: the model, the cluster and the samples of a step.
        bits: the bits of optimizer states to choose from.
        num_best: the number of configurations to return.
        most: tensor ranks and pipeline ranks, at most.

    Raises:
        ValueError: no configuration exists for these samples, or none fits; the text says what needs less.
    """
    entries: list[tuple[Choice, list[int], Any]] = []
    for family in families(predictor, *most):
        each = {num: predictor.num_microbatches(replace(family, samples=num)) for num in SAMPLES}
        data = predictor.cluster.num_ranks // (family.tp * family.pp)
        samples = [
            num
            for num, steps in each.items()
            if steps * num * data == predictor.samples and (family.pp == 1 or steps <= _MOST_MICROBATCHES)
        ]
        if samples:
            entries.append((family, samples, _bounds(predictor, family, samples, bits)))
    flat = np.concatenate([[np.inf], *(bounds.ravel() for _, _, bounds in entries)])
    starts = 1 + np.cumsum([0, *(bounds.size for _, _, bounds in entries)])
    found: dict[Choice, Prediction] = {}  # the fastest by family and micro-batch
    least: Estimate | None = None
    for at in np.argsort(flat, kind="stable")[: np.isfinite(flat).sum()]:
        best = sorted(found.values(), key=lambda one: one.seconds)[:num_best]
        if len(best) == num_best and flat[at] >= best[-1].seconds:
            break
        place = int(np.searchsorted(starts, at, side="right")) - 1
        family, samples, bounds = entries[place]
        tier, how, number, bit = np.unravel_index(at - starts[place], bounds.shape)
        key = replace(family, samples=samples[number])
        if key in found and flat[at] >= found[key].seconds:
            continue
        choice = replace(key, tiers=TIERS[tier], recompute=RECOMPUTES[how], bits=bits[bit])
        one = _fitting(predictor, choice)
        if isinstance(one, Prediction) and (key not in found or one.seconds < found[key].seconds):
            found[key] = one
        elif isinstance(one, Estimate) and (least is None or one.peak < least.peak):
            least = one
    if not found:
        needs = "none exists: take more tokens, or a power of 2 times the ranks in samples"
        if least is not None:
            needs = f"the least found is {format_bytes(least.peak)}: take more ranks, or shorter samples"
        raise ValueError(
            f"{predictor.samples} samples, {predictor.cluster.num_ranks} ranks, {predictor.cluster.name}: no "
            f"configuration fits into {format_bytes(predictor.room)} of a device; {needs}"
        )
    best = sorted(found.values(), key=lambda one: one.seconds)[:num_best]
    return SearchResult(tuple(best), int(np.isfinite(flat).sum()))


def _fitting(predictor: Predictor, choice: Choice) -> Prediction | Estimate | None:
    """Return the prediction if the configuration exists and fits; its bytes if it does not; else None."""
    try:
        Config.parse(predictor.config(choice))
        found = max(predictor.states(choice), key=lambda one: one.peak)
        if predictor.fits(found):
            found = predictor.bytes(choice)
        return predictor(choice) if predictor.fits(found) else found
    except ValueError:  # a schedule or a config that does not exist with these numbers
        return None


# ------------------------------------------------------------------------------------------ explanations

_MORE = {
    "twice the memory": ("machine", "device_bytes"),
    "twice the network": ("network", "between"),
    "twice the link to the host": ("machine", "to_host", "from_host"),
}


def explain(predictor: Predictor, found: SearchResult, **options: Any) -> list[str]:
    """Return sentences: the bound of the best, the loss of the next best, and what would change it."""
    first, *others = found.best
    share = first.busy[first.bound] / first.seconds
    lines = [f"Bound by {first.bound}: {share:.0%} of a step of {first.seconds:.4g} s."]
    if first.bubble:
        lines.append(f"Pipeline ranks wait for {first.bubble:.0%} of the time.")
    for other in others[:1]:
        more = {row: other.busy.get(row, 0.0) - first.busy.get(row, 0.0) for row in (COMPUTE, NETWORK, LINK)}
        row = max(more, key=lambda name: more[name])
        why = f"{more[row]:.2g} s more of {row}" if more[row] > 0 else "more waits"
        lines.append(f"The next best takes {other.seconds / first.seconds - 1:.1%} longer: {why}.")
    for what, names in _MORE.items():
        changed = copy.copy(predictor)
        changed.cluster = _doubled(predictor.cluster, names)
        then = search(changed, num_best=1, **options).best[0]
        if then.seconds < 0.98 * first.seconds:
            lines.append(f"With {what}: {1 - then.seconds / first.seconds:.0%} less, {then.choice}.")
    return lines


def _doubled(cluster: Any, names: Sequence[str]) -> Any:
    if names[0] == "machine":
        return replace(cluster, machine=_doubled(cluster.machine, names[1:]))
    return replace(cluster, **{name: 2 * (getattr(cluster, name) or 0) or None for name in names})


def table(predictor: Predictor, found: SearchResult) -> str:
    """Return the best configurations as a table."""
    cluster = predictor.cluster
    how = "measured rates" if cluster.is_measured else "predicted, not measured"
    rows = [
        (
            str(one.choice),
            f"{one.seconds:.4g} s",
            f"{predictor.samples / one.seconds:,.1f}",
            *map(format_bytes, (one.estimate.peak, one.estimate.host)),
        )
        for one in found.best
    ]
    title = f"{cluster.num_ranks} ranks of {cluster.name}, {how}: best of {found.num:,} configurations"
    return render(title, ("configuration", "step", "samples/s", "device", "host"), rows)


def draw(prediction: Prediction, width: int = 72) -> str:
    """Return the time line of a step as text, with a row for each resource or pipeline rank.

    F forward, B backward (I, W its halves), G gather, R reduction, L parameters from the host, S states to
    the device and back, s step. Of micro-batches every second one is in small letters.
    """
    rows: dict[str, list[str]] = {}
    for row, label, start, end in prediction.spans:
        cells = rows.setdefault(row, [" "] * width)
        kind = label.lstrip("0123456789")  # an action such as 0F3 begins with its chunk
        letter = kind[0].lower() if kind[-1] in "13579" else kind[0]
        first, last = (int(width * time / prediction.seconds) for time in (start, end))
        for cell in range(min(first, width - 1), min(max(last, first + 1), width)):
            cells[cell] = letter
    return "\n".join(f"{row:<8} |{''.join(cells)}|" for row, cells in rows.items())
