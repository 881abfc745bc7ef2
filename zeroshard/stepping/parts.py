"""Steps of an optimizer over parts of its parameters: fetch, step, write back.

A *tier* is a place of main parameters and gradients in which the optimizer cannot step them. The tier fetches
a part of them, the optimizer steps the part, and the tier writes the values back. So the fetched values take
the memory of one part, the trained parameters of a unit. After an exception the parts before it have had
their step.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from zeroshard.parameters.sharded import ShardedParameter, gradient_of
from zeroshard.stepping.norms import UsesNorms

Groups = list[list[ShardedParameter]]
"""Parameters by the groups of their optimizer."""


class Tier(Protocol):
    """Fetches parameters for the step of an optimizer."""

    def fetched(self, parameters: Sequence[ShardedParameter]) -> AbstractContextManager[None]:
        """Hold values and gradients of parameters where the optimizer can step them.

        At the end of the context the values are written back, unless an exception ends it.
        """

    def end_step(self) -> None:
        """Note that all parts of a step are written back."""


def step_in_parts(optimizer: Optimizer, units: Sequence[Sequence[ShardedParameter]], tier: Tier) -> None:
    """Let an optimizer step part by part, whoever steps it. Its hooks run once a step, and see no tier.

    Args:
        optimizer: an optimizer over sharded parameters.
        units: lists of parameters that are fetched together.
        tier: the tier of all of them.
    """
    unit_of = {p: number for number, unit in enumerate(units) for p in unit}
    # Below torch's hooks, which are to run once.
    own_step = inspect.unwrap(type(optimizer).step, stop=lambda function: not hasattr(function, "hooked"))

    @functools.wraps(optimizer.step)  # with the mark of an LR scheduler that has wrapped it
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure once, then step each part; return the loss of the closure, or None."""
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what such a scheduler looks at
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _without_hooks(optimizer):
            for groups in _divide(optimizer, unit_of):
                stepped = [p for group in groups for p in group if gradient_of(p) is not None]
                with _only(optimizer, groups), tier.fetched(stepped):
                    own_step(optimizer)
        tier.end_step()
        return loss

    hooked = Optimizer.profile_hook_step(step)
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]


def _divide(optimizer: Optimizer, unit_of: Mapping[ShardedParameter, int]) -> list[Groups]:
    """The parts of a step: one for each unit, or one for all parameters.

    An optimizer that needs norms of all parameters gets one part. So does a class that is not known: it may
    count steps by group.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if not is_known(optimizer) or isinstance(optimizer, UsesNorms):
        return [groups]
    parts: dict[int, Groups] = {}
    for number, parameters in enumerate(groups):
        for p in parameters:
            if gradient_of(p) is not None:
                parts.setdefault(unit_of[p], [[] for _ in groups])[number].append(p)
    return list(parts.values())


def is_known(optimizer: Optimizer) -> bool:
    """True for a class of a library whose steps are known to treat each parameter by itself."""
    return type(optimizer).__module__.partition(".")[0] in ("torch", "zeroshard", "bitsandbytes")


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Take the hooks away: a step that calls the step of its base class would run them in its middle."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


@contextmanager
def _only(optimizer: Optimizer, groups: Groups) -> Iterator[None]:
    """Leave these parameters in their groups."""
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
