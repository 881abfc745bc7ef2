"""The direction and the correction that a config chooses, for the optimizer that there is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.config.pipeline import NOTED_CHANGES, Pipeline
from zeroshard.optim.asynchronous.corrected import rescaled, spike_compensated
from zeroshard.optim.asynchronous.updates import update_of
from zeroshard.parallel.pipeline.asynchronous.directions import Change, Corrected, NotedChange
from zeroshard.parallel.pipeline.asynchronous.uses import WEIGHTS, Direction
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.buffer import FlatBuffer


class Chosen(NamedTuple):
    """The parts of a method that depend on the optimizer."""

    change: Change | None = None
    """The change of a step, along which weights are moved; None if they never are."""
    corrected: Corrected | None = None
    """The correction of each step; None for none."""


class UpdateChange:
    """The next update of the optimizer; see `updates.py`.

    Args:
        optimizer: the optimizer.
        asked: the config key with its value, for errors.

    Raises:
        ValueError: see `update_of`.
    """

    def __init__(self, optimizer: Optimizer, asked: str) -> None:
        self._optimizer, self._asked = optimizer, asked
        self._places: dict[int, int] = {}
        """The place of the group of each parameter: a load puts other groups into the same places."""
        self._read_groups()

    def move(self, parameter: ShardedParameter, weights: Tensor, ahead: int, out: Tensor) -> None:
        """Write a slice some steps ahead; see `Change`."""
        groups = self._optimizer.param_groups
        is_known = id(parameter) in self._places
        if not is_known and sum(len(group["params"]) for group in groups) != len(self._places):
            self._read_groups()  # after a later add_param_group
        if (place := self._places.get(id(parameter))) is None:
            out.copy_(weights)
        else:
            self._update(weights, groups[place], self._optimizer.state.get(parameter, {}), ahead, out)

    def _read_groups(self) -> None:
        groups = self._optimizer.param_groups
        self._update = update_of(self._optimizer, self._asked)
        self._places = {id(p): number for number, group in enumerate(groups) for p in group["params"]}

    def noting(self, decay: float) -> AbstractContextManager[None]:
        """Note nothing: the optimizer does."""
        return nullcontext()


def chosen_by(config: Pipeline, optimizer: Optimizer | None, buffers: Sequence[FlatBuffer]) -> Chosen:
    """Return the parts that a config chooses.

    Args:
        config: the config of a pipeline.
        optimizer: the optimizer of this rank; None if all of its parameters are frozen.
        buffers: the trained buffers.

    Raises:
        ValueError: the method does not go with the optimizer; see `update_of`, `rescaled` and
            `spike_compensated`.
    """
    if optimizer is None or not config.is_asynchronous:
        return Chosen()
    corrected = None
    if config.chosen_correction == "rescale":
        corrected = rescaled(optimizer, config.anneal_steps)
    elif config.chosen_correction == "spike":
        corrected = spike_compensated(optimizer)
    return Chosen(_change(config.chosen_weights, optimizer, buffers), corrected)


def _change(weights: str, optimizer: Optimizer, buffers: Sequence[FlatBuffer]) -> Change | None:
    direction = WEIGHTS[weights].direction
    if direction is None:
        return None
    if direction is Direction.UPDATE:
        return UpdateChange(optimizer, f"pipeline.weights={weights!r}")
    is_mean = direction is Direction.MEAN_CHANGE
    return NotedChange(optimizer, buffers, NOTED_CHANGES[weights], is_mean=is_mean)
