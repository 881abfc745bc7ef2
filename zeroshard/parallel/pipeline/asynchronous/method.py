"""An asynchronous method at work on one rank: versions, directions and corrections, action by action."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.optim import Optimizer

from zeroshard.config.pipeline import Pipeline
from zeroshard.parallel.pipeline.actions import Action, Schedule
from zeroshard.parallel.pipeline.asynchronous.corrected import Corrected, rescaled, spike_compensated
from zeroshard.parallel.pipeline.asynchronous.corrections import decay_of_changes
from zeroshard.parallel.pipeline.asynchronous.directions import Change, change_of
from zeroshard.parallel.pipeline.asynchronous.uses import WEIGHTS
from zeroshard.parallel.pipeline.asynchronous.versions import Delays, Versions, read_delays
from zeroshard.sharding.runtime import Runtime

_read_delays = functools.lru_cache(maxsize=32)(read_delays)


class AsynchronousMethod:
    """The method that a config names, for the chunk of this rank.

    Args:
        runtime: the runtime of its units.
        optimizer: its optimizer; None if all parameters of the rank are frozen.
        config: the config of the pipeline.
        rank: the pipeline rank.

    Raises:
        ValueError: the method does not go with the optimizer.
    """

    def __init__(self, runtime: Runtime, optimizer: Optimizer | None, config: Pipeline, rank: int) -> None:
        self._config, self._rank = config, rank
        self._change: Change | None = None
        self._corrected: Corrected | None = None
        if optimizer is not None:
            self._change = self._find_change(runtime, optimizer)
            self._corrected = self._find_correction(optimizer)
        self.versions = Versions(runtime, self._change) if config.has_versions else None
        """The versions of weights; None if all actions compute with the newest ones."""
        self._delays = Delays({}, (), (), 0)
        self._first = self._taken = 0
        """The steps of training before the list, and the steps of the list so far."""

    def _find_change(self, runtime: Runtime, optimizer: Optimizer) -> Change | None:
        direction = WEIGHTS[self._config.chosen_weights].direction
        if direction is None:
            return None
        buffers = [buffer for buffer in runtime.buffers if buffer.trainable]
        asked = f"pipeline.weights='{self._config.chosen_weights}'"
        return change_of(direction, optimizer, buffers, asked)

    def _find_correction(self, optimizer: Optimizer) -> Corrected | None:
        if self._config.chosen_correction == "rescale":
            return rescaled(optimizer, self._config.anneal_steps)
        return spike_compensated(optimizer) if self._config.chosen_correction == "spike" else None

    def check(self, schedule: Schedule) -> None:
        """Raise the errors of `read_delays` for a schedule."""
        self._read(schedule)

    def _read(self, schedule: Schedule) -> Delays:
        weights = self._config.chosen_weights
        bound = self._config.max_crossed_steps if weights == "bounded" else None
        return _read_delays(schedule, self._rank, weights, bound)

    @contextmanager
    def batch(self, schedule: Schedule, steps_taken: int) -> Iterator[None]:
        """Run the lists of a schedule.

        Args:
            schedule: the schedule.
            steps_taken: the steps of training before it.
        """
        self._delays, self._first, self._taken = self._read(schedule), steps_taken, 0
        with ExitStack() as stack:
            if self.versions is not None:
                stack.enter_context(self.versions.batch(self._delays))
            yield

    def enter(self, action: Action) -> None:
        """Let the units of this rank have the weights of a compute action that begins."""
        if self.versions is not None and action.is_compute:
            self.versions.enter(self._delays.uses[action])

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Correct the optimizer's step inside, and keep what later actions need of it."""
        number, delays = self._taken, self._delays
        with ExitStack() as stack:
            if self.versions is not None:
                stack.enter_context(self.versions.stepping())
            if self._change is not None and delays.most_crossed:
                decay = decay_of_changes(self._config.decay, delays.most_crossed)
                stack.enter_context(self._change.noting(decay))
            if self._corrected is not None:
                stack.enter_context(self._corrected(delays.taus[number], self._first + number))
            yield
        self._taken += 1
