"""The weights that each action computes with: a table of the methods of asynchronous pipelines.

An action uses a *version*, or the newest weights, perhaps moved by some steps along a *direction*. Methods
differ in nothing else, so each is a function from the ages of a schedule to the use of each action.
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

from collections.abc import Callable, Mapping
from typing import NamedTuple

from zeroshard.parallel.pipeline.actions import Action, Kind
from zeroshard.parallel.pipeline.asynchronous.ages import Ages


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
