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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from zeroshard.parameters.gradient import gradient_of, set_gradient
from zeroshard.parameters.sharded import ShardedParameter, only_sharded
from zeroshard.stepping.norms import UsesNorms
from zeroshard.stepping.twin import twin_of
from zeroshard.stepping.wholes import UsesWholes

Groups = list[list[ShardedParameter]]
"""Parameters by the groups of their optimizer."""

_OTHERS = -1
"""The number of the part of parameters that are in no unit."""


class Tier(Protocol):
    """Fetches parameters for the step of an optimizer."""

    def expect(self, parts: Sequence[Sequence[ShardedParameter]]) -> None:
        """Prepare for parts that are likely to be fetched next: the parameters of each, in their order."""

    def fetched(self, parameters: Sequence[ShardedParameter]) -> AbstractContextManager[None]:
        """Hold values and gradients of parameters where the optimizer can step them.

        At the end of the context the values are written back, unless an exception ends it.
        """

    def end_step(self) -> None:
        """Note that all parts of a step are written back."""


class Parts:
    """The steps of an optimizer part by part, whoever takes them. Its hooks run once a step, and see no tier.

    Args:
        optimizer: an optimizer over sharded parameters.
        units: lists of parameters that are fetched together.
        tiers: the tiers that they pass on the way to the optimizer, the farthest one first.
        num_threads: threads of a step on the host; None: those that torch has anyway.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[Sequence[ShardedParameter]],
        tiers: Sequence[Tier],
        num_threads: int | None = None,
    ) -> None:
        self._num_threads = num_threads
        self._unit_of = {p: number for number, unit in enumerate(units) for p in unit}
        self._units: list[list[ShardedParameter]] = []
        """The units that were stepped ahead of others since the last `begin_units`."""
        self._tiers = tuple(tiers)
        # Below torch's hooks, which are to run once.
        self._own_step = inspect.unwrap(
            type(optimizer).step, stop=lambda function: not hasattr(function, "hooked")
        )

        @functools.wraps(optimizer.step)  # with the mark of an LR scheduler that has wrapped it
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            """Call the closure once, then step each part; return the loss of the closure, or None."""
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what such a scheduler looks at
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(optimizer)
            return loss

        hooked = Optimizer.profile_hook_step(step)
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]

    def _step(self, optimizer: Optimizer) -> None:
        """Step all parameters that have a gradient."""
        divided = _divide(optimizer, self._unit_of)
        parts = [
            [p for group in groups for p in only_sharded(group) if gradient_of(p) is not None]
            for groups in divided
        ]
        for tier in self._tiers:
            tier.expect(parts)
        for groups, part in zip(divided, parts, strict=True):
            self._step_part(twin_of(optimizer, groups) if is_divisible(optimizer) else optimizer, part)
        for tier in self._tiers:
            tier.end_step()

    def begin_units(self) -> None:
        """Begin to step units ahead of others, probably those of the last time and in the same order."""
        expected, self._units = self._units, []
        for tier in self._tiers:
            tier.expect(expected)

    def step_of(self, optimizer: Optimizer, unit: Collection[ShardedParameter]) -> Callable[[], None]:
        """Prepare the step of one unit ahead of the step of the others.

        Args:
            optimizer: an optimizer for which `is_divisible`.
            unit: the parameters of the unit; those of other optimizers are left alone.

        Returns:
            The step, for any thread: it steps parameters with gradients, and takes these gradients away.
        """
        groups = [[p for p in group["params"] if p in unit] for group in optimizer.param_groups]
        part = [p for group in groups for p in group]
        if not part:
            return lambda: None
        self._units.append(part)
        twin = twin_of(optimizer, groups)

        def step() -> None:
            self._step_part(twin, part)
            for p in part:
                set_gradient(p, None)

        return step

    def _step_part(self, optimizer: Optimizer, part: list[ShardedParameter]) -> None:
        with _without_hooks(optimizer), ExitStack() as stack:
            stack.enter_context(_threads(self._num_threads))
            for tier in self._tiers:
                stack.enter_context(tier.fetched(part))
            self._own_step(optimizer)


def is_divisible(optimizer: Optimizer) -> bool:
    """True if an optimizer may step its parameters one unit after the other.

    An optimizer that asks all ranks for norms or whole tensors may not: it asks once for all parameters. Nor
    may a class that is not known: it may count steps by group.
    """
    return is_known(optimizer) and not isinstance(optimizer, UsesNorms | UsesWholes)


def _divide(optimizer: Optimizer, unit_of: Mapping[ShardedParameter, int]) -> list[Groups]:
    """The parts of a step: one for each unit, or one for all parameters if the optimizer is not divisible.

    Parameters that are in no unit, such as ignored ones, are a part together.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if not is_divisible(optimizer):
        return [groups]
    parts: dict[int, Groups] = {}
    for number, parameters in enumerate(groups):
        for p in parameters:
            if p not in unit_of or gradient_of(p) is not None:
                parts.setdefault(unit_of.get(p, _OTHERS), [[] for _ in groups])[number].append(p)
    return list(parts.values())


def is_known(optimizer: Optimizer) -> bool:
    """True for a class of a library whose steps are known to treat each parameter by itself."""
    return type(optimizer).__module__.partition(".")[0] in ("torch", "zeroshard", "bitsandbytes")


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Compute with so many threads on the host; None: with as many as before."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Take the hooks away: a step that calls the step of its base class would run them in its middle."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
