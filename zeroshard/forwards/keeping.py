"""Activations between forward and backward: the option that each unit takes, within a budget of bytes.

A unit may keep what its backward needs, compute it again, or send it to the host and back. With a budget the
best choice differs from unit to unit: `choose_keeping` finds the choices of the fastest step. A caller needs
no more than hooks around units to carry it out.

    compute      | F1 | F2 | F3 |:::| F4 | B4 |:::| B3    | B2    | B1    |    ::: waits for the link
    to host           | 1  | 1 2| 2 |                                          saved in 1, in 2
    from host                                 | 2 | 2 1   | 1     |

[Note: Mirror] The bytes that leave beside the forward of a unit come back beside its backward. Where compute
waits before a forward until bytes have left, it waits after the backward until they are back. Then the device
holds the same during both, and the bytes that have not left are all that must be known about the link. They
leave in the order of the units and as soon as the link is free, but no more beside a unit than can come back
there. A backward takes longer than a forward, so this bound rarely counts. Bytes that are still on the device
at the turn do not leave any more. Links work in both directions independently.

[Note: Exact up to a grid] A state in front of a unit is (bytes held, bytes that wait to leave, seconds).
States that differ by less than a slot in both numbers of bytes count as one, and the fastest of them goes on
with its own exact numbers: sizes are never rounded, and a plan never exceeds the budget. If sizes, and bytes
that can leave beside a unit, are integers, and there are no more bytes than slots, the plan is the best of
all. A state with less of each number is never worse: what another state gains by waiting for the link, it can
gain at any time.

Offload and recomputation of one chain together: Beaumont, Eyraud-Dubois and Shilova 2021, "Efficient
Combination of Rematerialization and Offloading for Training DNNs" (POFO). Their schedules nest
recomputations; these do not, so a sharded unit is gathered for its backward as ever.

[Note: Chains] Where the caller owns the loop over the units, as a Sequential does, runs of stages may be
computed again from one saved input, and runs in runs: `plan_chain`. Five stages, the last one the loss:

    S0   K1 F2 S3 S4 B4 B3   S1 S2 B2 B1   B0

    F forward, its input is dropped    K forward, its input is kept    S forward, all is saved    B backward

The least seconds of stages s to t, with m bytes besides the input of s, and the gradient of the output of t
among these m from the begin on, are the least of

    split at j    forwards of s to j - 1, cost of j to t with m - (input of j), cost of s to j - 1 with m
    save s        forward of s, cost of s + 1 to t with m - (saved by s), backward of s

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for heterogeneous chains: how
to train deep neural networks with limited memory" (Rotor), theorem 1. Its optimum is among the sequences that
keep what they have saved until its backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

SLOTS = 500
"""Parts of the budget by which states are told apart; Rotor's solvers round sizes to as many."""
WAITING_SLOTS = 100
"""The same of the most bytes that wait in front of a unit, which are those of a few units."""

_COPYING = 1e-4
"""The share of the time of a copy that counts even if nobody waits for it: of equally fast plans the one that
copies least is taken."""


KEEP, RECOMPUTE, OFFLOAD, OFFLOAD_INPUT = "keep", "recompute", "offload", "offload input"
"""The names of the options of a unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A way in which a unit may keep what its backward needs. Of equal ones the first is taken.

    - held: bytes on the device from the forward to the backward.
    - moved: bytes that go to the host after the forward, and are back before the backward.
    - working: the most bytes while the forward or backward of the unit runs, at least held + moved. The bytes
      that it saves count, those of units before it do not.
    - forward: seconds of the forward; with sharded parameters those of the gather, if these are more.
    - backward: seconds of the backward where the unit keeps all.
    - again: seconds that it adds to the backward: a second forward, with its gather if there is one, and
      waits.
    """

    name: str
    held: int = 0
    moved: int = 0
    working: int
    forward: float
    backward: float
    again: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the forward and backward."""
        return self.forward + self.backward + self.again


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The bytes per second that are left for activations between device and host; both are above 0."""

    to_host: float
    from_host: float

    @property
    def both_ways(self) -> float:
        """Seconds of a byte on its way to the host and back."""
        return 1 / self.to_host + 1 / self.from_host

    def copies(self, held: Any, waiting: Any, option: Option, budget: int) -> tuple[Any, Any]:
        """Return the bytes that still wait when a forward begins, and those of them that leave beside it.

        As many come back beside the backward. Bytes that there is no room for leave before the forward.

        Args:
            held: bytes that units before keep; a number or an array.
            waiting: bytes that wait to leave; the same.
            option: the option of the unit.
            budget: bytes that the device has for activations.
        """
        stays = np.clip(budget - held - option.working, 0.0, waiting)
        back = self.from_host * (option.backward + option.again)
        return stays, np.minimum(stays, min(self.to_host * option.forward, back))


