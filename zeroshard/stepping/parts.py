"""Steps of an optimizer over parts of its parameters: fetch, step, write back.

A *tier* is where main parameters and gradients lie, if the optimizer cannot step them there. It fetches a
part of them, the optimizer steps it, and the tier writes the values back. So memory for what is fetched is
that of one part, the trained parameters of a unit. After an exception the parts before it have had their
step.
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
    """Fetches what an optimizer steps."""

    def fetched(self, parameters: Sequence[ShardedParameter]) -> AbstractContextManager[None]:
        """Hold values and gradients of parameters where the optimizer steps them.

        At its end the values are written back, unless that is an exception.
        """

    def end_step(self) -> None:
        """All parts of a step are written back."""


def step_in_parts(optimizer: Optimizer, units: Sequence[Sequence[ShardedParameter]], tier: Tier) -> None:
    """Let an optimizer step part by part, whoever steps it. Its hooks run once a step, and see no tier.

    Args:
        optimizer: over sharded parameters.
        units: parameters that are fetched together.
        tier: of all of them.
    """
    unit_of = {p: number for number, unit in enumerate(units) for p in unit}
    # Below torch's hooks, which are to run once.
    own_step = inspect.unwrap(type(optimizer).step, stop=lambda function: not hasattr(function, "hooked"))

    @functools.wraps(optimizer.step)  # with the mark of an LR scheduler that has wrapped it
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
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
    """The parts of a step: one for each unit, or one for all where these steps would not be one.

    They are not where norms of all are needed; nor, for all that is known, in a class of somebody else's,
    which may count steps by group.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    is_known = type(optimizer).__module__.partition(".")[0] in ("torch", "zeroshard", "bitsandbytes")
    if not is_known or isinstance(optimizer, UsesNorms):
        return [groups]
    parts: dict[int, Groups] = {}
    for number, parameters in enumerate(groups):
        for p in parameters:
            if gradient_of(p) is not None:
                parts.setdefault(unit_of[p], [[] for _ in groups])[number].append(p)
    return list(parts.values())


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Take its hooks away: a step that calls that of its base class would run them while it is not over."""
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
