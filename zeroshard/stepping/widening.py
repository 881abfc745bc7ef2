"""Steps of an optimizer in float32 over main parameters of bfloat16.

For the time of a step a parameter holds its values, and its gradient, in float32: the same object in the same
group, so neither the optimizer nor its states need to know. Then the values are rounded stochastically into
the main parameter. An optimizer that treats each parameter by itself steps unit by unit, so that memory for
float32 is that of one unit; after an exception, units before it have had their step.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.sharding.parameter import ShardedParameter
from zeroshard.stepping.norms import UsesNorms
from zeroshard.stepping.rounding import Rounding, round_into

Starts = dict[ShardedParameter, int]
"""Where the slices of parameters start in the whole ones."""
Lists = list[list[ShardedParameter]]
"""Parameters by group."""


def widen_steps(optimizer: Optimizer, units: Sequence[Starts], rounding: Rounding) -> None:
    """Let an optimizer step in float32, whoever steps it. Its hooks run once a step, and see bfloat16.

    Args:
        optimizer: over sharded parameters.
        units: those that are widened together.
        rounding: of all its steps; counts them.
    """
    starts = {p: start for unit in units for p, start in unit.items()}
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
            for lists in _parts(optimizer, unit_of):
                with _only(optimizer, lists), _widened(lists, starts, rounding):
                    own_step(optimizer)
        rounding.step += 1
        return loss

    hooked = Optimizer.profile_hook_step(step)
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]
    _load_states_wide(optimizer, list(starts))


def _parts(optimizer: Optimizer, unit_of: Mapping[ShardedParameter, int]) -> list[Lists]:
    """The parameters of each step of the optimizer: of a unit, or all where these steps would not be one.

    They are not where norms of all are needed; nor, for all that is known, in a class of somebody else's,
    which may count steps by group.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    is_known = type(optimizer).__module__.partition(".")[0] in ("torch", "zeroshard", "bitsandbytes")
    if not is_known or isinstance(optimizer, UsesNorms):
        return [groups]
    parts: dict[int, Lists] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for number, parameters in enumerate(groups):
            for p in parameters:
                if p.grad is not None:
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
def _only(optimizer: Optimizer, lists: Lists) -> Iterator[None]:
    """Leave these parameters in their groups."""
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


@contextmanager
def _widened(lists: Lists, starts: Starts, rounding: Rounding) -> Iterator[None]:
    """Hold values and gradients in float32; round the values at the end, unless it is an exception."""
    with torch._C.DisableTorchFunctionSubclass():
        stepped = [p for parameters in lists for p in parameters if p.grad is not None]
        narrow = [(p.detach(), p.grad) for p in stepped]
    try:
        for p, (main, grad) in zip(stepped, narrow, strict=True):
            assert grad is not None, "it is stepped because of it"
            _hold(p, main.float(), grad.float())
        yield
        with torch._C.DisableTorchFunctionSubclass():
            for p, (main, _) in zip(stepped, narrow, strict=True):
                round_into(main, p.detach(), rounding.key(p.fqn), starts[p])
    finally:
        for p, (main, grad) in zip(stepped, narrow, strict=True):
            _hold(p, main, grad)


def _hold(parameter: ShardedParameter, values: Tensor, grad: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None  # torch wants both in one dtype
        parameter.data = values
        parameter.grad = grad


def _load_states_wide(optimizer: Optimizer, parameters: Sequence[ShardedParameter]) -> None:
    """Let load_state_dict() keep states in float32: torch's gives them the dtype of their parameter."""
    load = optimizer.load_state_dict

    @functools.wraps(load)
    def load_wide(state_dict: dict[str, Any]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            narrow = [p.detach() for p in parameters]
            try:
                for p in parameters:
                    p.data = torch.empty((), dtype=torch.float32, device=p.device).expand(p.shape)
                load(state_dict)
            finally:
                for p, main in zip(parameters, narrow, strict=True):
                    p.data = main

    optimizer.load_state_dict = load_wide  # type: ignore[method-assign]