NO_LINK = Link(to_host=1e-9, from_host=1e-9)
"""Where no activations go to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProfile:
    """What a unit takes, measured or counted where it keeps all: of a stage of a chain the first four.

    The loss is the last stage of a chain; its output may count as 0 bytes.

    - forward, backward: seconds.
    - output: bytes of its output; its gradient has as many.
    - saved: bytes that its backward needs besides its inputs; the output counts.
    - kept: bytes that its backward needs, inputs included; None: not known, so that it recomputes.
    - inputs: bytes of its inputs among them.
    - moved: the bytes of `kept` that may go to the host.
    - working: the most bytes while it runs, if these are more than `kept` and the gradient of the output.
    - again: seconds that a recomputation adds.
    """

    forward: float = 0.0
    backward: float = 0.0
    output: int = 0
    saved: int = 0
    kept: int | None = 0
    inputs: int = 0
    moved: int = 0
    working: int = 0
    again: float = 0.0

    def options(self, link: Link) -> Sequence[Option]:
        """Return the ways of a unit: it keeps, recomputes, or sends to the host.

        Args:
            link: the link to the host. Compute waits for the copies of a unit beside the next one, so what a
                forward or backward leaves of their time is lost.
        """
        kept, forward, backward = self.kept or 0, self.forward, self.backward
        working = max(self.working, kept + self.output)
        keep = Option(name=KEEP, held=kept, working=working, forward=forward, backward=backward)
        again = replace(keep, name=RECOMPUTE, held=self.inputs, again=self.again)
        if self.kept is None:
            return [again]
        ways = [keep, again]
        far = (keep, OFFLOAD, self.moved), (again, OFFLOAD_INPUT, self.inputs)
        for base, name, num in far if link != NO_LINK else ():
            longer = max(forward, num / link.to_host)
            more = base.again + max(0.0, num / link.from_host - backward)
            ways.append(replace(base, name=name, held=base.held - num, moved=num, forward=longer, again=more))
        return ways


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingPlan:
    """The options of all units, in the order of the forward, and the step that follows from them.

    - times: seconds of the forward and backward of each unit, with its waits.
    - peak: the most bytes at once.
    - before: for each unit, bytes for which compute waits. They leave before its forward and come back after
      its backward.
    - beside: for each unit, bytes that leave beside its forward and come back beside its backward.
    """

    options: Sequence[Option]
    times: Sequence[float]
    peak: int
    before: Sequence[float]
    beside: Sequence[float]

    @property
    def seconds(self) -> float:
        """Seconds of the forward and backward of all units."""
        return sum(self.times)


def simulate(options: Sequence[Option], budget: int, link: Link) -> KeepingPlan:
    """Return the step of a model whose units have taken these options, event by event; see [Note: Mirror].

    This defines the time and memory of a plan. A peak above the budget means that waiting was not enough.

    Args:
        options: the option of each unit, in the order of the forward.
        budget: bytes that the device has for activations.
        link: the link to the host.
    """
    before, beside, peak, held, waiting = list[float](), list[float](), 0.0, 0, 0.0
    for option in options:
        stays, leaves = map(float, link.copies(held, waiting, option, budget))
        peak = max(peak, held + stays + option.working)
        before.append(waiting - stays)
        beside.append(leaves)
        held, waiting = held + option.held, stays - leaves + option.moved
    # By [Note: Mirror] the device holds the same bytes during the backward.
    times = [one.seconds + waits * link.both_ways for one, waits in zip(options, before, strict=True)]
    return KeepingPlan(options=options, times=times, peak=math.ceil(peak), before=before, beside=beside)


class Interval(NamedTuple):
    """Something that a row, a resource or a pipeline rank, does."""

    row: str
    label: str
    start: float
    end: float


def time_line(plan: KeepingPlan, link: Link) -> Iterator[Interval]:
    """Yield all that compute and the link do in a step: F forward, F1 forward again, B backward, > < copies.

    Args:
        plan: the plan of all units.
        link: the link to the host.
    """
    forward, backward = list[tuple[str, float, float]](), list[tuple[str, float, float]]()
    for option, before, beside in zip(plan.options, plan.before, plan.beside, strict=True):
        again = "F1" if option.name in (RECOMPUTE, OFFLOAD_INPUT) else ""
        forward += [("", 0.0, before), ("F", option.forward, beside)]
        backward += [("", 0.0, before), ("B", option.backward, beside), (again, option.again, 0.0)]
    now = 0.0
    for arrow, rate, parts in ((">", link.to_host, forward), ("<", link.from_host, backward[::-1])):
        for label, seconds, num in parts:
            if label and seconds:
                yield Interval("compute", label, now, now + seconds)
            if num:
                yield Interval("link", arrow, now, now + num / rate)
            now += seconds or num / rate  # without seconds of its own it is a wait


def choose_keeping(units: Sequence[Sequence[Option]], budget: int, link: Link) -> KeepingPlan:
    """Return the fastest plan within a budget, by dynamic programming; see [Note: Exact up to a grid].

    Args:
        units: the options of each unit, in the order of the forward.
        budget: bytes that the device has for activations. If no plan fits into them, the least budget into
            which one fits is taken: the peak of the plan is above `budget` then.
        link: the link to the host.
    """
    needs = [0]
    for unit in reversed(units):
        needs.append(min(max(option.working, option.held + needs[-1]) for option in unit))
    budget = max(budget, needs[-1])
    states, trail = np.zeros((3, 1)), list[Any]()
    for unit, need in zip(units, reversed(needs[:-1]), strict=True):
        ways = [_advance(states, number, option, need, budget, link) for number, option in enumerate(unit)]
        reached = np.concatenate(ways, axis=1)
        states = reached[:, _select(reached, max(budget, 1) / SLOTS, link)]
        trail.append(states[3:].astype(np.int64))
    options, place = list[Option](), int(states[2].argmin())
    for unit, taken in zip(reversed(units), reversed(trail), strict=True):
        place, number = taken[:, place]
        options.append(unit[number])
    return simulate(options[::-1], budget, link)


def _advance(states: Any, number: int, option: Option, need: int, budget: int, link: Link) -> Any:
    """Take an option of a unit, by its number, where it fits.

    Args:
        states: (held, waiting, seconds, ...) [3 or more, n] before the forward; seconds of both ways.
        need: the least bytes that the units after it need.

    Returns:
        (held, waiting, seconds, place before, number) [5, n] after the forward.
    """
    fits = (states[0] + np.maximum(option.working, option.held + need) <= budget).nonzero()[0]
    held, waiting, seconds = states[:3, fits]
    stays, leaves = link.copies(held, waiting, option, budget)
    own = option.seconds + option.moved * link.both_ways * _COPYING
    seconds = seconds + (waiting - stays) * link.both_ways + own
    taken = np.full(len(fits), number)
    return np.stack([held + option.held, stays - leaves + option.moved, seconds, fits, taken])


def _select(states: Any, slot: float, link: Link) -> Any:
    """Return the numbers of the states [5, n] that are fastest in their cell and no worse than any other."""
    held = (states[0] / slot).astype(np.int64)
    waiting = (states[1] / max(states[1].max() / WAITING_SLOTS, 1e-9)).astype(np.int64)
    order = states[2].argsort(kind="stable")[::-1]  # of several values for a cell the last one stays
    numbers = np.full((held.max() + 1, waiting.max() + 1), -1)
    numbers[held[order], waiting[order]] = order  # -1: no state, and later than any
    # A state where more bytes wait is better if it is still as early after waiting for them.
    times = states[2], states[2] + states[1] * link.both_ways
    seconds, later = (np.append(one, np.inf)[numbers] for one in times)
    least = np.minimum.accumulate(np.minimum.accumulate(seconds, 0), 1)
    least_later = np.minimum.accumulate(np.minimum.accumulate(later, 0)[:, ::-1], 1)[:, ::-1]
    return numbers[(numbers >= 0) & (seconds <= least) & (later <= least_later)]


# ------------------------------------------------------------------------------------------------- chains


Tree = list[Any]
"""Stages that save all, by number, and, as trees of their own, runs of stages that are computed again.

