"""An asynchronous method at work on one rank: versions, directions and corrections, action by action.

Habits that would give other numbers than the method names are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zeroshard.config.pipeline import KEPT_WEIGHTS, NEWEST_WEIGHTS, NOTED_CHANGES
from zeroshard.config.sections import Config
from zeroshard.internals.autograd import is_in_backward
from zeroshard.parallel.pipeline.actions import Action, Schedule
from zeroshard.parallel.pipeline.asynchronous.ages import Ages
from zeroshard.parallel.pipeline.asynchronous.versions import (
    Change,
    Corrected,
    Delays,
    NotedChange,
    WeightsPlace,
    decay_of_changes,
    read_delays,
)
from zeroshard.parallel.pipeline.choice import full_schedule_of
from zeroshard.sharding.changes import Changes
from zeroshard.sharding.runtime import Runtime


def refuse_weights_of_forwards(
    modules: Iterable[nn.Module], changes: Changes, weights: str
) -> set[nn.Module]:
    """Refuse habits that give a backward the weights or the activations of another moment than the method.

    A second forward inside a backward would have activations of the weights of the backward. A hook of saved
    tensors may give the backward a copy of a weight, as it was in the forward: each layer is looked at once,
    in its first forward with a graph.

    Args:
        modules: the modules of this rank.
        changes: notes the hooks.
        weights: the method, which has other weights in the backward.

    Returns:
        The layers that were looked at. They are looked at again if the caller clears the set.
    """
    seen: set[nn.Module] = set()
    looking: list[nn.Module] = []
    """The layer that is looked at: an activation checkpoint runs its forward again to show what it saves."""

    def check(module: nn.Module, args: Any) -> None:
        if looking or is_in_backward():
            raise RuntimeError(
                f"an activation checkpoint runs the forward of {type(module).__name__} again inside the "
                f"backward, where pipeline.weights={weights!r} has other weights: turn checkpoints off, or "
                "set pipeline.weights to 'stash', 'vertical' or 'double'"
            )
        if module in seen or not torch.is_grad_enabled():
            return
        seen.add(module)
        looking.append(module)
        try:
            copied = _saved_as_copy(module)
        finally:
            looking.clear()
        if copied is not None:
            raise RuntimeError(
                f"hooks of saved tensors, such as save_on_cpu, give the backward a copy of {copied!r} of "
                f"{type(module).__name__} from its forward, where pipeline.weights={weights!r} has other "
                "weights: let the hooks return parameters as they are, or set pipeline.weights to 'stash', "
                "'vertical' or 'double'"
            )

    for module in modules:
        if module._parameters:
            changes.hook(module.register_forward_pre_hook(check))
    return seen


def _saved_as_copy(module: nn.Module) -> str | None:
    """Return the name of a parameter if autograd saves a copy of it now; else None."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.requires_grad and parameter.numel():
            saved = torch.linalg.vector_norm(parameter).grad_fn._saved_self
            return name if saved.data_ptr() != parameter.data_ptr() else None
    return None


_read_delays = functools.lru_cache(maxsize=32)(read_delays)


def noted_change(config: Config, rank: int) -> str | None:
    """Return the name of the state that a pipeline rank adds to its optimizer's states; None for none.

    A rank that crosses no steps has none.
    """
    name = NOTED_CHANGES.get(config.pipeline.chosen_weights)
    return name if name is not None and _most_crossed(config, rank) else None


def _most_crossed(config: Config, rank: int) -> int:
    """The most steps between a forward and its backward on a rank, while the pipeline is full.

    `train_batches` runs it so after the synchronous steps. The decay of changes is read from these: it
    belongs to the stage, and each step has the same one, in short lists and in synchronous steps, too.
    """
    full = full_schedule_of(config)
    (chunk,) = full.chunks[rank]
    return Ages(full).most_crossed(chunk)


class AsynchronousMethod:
    """The method that a config names, for the chunk of this rank.

    Args:
        runtime: the runtime of its units.
        config: the config.
        schedule: the lists of the config.
        change: the change of a step, if the method moves weights.
        corrected: the correction of each step, if there is one.

    Raises:
        ValueError: see `read_delays`, for the lists of the config and the lists of a full pipeline.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        schedule: Schedule,
        change: Change | None,
        corrected: Corrected | None,
    ) -> None:
        self._runtime, self._config = runtime, config.pipeline
        self._rank, weights = runtime.context.axes.pp.rank, config.pipeline.chosen_weights
        self._change, self._corrected = change, corrected
        versioned = [] if weights in NEWEST_WEIGHTS else [b for b in runtime.buffers if b.trainable]
        self._places = [WeightsPlace(buffer, change, runtime.context.memory) for buffer in versioned]
        """The buffers that have versions; none if all actions compute with the newest weights."""
        self.peak_bytes = 0
        """The most bytes of versions at a time since `reset_peak`."""
        self._looked_at: set[nn.Module] = set()
        """The layers for which no hooks of saved tensors were found in this list."""
        if weights not in KEPT_WEIGHTS:
            layers = list(runtime.module.modules())
            self._looked_at = refuse_weights_of_forwards(layers, runtime.changes, weights)
        self._delays = self._read(schedule)
        self._read(full_schedule_of(config))
        self._most_crossed = _most_crossed(config, self._rank)
        self._first = self._taken = 0
        """The steps of training before the list, and the steps of the list so far."""
        self._has_begun = False
        """True if an action of the list has begun."""

    def reset_peak(self) -> None:
        """Count the most bytes of versions anew."""
        self.peak_bytes = sum(place.num_bytes for place in self._places)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(place.num_bytes for place in self._places))

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

        Raises:
            RuntimeError: torch.autocast is on.
        """
        if torch.is_autocast_enabled(self._runtime.context.device.type):
            raise RuntimeError(
                "train_batch() of an asynchronous pipeline inside torch.autocast, which keeps casts of the "
                "weights of an earlier version: set precision.param_dtype in the config instead"
            )
        self._delays, self._first, self._taken = self._read(schedule), steps_taken, 0
        self._has_begun = False
        self._looked_at.clear()
        moves = any(use.ahead for use in self._delays.uses.values())
        try:
            for place in self._places:
                place.begin(moves=moves)
            self._note_peak()
            yield
        except BaseException:
            self._runtime.state.has_failed_in_list = self._has_begun
            raise
        finally:
            for place in self._places:
                place.end()
            if self._places:
                self._runtime.passes.refresh()

    def enter(self, action: Action) -> None:
        """Let the units of this rank have the weights of a compute action that begins.

        Raises:
            RuntimeError: the action before it has edited weights that are not the main parameters.
        """
        self._has_begun = True
        if self._places and action.is_compute:
            self._runtime.check_edits()
            for place in self._places:
                place.enter(self._delays.uses[action], self._taken)
            self._runtime.passes.refresh()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Correct the optimizer's step inside, and keep the weights from before it that later actions use."""
        number, delays = self._taken, self._delays
        if self._places:
            self._runtime.check_edits()
        for place in self._places:
            place.step(number, delays.kept[number])
        self._note_peak()
        with ExitStack() as stack:
            if isinstance(self._change, NotedChange) and self._most_crossed:
                decay = decay_of_changes(self._config.decay, self._most_crossed)
                stack.enter_context(self._change.noting(decay))
            if self._corrected is not None:
                stack.enter_context(self._corrected(delays.taus[number], self._first + number))
            yield
        self._taken += 1
