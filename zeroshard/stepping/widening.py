"""The tiers of main parameters of bfloat16: an optimizer steps them in float32, or rounds by itself.

`Widening` serves any optimizer. For the time of a step a parameter holds its values and its gradient in
float32. It is the same object in the same group, so neither the optimizer nor its states need to know. Then
the values are rounded stochastically into the main parameter.

`InPlace` serves an optimizer that `RoundsItself`: nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.stepping.rounding import Bits, Rounding, round_into


class Widening:
    """Holds parts in float32.

    Args:
        starts: the first element of each slice, counted in the whole parameter.
        rounding: the rounding of all steps, which counts them.
    """

    def __init__(self, starts: Mapping[ShardedParameter, int], rounding: Rounding) -> None:
        self._starts, self._rounding = starts, rounding

    def expect(self, parts: Sequence[Sequence[ShardedParameter]]) -> None:
        """Do nothing: there is nothing to fetch ahead."""

    @contextmanager
    def fetched(self, parameters: Sequence[ShardedParameter]) -> Iterator[None]:
        """Hold values and gradients in float32; round the values at the end, but not after an exception."""
        with past_guards():
            narrow = [(p.detach(), gradient_of(p)) for p in parameters]
        try:
            for p, (main, grad) in zip(parameters, narrow, strict=True):
                assert grad is not None, "it is stepped because of it"
                _hold(p, main.float(), grad.float())
            yield
            with past_guards():
                for p, (main, _) in zip(parameters, narrow, strict=True):
                    round_into(main, p.detach(), self._rounding.key(name_of_part(p)), self._starts[p])
        finally:
            for p, (main, grad) in zip(parameters, narrow, strict=True):
                _hold(p, main, grad)

    def end_step(self) -> None:
        """Count a step."""
        self._rounding.step += 1


class InPlace:
    """Leaves parameters as they are, and tells the optimizer their random bits. Arguments as `Widening`."""

    def __init__(self, starts: Mapping[ShardedParameter, int], rounding: Rounding) -> None:
        self._starts, self._rounding = starts, rounding

    def bits_of(self, parameter: Tensor) -> Bits | None:
        """Return the random bits of a main parameter in this step; None for any other tensor."""
        if not isinstance(parameter, ShardedParameter) or parameter not in self._starts:
            return None
        return Bits(self._rounding.key(name_of_part(parameter)), self._starts[parameter])

    def expect(self, parts: Sequence[Sequence[ShardedParameter]]) -> None:
        """Do nothing: there is nothing to fetch ahead."""

    def fetched(self, parameters: Sequence[ShardedParameter]) -> AbstractContextManager[None]:
        """Fetch nothing."""
        return nullcontext()

    def end_step(self) -> None:
        """Count a step."""
        self._rounding.step += 1


def _hold(parameter: ShardedParameter, values: Tensor, grad: Tensor | None) -> None:
    with past_guards():
        parameter.grad = None  # torch wants both in one dtype
        parameter.data = values
        parameter.grad = grad


def load_states_wide(optimizer: Optimizer, parameters: Sequence[ShardedParameter]) -> None:
    """Let load_state_dict() keep states in float32: torch's gives them the dtype of their parameter."""
    load = optimizer.load_state_dict

    @functools.wraps(load)
    def load_wide(state_dict: dict[str, Any]) -> None:
        with past_guards():
            narrow = [p.detach() for p in parameters]
            try:
                for p in parameters:
                    p.data = torch.empty((), dtype=torch.float32, device=p.device).expand(p.shape)
                load(state_dict)
            finally:
                for p, main in zip(parameters, narrow, strict=True):
                    p.data = main

    optimizer.load_state_dict = load_wide  # type: ignore[method-assign]


def name_of_part(parameter: ShardedParameter) -> str:
    """The original name, with the number of a part: each part draws random bits of its own."""
    return parameter.fqn if parameter.cut is None else f"{parameter.fqn}:{parameter.tp_rank}"