Nested checkpoints carry it out: a checkpoint around a tree inside keeps its input alone.
"""


def plan_chain(stages: Sequence[UnitProfile], input_bytes: int, budget: int) -> Tree | None:
    """Return the fastest sequence whose bytes stay within a budget; None if no sequence does.

    It takes O(L^3 slots) for L stages. Sizes are rounded up to slots: with integer sizes and no more bytes
    in the budget than slots the result is the optimum, otherwise it may be slower.

    Args:
        stages: the stages, in the order of the forward.
        input_bytes: bytes of the input of the first stage, which is there from begin to end.
        budget: bytes that the device has for the input, activations and gradients of the chain.
    """

    def slots(size: int) -> int:
        return size if budget <= SLOTS else -(-size * SLOTS // budget)

    num = len(stages)
    saved = [slots(stage.saved) for stage in stages]
    sizes = [slots(input_bytes), *(slots(stage.output) for stage in stages)]
    room = min(budget, SLOTS) - sizes[0]
    if room < 0:
        return None
    cost = np.zeros((num + 1, num, room + 1))  # no stages cost nothing
    with_input, choice = np.empty_like(cost), np.empty(cost.shape, np.int16)
    ahead = np.cumsum([0.0, *(stage.forward for stage in stages)])
    for first, last in ((first, first + more) for more in range(num) for first in range(num - more)):
        own = stages[first].forward + stages[first].backward
        saves = own + _later(cost[first + 1, last], saved[first])
        saves[: saved[first] + max(sizes[first + 1], sizes[last + 1])] = np.inf
        inner = slice(first + 1, last + 1)
        splits = with_input[inner, last] + cost[first, first:last] + (ahead[inner] - ahead[first])[:, None]
        passed = [sizes[stage] + sizes[stage + 1] for stage in range(first + 1, last)]
        splits[:, : sizes[last + 1] + max([sizes[first + 1], *passed])] = np.inf
        ways = np.vstack([saves, splits])
        choice[first, last], cost[first, last] = ways.argmin(0), ways.min(0)
        with_input[first, last] = _later(cost[first, last], sizes[first])

    def tree(first: int, last: int, room: int) -> Tree:
        split = first + int(choice[first, last, room])
        if split > first:
            return [tree(first, split - 1, room), *tree(split, last, room - sizes[split])]
        return [first, *(tree(first + 1, last, room - saved[first]) if first < last else [])]

    return tree(0, num - 1, room) if math.isfinite(cost[0, -1, room]) else None


def _later(costs: Any, num_slots: int) -> Any:
    """Return costs by slots, if so many slots are taken by something else."""
    return np.concatenate([np.full(num_slots, np.inf), costs])[: len(costs)]
