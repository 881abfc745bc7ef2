"""The search: all configurations of a model on a cluster, those that fit, the fastest first, and the reasons.

Each configuration has a bound: the time of its busiest resource without any wait, which is no more than the
time that is predicted. Bounds of all configurations are sums over units, computed at once. Predictions are
made in the order of bounds, until no bound is below the last of the best. So the best of all are found, and
few are predicted one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from zeroshard.config.sections import Config
from zeroshard.memory.estimate import Estimate
from zeroshard.planning.predict import BITS, COMPUTE, LINK, NETWORK, TIERS, Choice, Prediction, Predictor
from zeroshard.tables import format_bytes, render

RECOMPUTES = ("none", "auto", "unit")
SAMPLES = (1, 2, 4, 8, 16, 32)
SCHEDULES = (("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4))
"""Schedules of pipelines with their chunks, in the order in which equally fast ones are taken."""
_POWERS = tuple(1 << power for power in range(7))
_MOST_MICROBATCHES = 64
"""Of a pipeline: with more, bubbles are no longer what is gained."""
_HOLDS_ALL = frozenset(("gpipe", "1f1b", "interleaved"))
"""Schedules whose backwards are whole, so that other ranks still run some after the last one of a rank."""


class _Family(NamedTuple):
    """Configurations that differ in tiers, recomputation, micro-batch and bits."""

    stage: int
    tp: int
    pp: int
    schedule: str
    chunks: int


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best configurations."""

    best: tuple[Prediction, ...]
    """The fastest first."""
    num: int
    """Configurations that exist."""
    num_fitting: int
    """Those that were looked at and fit."""
    least: Estimate | None
    """The least that a configuration takes that was looked at; None if none was."""


def families(predictor: Predictor) -> Iterator[_Family]:
    """Yield all families that the ranks and the model allow."""
    cluster = predictor.cluster
    for tp, pp in product(_POWERS, _POWERS):
        if (
            cluster.num_ranks % (tp * pp)
            or tp > min(8, cluster.ranks_per_node)
            or not _divides(predictor, tp)
        ):
            continue
        for (schedule, chunks), stage in product(SCHEDULES if pp > 1 else [("1f1b", 1)], range(4)):
            try:
                predictor.runs(pp, chunks)
            except ValueError:  # too few blocks, or a model that cannot be cut
                continue
            yield _Family(stage, tp, pp, schedule, chunks)


def _divides(predictor: Predictor, tp: int) -> bool:
    try:
        predictor.profiles(tp)
    except (ValueError, KeyError):  # layers that cannot be divided so
        return False
    return bool(predictor.specs(tp))


def _tiers_of(predictor: Predictor) -> tuple[tuple[str, str], ...]:
    """The tiers that the machine has."""
    if predictor.on_cpu:
        return TIERS[:1]
    return TIERS if predictor.cluster.machine.disk_read else TIERS[:3]


def _bounds(predictor: Predictor, family: _Family, samples: Sequence[int], bits: Sequence[int]) -> Any:
    """Return the bounds of a family, [tiers, recomputes, samples, bits]; infinite where there is none."""
    stage, tp, pp, schedule, chunks = family
    choice = Choice(stage=stage, tp=tp, pp=pp, schedule=schedule, chunks=chunks)
    machine = predictor.cluster.machine
    nums = np.array([predictor.num_microbatches(replace(choice, samples=num)) for num in samples])
    # The exchanges and the step do not depend on the micro-batch, but for the gradients that are added up.
    units = predictor.times(replace(choice, samples=samples[0]))
    profiles = [predictor._profile(tp, num) for num in samples]
    tensor = [
        predictor.cluster.exchange(sum(u.sent for u in own), sum(u.calls for u in own), tp, adds=True)
        if tp > 1
        else 0.0
        for own in profiles
    ]
    runs = predictor.runs(pp, chunks)
    within = np.zeros((pp, len(units)))
    for number, run in enumerate(runs):
        placement = number % pp if schedule != "zbv" or number < pp else 2 * pp - 1 - number
        within[placement, run] = 1

    def of_ranks(values: Sequence[float]) -> Any:
        return within @ np.array(values, dtype=float)

    forward = (
        np.array([of_ranks([u.forward for u in own]) for own in profiles]) + np.array(tensor)[:, None] / pp
    )
    backward = (
        np.array([of_ranks([u.backward for u in own]) for own in profiles]) + np.array(tensor)[:, None] / pp
    )
    sums = {
        name: of_ranks([getattr(u, name) for u in units]) for name in ("gather", "regather", "reduce", "step")
    }
    is_freed = of_ranks([0.0 if u.resident else u.gather for u in units])
    reduces = predictor.plan(choice).setting.placements.gradient and stage >= 2 and pp == 1
    num = nums[:, None]
    network = np.where(is_freed > 0, num * (is_freed + sums["regather"]), sums["gather"])
    network = network + sums["reduce"] * (num if reduces else 1)
    recomputed = np.array([0.0, 0.0, 1.0])[:, None, None]
    compute = num * (forward * (1 + recomputed) + backward) + sums["step"] * 0.5
    fill = np.concatenate([np.zeros((len(samples), 1)), np.cumsum(forward / chunks, 1)[:, :-1]], 1)
    if schedule in _HOLDS_ALL:
        fill = fill + np.concatenate(
            [np.zeros((len(samples), 1)), np.cumsum(backward / chunks, 1)[:, :-1]], 1
        )
    compute = compute + fill
    owned = (
        sum(b.main_size for unit in predictor.plan(choice).units for b in unit.buffers if b.trainable) / pp
    )
    rates = [rate for rate in (machine.to_host, machine.from_host) if rate]
    found = np.full((len(TIERS), len(RECOMPUTES), len(samples), len(bits)), np.inf)
    for at, (optimizer, parameters) in enumerate(_tiers_of(predictor)):
        if parameters != "none" and stage < 3:
            continue
        link = np.zeros((1, 1, len(bits)))
        if optimizer != "none" and rates:
            link = link + np.array(bits)[None, None, :] / 4 * owned / min(rates)
        both = compute + network if predictor.on_cpu else np.maximum(compute, network)
        found[at] = np.maximum(both.max(-1)[:, :, None], link)
    if pp > 1:  # a budget of memory is for whole models
        found[:, 1] = np.inf
    return found


