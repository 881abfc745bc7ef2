"""The ages of weights, read from the lists of a schedule, and the weights that each action computes with.

Nobody else knows a formula for a delay.

A *version* of a chunk's weights is the number of steps that the chunk has taken. A micro-batch meets one
version in its forward, and perhaps a later one in its backward; its gradient changes a later one still:

    forward       version f      the steps before it
    backward      version b      it has crossed b - f steps
    step          version u      the version to which its gradient is applied

    tau_forward   u - f          (Yang et al. 2021, "PipeMare", section 2.2)
    tau_backward  u - b

`WEIGHTS` is the table of the methods of asynchronous pipelines. An action uses a *version*, or the newest
weights, perhaps moved by some steps along a *direction*. Methods differ in nothing else, so each is a
function from the ages of a schedule to the use of each action.
`optim/asynchronous.py` has the directions.

    latest        the newest weights                        Petrowski et al. 1993; "pipelined backpropagation"
    stash         backward: the version of its forward      Narayanan et al. 2019, "PipeDream", section 3.3
    vertical      both: the version of the first chunk      the same, "vertical sync"
    double        both: one version for each step           Narayanan et al. 2021, "PipeDream-2BW"
    estimate      backward: w - crossed * delta             Yang et al. 2021, "PipeMare", section 3.2
    predict       both: w - s * lr * v, s by round trips    Chen et al. 2018, "SpecTrain", section 3.2
    lwp           forward: w - tau_forward * lr * v         Kosson et al. 2021, "Pipelined Backpropagation
    lwp-weights   forward: w + tau_forward * last change      at Scale", section 3.3, equations 15 and 19
    bounded       the newest; few steps are crossed         Elam et al. 2026, "Breaking the Bubble", PACI

Autograd keeps the activations of the forward. So a backward with other weights than its forward multiplies
gradients with the new matrices, and activations come from the old ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zeroshard.parallel.pipeline.actions import BEGIN_BACKWARD, END_BACKWARD, Action, Kind, Place, Schedule
from zeroshard.parallel.pipeline.simulate import ActionCosts, simulate


@dataclass(frozen=True)
class Ages:
    """The versions that the actions of a schedule meet.

    Args:
        schedule: the lists of all ranks, which `simulate` runs.
    """

    schedule: Schedule

    @cached_property
    def before(self) -> Mapping[Action, int]:
        """For each compute action, the steps of its chunk before it."""
        found: dict[Action, int] = {}
        for actions, chunks in zip(self.schedule.lists, self.schedule.chunks, strict=True):
            for chunk in chunks:
                taken = 0
                for action in actions:
                    if action.is_compute and action.chunk == chunk:
                        found[action] = taken
                    taken += action.is_step_of(chunk)
        return found

    @cached_property
    def applied(self) -> Mapping[Place, int]:
        """By chunk and micro-batch, the version to which the gradient is applied; none without a step.

        The next step after a backward applies it, so it is the version at the backward.
        """
        num_steps = Counter[int | None]()
        for rank, action in self.schedule:
            if action.kind is Kind.STEP:
                own = self.schedule.chunks[rank]
                num_steps.update(own if action.chunk is None else (action.chunk,))
        ends = ((action, taken) for action, taken in self.before.items() if action.kind in END_BACKWARD)
        return {action.place: taken for action, taken in ends if taken < num_steps[action.chunk]}

    @cached_property
    def crossed(self) -> Mapping[Action, int]:
        """For each recompute and backward, the steps of its chunk since the forward of its micro-batch."""
        return {
            action: taken - self.before[action._replace(kind=Kind.FORWARD)]
            for action, taken in self.before.items()
            if action.kind is not Kind.FORWARD
        }

    def tau_forward(self, chunk: int) -> int:
        """The most steps of a chunk from a forward to the step that applies its gradient."""
        return max(self._taus[chunk].values(), default=0)

    def until_applied(self, action: Action) -> int:
        """The steps of a chunk from an action to the step that applies the gradient of its micro-batch."""
        return self.applied[action.place] - self.before[action]

    def tau_of_step(self, chunk: int, step: int) -> int:
        """The most steps from a forward to one step that applies its gradient; 0 if it applies none."""
        return self._taus[chunk].get(step, 0)

    @cached_property
    def _taus(self) -> dict[int, dict[int, int]]:
        found: dict[int, dict[int, int]] = {chunk: {} for chunk in range(self.schedule.num_chunks)}
        for (chunk, microbatch), step in self.applied.items():
            tau = step - self.before[Action(Kind.FORWARD, chunk, microbatch)]
            found[chunk][step] = max(tau, found[chunk].get(step, 0))
        return found

    def most_crossed(self, chunk: int) -> int:
        """The most steps of a chunk from a forward to the backward of its micro-batch."""
        return max((steps for action, steps in self.crossed.items() if action.chunk == chunk), default=0)

    @cached_property
    def round_trips(self) -> Mapping[Action, int]:
        """For each compute action, the steps of its chunk until its micro-batch is back at the first chunk.

        These are the steps that end before the backward of the first chunk begins. Forwards and backwards
        take the same time, as in the source: on rank k of n, in the steady state, floor(k / 2) from a
        backward, and n - 1 - k more from a forward.

        Source: Chen et al. 2018, "Efficient and Robust Parallel DNN Training through Model Parallelism on
        Multi-GPU Platform" (SpecTrain), section 3.2.
        """
        costs = ActionCosts(forward=2, backward_input=1, backward_weight=1)
        spans = simulate(self.schedule, costs).spans
        back = {
            span.action.microbatch: span.start
            for own in spans
            for span in own
            if span.action.chunk == 0 and span.action.kind in BEGIN_BACKWARD
        }
        found: dict[Action, int] = {}
        for own, chunks in zip(spans, self.schedule.chunks, strict=True):
            for chunk in chunks:
                ends = [span.end for span in own if span.action.is_step_of(chunk)]
                for action, _, _ in own:
                    if action.is_compute and action.chunk == chunk:
                        taken = bisect_left(ends, back[action.microbatch])
                        found[action] = max(taken - self.before[action], 0)
        return found

    @cached_property
    def first_versions(self) -> Mapping[int, int]:
        """By micro-batch, the version of the first chunk in its forward."""
        return {
            action.place[1]: taken
            for action, taken in self.before.items()
            if action.kind is Kind.FORWARD and action.chunk == 0
        }

    @cached_property
    def versions_of_steps(self) -> Mapping[int, int]:
        """By micro-batch, the version of the first chunk in the forward that began its step.

        All micro-batches whose gradients the first chunk applies together have the same one (Narayanan et al.
        2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1).
        """
        groups: dict[int, list[int]] = {}
        for microbatch in sorted(self.first_versions):
            groups.setdefault(self.applied[0, microbatch], []).append(microbatch)
        return {one: self.first_versions[group[0]] for group in groups.values() for one in group}


class Use(NamedTuple):
    """The weights of one action."""

    version: int | None = None
    """A version; None: the newest."""
    ahead: int = 0
    """The steps by which these are moved along the direction of the method; negative for backwards."""


Uses = Mapping[Action, Use]
"""By compute action of all ranks."""


def _latest(ages: Ages) -> dict[Action, Use]:
    return dict.fromkeys(ages.before, Use())


def _stash(ages: Ages) -> dict[Action, Use]:
    return {action: Use(taken - ages.crossed.get(action, 0)) for action, taken in ages.before.items()}


def _by_microbatch(ages: Ages, versions: Mapping[int, int]) -> dict[Action, Use]:
    return {action: Use(versions[action.place[1]]) for action in ages.before}


def _estimate(ages: Ages) -> dict[Action, Use]:
    return {action: Use(ahead=-ages.crossed.get(action, 0)) for action in ages.before}


def _predict(ages: Ages) -> dict[Action, Use]:
    return {action: Use(ahead=steps) for action, steps in ages.round_trips.items()}


def _lwp(ages: Ages) -> dict[Action, Use]:
    return {
        action: Use(ahead=ages.until_applied(action) if action.kind is Kind.FORWARD else 0)
        for action in ages.before
    }


WEIGHTS: Mapping[str, Callable[[Ages], dict[Action, Use]]] = {
    "latest": _latest,
    "stash": _stash,
    "vertical": lambda ages: _by_microbatch(ages, ages.first_versions),
    "double": lambda ages: _by_microbatch(ages, ages.versions_of_steps),
    "estimate": _estimate,
    "predict": _predict,
    "lwp": _lwp,
    "lwp-weights": _lwp,
    "bounded": _latest,
}
"""The methods by the names that a user writes."""


def kept_versions(ages: Ages, rank: int, chunk: int, uses: Uses) -> tuple[frozenset[int], ...]:
    """Return, for each step of a chunk, the versions from before it that are used after it."""
    kept: list[frozenset[int]] = []
    later: frozenset[int] = frozenset()
    newest = sum(action.is_step_of(chunk) for action in ages.schedule.lists[rank])
    for action in reversed(ages.schedule.lists[rank]):
        if action.is_step_of(chunk):
            later -= {newest}
            kept.append(later)
            newest -= 1
        elif action.is_compute and action.chunk == chunk:
            version = uses[action].version
            later |= {newest if version is None else version}
    return tuple(reversed(kept))


def count_live(ages: Ages, uses: Uses) -> tuple[int, ...]:
    """Return the most versions of a chunk that each pipeline rank holds at a time, with the newest one."""
    return tuple(
        1 + max(len(kept) for chunk in chunks for kept in ({}, *kept_versions(ages, rank, chunk, uses)))
        for rank, chunks in enumerate(ages.schedule.chunks)
    )
