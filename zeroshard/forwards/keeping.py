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
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

SLOTS = 500
"""Parts of the budget by which states are told apart; Rotor's solvers round sizes to as many."""
WAITING_SLOTS = 100
"""The same of the most bytes that wait in front of a unit, which are those of a few units."""

_COPYING = 1e-4
"""The share of the time of a copy that counts even if nobody waits for it: of equally fast plans the one that
copies least is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A way in which a unit may keep what its backward needs.

    Raises:
        ValueError: the unit holds more after its forward than while it runs.
    """

    name: str
    """Its name, such as keep, recompute or offload."""
    held: int = 0
    """Bytes on the device from the forward to the backward."""
    moved: int = 0
    """Bytes that go to the host after the forward, and are back before the backward."""
    working: int
    """The most bytes while the forward or backward of the unit runs. The bytes that it saves count, those of
    units before it do not."""
    forward: float = 0.0
    """Seconds that it adds to the forward."""
    backward: float = 0.0
    """Seconds that it adds to the backward: a second forward, with its gather if there is one."""

    def __post_init__(self) -> None:
        leaves = self.held + self.moved
        if self.working < leaves:
            raise ValueError(
                f"option {self.name!r}: expected working to be at least held + moved = {leaves} bytes, got "
                f"{self.working}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """The costs of a unit, measured where it keeps all on the device."""

    forward: float
    """Seconds of the forward; with sharded parameters those of the gather, if these are more."""
    backward: float
    """Seconds of the backward."""
    options: tuple[Option, ...]
    """The ways to choose from. Of equal ones the first is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The bytes per second that are left for activations between device and host; both are above 0."""

    to_host: float
    from_host: float

    @property
    def both_ways(self) -> float:
        """Seconds of a byte on its way to the host and back."""
        return 1 / self.to_host + 1 / self.from_host

    def beside(self, unit: UnitCosts, option: Option) -> float:
        """Return the bytes that can leave beside the forward of a unit, and come back beside its backward."""
        leave = self.to_host * (unit.forward + option.forward)
        return min(leave, self.from_host * (unit.backward + option.backward))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingPlan:
    """The options of all units, in the order of the forward, and the step that follows from them."""

    options: tuple[Option, ...]
    seconds: float
    """Seconds of the forward and backward of all units."""
    peak: int
    """The most bytes at once."""
    before: tuple[float, ...]
    """For each unit: bytes for which compute waits. They leave before its forward and come back after its
    backward."""
    beside: tuple[float, ...]
    """For each unit: bytes that leave beside its forward and come back beside its backward."""


def simulate(units: Sequence[UnitCosts], options: Sequence[Option], budget: int, link: Link) -> KeepingPlan:
    """Return the step of a model whose units have taken these options, event by event; see [Note: Mirror].

    This defines the time and memory of a plan. A peak above the budget means that waiting was not enough.

    Args:
        units: the costs of all units, in the order of the forward.
        options: the option of each unit.
        budget: bytes that the device has for activations.
        link: the link to the host.
    """
    before, beside = [], []
    seconds = peak = held = waiting = 0.0
    for unit, option in zip(units, options, strict=True):
        before.append(min(waiting, max(0.0, waiting + held + option.working - budget)))
        waiting -= before[-1]
        peak = max(peak, held + waiting + option.working)
        beside.append(min(waiting, link.beside(unit, option)))
        seconds += before[-1] / link.to_host + unit.forward + option.forward
        waiting += option.moved - beside[-1]
        held += option.held
    for number in reversed(range(len(units))):
        unit, option = units[number], options[number]
        held -= option.held
        waiting += beside[number] - option.moved
        peak = max(peak, held + waiting + option.working)
        seconds += unit.backward + option.backward + before[number] / link.from_host
        waiting += before[number]
    return KeepingPlan(
        options=tuple(options),
        seconds=seconds,
        peak=math.ceil(peak),
        before=tuple(before),
        beside=tuple(beside),
    )


def choose_keeping(
    units: Sequence[UnitCosts], budget: int, link: Link, num_slots: int = SLOTS
) -> KeepingPlan:
    """Return the fastest plan within a budget, by dynamic programming; see [Note: Exact up to a grid].

    Args:
        units: the costs of all units, in the order of the forward.
        budget: bytes that the device has for activations.
        link: the link to the host.
        num_slots: parts of the budget that states are told apart by.

    Raises:
        ValueError: no plan fits into the budget; the text names the least one.
    """
    needs = [0]
    for unit in reversed(units):
        needs.append(min(max(option.working, option.held + needs[-1]) for option in unit.options))
    if budget < needs[-1]:
        raise ValueError(
            f"expected a memory budget of at least {needs[-1]} bytes for activations, got {budget}"
        )
    states = np.zeros((3, 1))
    trail: list[tuple[Any, Any]] = []
    for unit, need in zip(units, reversed(needs[:-1]), strict=True):
        reached, origins, taken = [], [], []
        for number, option in enumerate(unit.options):
            fits = states[0] + np.maximum(option.working, option.held + need) <= budget
            reached.append(_advance(states[:, fits], unit, option, budget, link))
            origins.append(fits.nonzero()[0])
            taken.append(np.full(len(origins[-1]), number))
        states = np.concatenate(reached, axis=1)
        best = _select(states, max(budget, 1) / num_slots, link)
        states = states[:, best]
        trail.append((np.concatenate(origins)[best], np.concatenate(taken)[best]))
    options, place = [], int(states[2].argmin())
    for unit, (origin, number) in zip(reversed(units), reversed(trail), strict=True):
        options.append(unit.options[number[place]])
        place = origin[place]
    return simulate(units, options[::-1], budget, link)


def _advance(states: Any, unit: UnitCosts, option: Option, budget: int, link: Link) -> Any:
    """Return states (held, waiting, seconds) [3, n] after the forward of a unit; seconds of both ways."""
    held, waiting, seconds = states
    stays = np.minimum(waiting, budget - held - option.working)
    own = unit.forward + option.forward + unit.backward + option.backward
    own += option.moved * link.both_ways * _COPYING
    beside = np.minimum(stays, link.beside(unit, option))
    seconds = seconds + (waiting - stays) * link.both_ways + own
    return np.stack([held + option.held, stays - beside + option.moved, seconds])


def _select(states: Any, slot: float, link: Link) -> Any:
    """Return the numbers of the states [3, n] that are fastest in their cell and no worse than any other."""
    held = (states[0] / slot).astype(np.int64)
    waiting = (states[1] / max(states[1].max() / WAITING_SLOTS, 1e-9)).astype(np.int64)
    seconds = np.full((held.max() + 1, waiting.max() + 1), np.inf)
    numbers = np.zeros_like(seconds, np.int64)
    order = states[2].argsort(kind="stable")[::-1]  # of several values for a cell the last one stays
    seconds[held[order], waiting[order]] = states[2][order]
    numbers[held[order], waiting[order]] = order
    best = numbers[seconds < _least_of_less(seconds)]
    # A state where more bytes wait is better if it is still as early after waiting for them.
    later = np.full_like(seconds, np.inf)
    later[held[best], waiting[best]] = states[2][best] + states[1][best] * link.both_ways
    return numbers[later < _least_of_less(later[:, ::-1])[:, ::-1]]


def _least_of_less(values: Any) -> Any:
    """Return for each place of a matrix the least value at other places with no more of both numbers."""
    least = np.minimum.accumulate(np.minimum.accumulate(values, 0), 1)
    others = np.full_like(values, np.inf)
    others[1:] = least[:-1]
    others[:, 1:] = np.minimum(others[:, 1:], least[:, :-1])
    return others


# ------------------------------------------------------------------------------------------------- chains


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """The costs of a stage of a chain. The loss is the last stage; its output may count as 0 bytes."""

    forward: float
    """Seconds of the forward."""
    backward: float
    """Seconds of the backward."""
    output: int
    """Bytes of the output; its gradient has as many."""
    saved: int
    """Bytes that the backward needs besides the input of the stage; the output counts."""
    forward_extra: int = 0
    """Bytes that the forward holds for itself while it runs."""
    backward_extra: int = 0
    """The same of the backward, where the gradients of input and output are not held in turn but at once:
    those of the input."""


class ChainTask(NamedTuple):
    """A task of a sequence.

    - forward: compute the output of the stage without autograd, and drop its input.
    - keep: compute the output without autograd, and keep the input.
    - save: compute the output with autograd, and keep the input.
    - backward: give the gradient of the input for that of the output; drop all that the stage has saved and,
      unless the stage before has saved it as its output, the input.
    """

    kind: Literal["forward", "keep", "save", "backward"]
    stage: int


class ChainPlan(NamedTuple):
    """The fastest sequence."""

    seconds: float
    tasks: tuple[ChainTask, ...]


def plan_chain(
    stages: Sequence[StageCosts], input_bytes: int, budget: int, num_slots: int = 500
) -> ChainPlan:
    """Return the fastest sequence of tasks whose bytes stay within a budget, and its time.

    It takes O(L^3 slots) for L stages. Sizes are rounded up to slots: with integer sizes and no more bytes
    in the budget than slots the result is the optimum, otherwise it may be slower.

    Args:
        stages: the stages, in the order of the forward.
        input_bytes: bytes of the input of the first stage, which is there from begin to end.
        budget: bytes that the device has for the input, activations and gradients of the chain.
        num_slots: parts of the budget that sizes are counted in.

    Raises:
        ValueError: no sequence fits into the budget; the text names a budget into which one fits.
    """
    table, enough = _Table(stages, input_bytes, budget, num_slots), budget
    while table.least > table.room:
        enough = -(-enough * table.least // table.room) if enough > 0 else table.least
        table = _Table(stages, input_bytes, enough, num_slots)
    if enough > budget:
        raise ValueError(f"expected a memory budget of at least {enough} bytes for the chain, got {budget}")
    return table.solve()


Tree = list[Any]
"""Stages that save all, by number, and, as trees of their own, runs of stages that are computed again."""


def tree_of(tasks: Sequence[ChainTask]) -> Tree:
    """Return how nested checkpoints carry a sequence out: one around a tree inside keeps its input alone."""

    def parse(at: int) -> tuple[Tree, int]:
        kind, stage = tasks[at]
        at += 1
        if kind == "keep":
            while tasks[at].kind == "forward":
                at += 1
            rest, at = parse(at)
            again, at = parse(at)
            return [again, *rest], at
        rest = []
        if tasks[at] != ("backward", stage):
            rest, at = parse(at)
        return [stage, *rest], at + 1

    return parse(0)[0]


class _Table:
    """The recurrence for all parts of a chain and all bytes, in slots.

    Args:
        stages: the stages.
        input_bytes: bytes of the input of the first one.
        budget: bytes.
        num_slots: slots of the budget.
    """

    def __init__(self, stages: Sequence[StageCosts], input_bytes: int, budget: int, num_slots: int) -> None:
        def slots(size: int) -> int:
            return size if budget <= num_slots else -(-size * num_slots // budget)

        self._stages, self._last = stages, len(stages) - 1
        self.room = min(budget, num_slots)
        """Slots of the budget."""
        self._saved = [slots(stage.saved) for stage in stages]
        self._forward = [slots(stage.forward_extra) for stage in stages]
        self._backward = [slots(stage.backward_extra) for stage in stages]
        self._sizes = [slots(input_bytes), *(slots(stage.output) for stage in stages)]
        """The input of each stage, and the output of the last one."""

    def _parts(self) -> Iterator[tuple[int, int]]:
        """All parts of the chain, (first stage, last stage), the shorter ones first."""
        return (
            (first, first + size) for size in range(self._last + 1) for first in range(self._last + 1 - size)
        )

    def _to_save(self, first: int, last: int) -> int:
        """Slots for the first stage of a part alone, if it is saved."""
        before = self._sizes[last + 1] + self._forward[first]
        return self._saved[first] + max(before, self._sizes[first + 1] + self._backward[first])

    def _to_pass(self, first: int, last: int) -> int:
        """Slots for the forwards of a part but the last stage, without saving."""
        sizes, extra = self._sizes, self._forward
        inner = (sizes[stage] + sizes[stage + 1] + extra[stage] for stage in range(first + 1, last))
        return sizes[last + 1] + max([sizes[first + 1] + extra[first], *inner])

    @cached_property
    def least(self) -> int:
        """Slots that the chain needs with its input."""
        sizes, least = self._sizes, dict[tuple[int, int], int]()
        for first, last in self._parts():
            saves = max(self._to_save(first, last), self._saved[first] + least.get((first + 1, last), 0))
            splits = [
                max(self._to_pass(first, last), sizes[j] + least[j, last], least[first, j - 1])
                for j in range(first + 1, last + 1)
            ]
            least[first, last] = min([saves, *splits])
        return sizes[0] + least[0, self._last]

    def solve(self) -> ChainPlan:
        """Return the plan; at least `least` slots are there."""
        shape = (self._last + 1, self._last + 1, self.room + 1)
        cost, with_input, choice = np.empty(shape), np.empty(shape), np.empty(shape, np.int16)
        ahead = np.array([0.0, *accumulate(stage.forward for stage in self._stages)])
        for first, last in self._parts():
            stage = self._stages[first]
            saves = np.full(self.room + 1, float(stage.forward + stage.backward))
            if first < last:
                saves += _later(cost[first + 1, last], self._saved[first])
            saves[: self._to_save(first, last)] = np.inf
            inner = slice(first + 1, last + 1)
            splits = (
                with_input[inner, last] + cost[first, first:last] + (ahead[inner] - ahead[first])[:, None]
            )
            splits[:, : self._to_pass(first, last)] = np.inf
            ways = np.vstack([saves, splits])
            choice[first, last], cost[first, last] = ways.argmin(0), ways.min(0)
            with_input[first, last] = _later(cost[first, last], self._sizes[first])

        def tasks(first: int, last: int, room: int) -> Iterator[ChainTask]:
            split = first + int(choice[first, last, room])
            if split > first:
                yield ChainTask("keep", first)
                yield from (ChainTask("forward", stage) for stage in range(first + 1, split))
                yield from tasks(split, last, room - self._sizes[split])
                yield from tasks(first, split - 1, room)
            else:
                yield ChainTask("save", first)
                if first < last:
                    yield from tasks(first + 1, last, room - self._saved[first])
                yield ChainTask("backward", first)

        room = self.room - self._sizes[0]
        return ChainPlan(float(cost[0, self._last, room]), tuple(tasks(0, self._last, room)))


def _later(costs: Any, num_slots: int) -> Any:
    """Return costs by slots, if so many slots are taken by something else."""
    return np.concatenate([np.full(num_slots, np.inf), costs])[: len(costs)]