def search(
    predictor: Predictor, *, bits: Sequence[int] = BITS, num_best: int = 5, only: Any = None
) -> SearchResult:
    """Return the fastest configurations that fit.

    Args:
        predictor: the model, the cluster and the samples of a step.
        bits: the bits of optimizer states to choose from.
        num_best: the number of configurations to return.
        only: (family) -> True for those to look at; None for all.

    Raises:
        ValueError: no configuration exists for these samples, or none fits; the text says what needs least.
    """
    entries: list[tuple[_Family, list[int]]] = []
    bounds, counts = [], []
    for family in families(predictor):
        data = predictor.cluster.num_ranks // (family.tp * family.pp)
        most = _MOST_MICROBATCHES if family.pp > 1 else predictor.samples
        samples = [
            num
            for num in SAMPLES
            if predictor.samples % (data * num) == 0 and 1 <= predictor.samples // (data * num) <= most
        ]
        if samples and (only is None or only(family)):
            entries.append((family, samples))
            bounds.append(_bounds(predictor, family, samples, bits))
            counts.append(bounds[-1].size)
    if not bounds:
        raise ValueError(
            f"expected samples of a step that {predictor.cluster.num_ranks} ranks can divide, got "
            f"{predictor.samples}: take more tokens, or a power of 2 of them"
        )
    flat = np.concatenate([one.ravel() for one in bounds])
    starts = np.cumsum([0, *counts])
    best: list[Prediction] = []
    fastest: dict[tuple[Any, ...], float] = {}
    num_fitting, least = 0, None
    for at in np.argsort(flat, kind="stable"):
        if flat[at] == np.inf or (len(best) >= num_best and flat[at] >= best[num_best - 1].seconds):
            break
        place = int(np.searchsorted(starts, at, side="right")) - 1
        family, samples = entries[place]
        tier, how, number, bit = np.unravel_index(at - starts[place], bounds[place].shape)
        key = (*family, samples[number])
        if flat[at] >= fastest.get(key, np.inf):
            continue
        choice = Choice(
            **family._asdict(),
            tiers=TIERS[tier],
            recompute=RECOMPUTES[how],
            samples=samples[number],
            bits=bits[bit],
        )
        found = _fitting(predictor, choice)
        if not isinstance(found, Prediction):
            least = min((one for one in (least, found) if one), key=lambda one: one.peak, default=None)
            continue
        num_fitting += 1
        if found.seconds < fastest.get(key, np.inf):
            fastest[key] = found.seconds
            same = [one for one in best if (*_family_of(one.choice), one.choice.samples) != key]
            best = sorted([*same, found], key=lambda one: one.seconds)
    if not best:
        needs = (
            "none exists" if least is None else f"the least that was tried takes {format_bytes(least.peak)}"
        )
        raise ValueError(
            f"no configuration fits into {format_bytes(predictor.room)} of a device of cluster "
            f"{predictor.cluster.name!r}; {needs}: take more ranks, or shorter samples"
        )
    num = int(np.isfinite(flat).sum())
    return SearchResult(best=tuple(best[:num_best]), num=num, num_fitting=num_fitting, least=least)


def _family_of(choice: Choice) -> _Family:
    return _Family(choice.stage, choice.tp, choice.pp, choice.schedule, choice.chunks)


def _fitting(predictor: Predictor, choice: Choice) -> Prediction | Estimate | None:
    """Return the prediction if the configuration exists and fits; its bytes if it does not; else None."""
    try:
        Config.parse(predictor.config(choice))
        states = max(predictor.states(choice), key=lambda one: one.peak)
        if not predictor.fits(states):
            return states
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
        if row in (COMPUTE, NETWORK, LINK):
            letter = label[0]
        else:
            chunk_free = label.lstrip("0123456789")
            number = chunk_free[1:]
            letter = chunk_free[0].lower() if number.isdigit() and int(number) % 2 else chunk_free[0]
        first, last = (int(width * time / prediction.seconds) for time in (start, end))
        for cell in range(min(first, width - 1), min(max(last, first + 1), width)):
            cells[cell] = letter
    return "\n".join(f"{row:<8} |{''.join(cells)}|" for row, cells in rows.items())
