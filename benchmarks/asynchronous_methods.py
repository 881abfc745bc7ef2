"""The methods that benchmarks/asynchronous.py compares, and their lists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from asynchronous_executor import Delays, Rule
from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule, frozen, loop
from zeroshard.parallel.pipeline.schedules import gpipe, one_f_one_b, steady

MANY = 8
"""Micro-batches of a step of the methods that take several: 2BW needs as many as ranks."""

_STEP = Action(Kind.STEP, None, None)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the tables."""

    per_step: int
    """Micro-batches of a step."""
    rule: Rule
    synchronous: Callable[[int, int], Schedule] | None = None
    """The list of one step. None: steps are taken while micro-batches are under way."""

    def schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The lists of a whole run."""
        if self.synchronous is None:
            return steady(num_ranks, num_microbatches, self.per_step)
        lists: list[list[Action]] = [[] for _ in range(num_ranks)]
        for start in range(0, num_microbatches, self.per_step):
            step = self.synchronous(num_ranks, self.per_step)
            for own, actions in zip(lists, step.lists, strict=True):
                own.extend(action._replace(microbatch=start + (action.microbatch or 0)) for action in actions)
                own.append(_STEP)
        return Schedule(loop(num_ranks, 1), num_microbatches, frozen(lists))


_NEWEST = Rule()
METHODS = {
    "gpipe": Method(per_step=MANY, rule=_NEWEST, synchronous=gpipe),
    "1f1b": Method(per_step=MANY, rule=_NEWEST, synchronous=one_f_one_b),
    "2bw": Method(per_step=MANY, rule=Rule(weights="double")),
    "paci": Method(per_step=MANY, rule=Rule(weights="bounded")),
    "one": Method(per_step=1, rule=_NEWEST, synchronous=one_f_one_b),
    "pb": Method(per_step=1, rule=Rule(weights="latest")),
    "pipedream": Method(per_step=1, rule=Rule(weights="stash")),
    "spectrain": Method(per_step=1, rule=Rule(weights="predict")),
    "pipemare": Method(per_step=1, rule=Rule(weights="estimate", correction="rescale")),
    "lwp": Method(per_step=1, rule=Rule(weights="lwp")),
    "lwp+sc": Method(per_step=1, rule=Rule(weights="lwp", correction="spike")),
}
"""Each is compared with 1F1B that has as many micro-batches a step: the same gradients without delays."""


@functools.lru_cache(maxsize=4)
def delays_of(name: str, num_ranks: int, num_microbatches: int) -> Delays:
    """Return the lists of a method, with what its rule reads from them."""
    method = METHODS[name]
    return Delays(method.schedule(num_ranks, num_microbatches), method.rule.weights)
