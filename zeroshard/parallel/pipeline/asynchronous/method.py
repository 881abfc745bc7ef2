"""An asynchronous method at work on one rank: versions, directions and corrections, action by action.

A version is this rank's shard of the weights, in the compute dtype. So a version of the W bytes of a stage
costs W / N on each of its N data-parallel ranks, if these divide the main parameters.

    an action          its units have the weights that it uses
    at a step          the version before it is kept, if an action after it uses that
    at the next steps  it is dropped when no action after them uses it

The lists of `ages.py` show which versions that are. Units gather a version before each forward and backward,
in the place of the main parameters, and free it after that; where all ranks have the whole weights, they copy
it. Weights that are moved along a direction are computed for each gather.

The directions along which weights are moved: the change that one step is taken to make; their arithmetic.

w   weights        g   gradient, weight decay included        v   momentum buffer, v = m v + g

The mean of changes and the last change are kept as states of the optimizer, one for each parameter. So
checkpoints, resharding and reports of memory know them without code of their own. The optimizer's own next
update is a direction, too; see `optim/asynchronous/`, which knows kinds of optimizers.

Habits that would give other numbers than the method names are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.config.pipeline import KEPT_WEIGHTS, NEWEST_WEIGHTS, NOTED_CHANGES
from zeroshard.internals.autograd import is_in_backward
from zeroshard.parallel.pipeline.actions import Action, Schedule
from zeroshard.parallel.pipeline.asynchronous.ages import WEIGHTS, Ages, Use, count_live, kept_versions
from zeroshard.parallel.pipeline.part import ModelPart
from zeroshard.parallel.pipeline.schedules import full_schedule_of
from zeroshard.parameters.sharded import ShardedParameter, gradient_of
from zeroshard.parameters.state import Moment
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.context import Changes
from zeroshard.sharding.runtime import Runtime
from zeroshard.stores.store import Store


def lr_factor(tau: float, step: int, anneal_steps: int | None) -> float:
    """Return the factor of the learning rate for stale gradients: 1 / tau^(1 - min(step / K, 1)).

    Args:
        tau: steps from a forward to the step with its gradient. Up to 1 the factor is 1.
        step: the steps before this one.
        anneal_steps: K, the steps after which the factor is 1 everywhere. None: it never changes.

    Source: Yang et al. 2021, "PipeMare: Asynchronous Pipeline Parallel DNN Training", technique 1.
    """
    power = 1.0 if anneal_steps is None else 1.0 - min(step / anneal_steps, 1.0)
    return float(max(tau, 1.0) ** -power)


def decay_of_changes(decay: float, crossed: int) -> float:
    """Return the decay of the mean of changes, D^(1 / (tau_forward - tau_backward)); 0 if none is crossed.

    Args:
        decay: D, from 0 to 1.
        crossed: tau_forward - tau_backward, in steps.

    Source: as `lr_factor`, technique 2.
    """
    return float(decay ** (1.0 / crossed)) if crossed else 0.0


def mean_of_changes(mean: Tensor, change: Tensor, decay: float) -> Tensor:
    """Return the mean of changes after one more: decay * mean + (1 - decay) * change, in place."""
    return mean.lerp_(change, 1.0 - decay)


def compensate(
    weights: Tensor, velocity: Tensor, gradient: Tensor, lr: float, momentum: float, delay: float
) -> Tensor:
    """Turn the step w - lr v, which was taken, into w - lr (a v + b g), for a delay of D steps; in place.

    Spike compensation with a momentum m below 1: a = m^D, and b = (1 - m^D) / (1 - m).

    Source: Kosson et al. 2021, "Pipelined Backpropagation at Scale", section 3.2, equation 12.
    """
    a = momentum**delay
    b = (1.0 - a) / (1.0 - momentum)
    return weights.add_(velocity, alpha=lr * (1.0 - a)).sub_(gradient, alpha=lr * b)


Corrected = Callable[[int, int], AbstractContextManager[None]]
"""(tau, step) -> a context for the optimizer's step: tau in steps, and the steps of training before it."""


class Change(Protocol):
    """The change of one step, of each parameter of the optimizer."""

    def move(self, parameter: ShardedParameter, weights: Tensor, ahead: int, out: Tensor) -> None:
        """Write a slice of the main parameters some steps ahead, weights + ahead * change.

        Args:
            parameter: the parameter.
            weights: its slice.
            ahead: the number of steps.
            out: like the slice, with memory of its own.
        """


class NotedChange:
    """The changes of the steps so far: their mean, or the last one.

    Args:
        optimizer: the optimizer, whose states they become.
        buffers: the trained buffers.
        name: the name of the state.
        decay: of the mean, D as in `decay_of_changes`; 0 for the last change.
    """

    def __init__(self, optimizer: Optimizer, buffers: Sequence[FlatBuffer], name: str, decay: float) -> None:
        self._optimizer, self._buffers = optimizer, buffers
        self._name, self._decay = name, decay

    def move(self, parameter: ShardedParameter, weights: Tensor, ahead: int, out: Tensor) -> None:
        """Write a slice some steps ahead; see `Change`."""
        change: Tensor | None = self._optimizer.state.get(parameter, {}).get(self._name)
        if change is None:
            out.copy_(weights)
        else:
            torch.add(weights, change.view_as(weights), alpha=ahead, out=out)

    @contextmanager
    @torch.no_grad()
    def noting(self, crossed: int) -> Iterator[None]:
        """Note the change of the step inside, of a rank that crosses so many steps."""
        decay = decay_of_changes(self._decay, crossed)
        before = [buffer.main.detach().clone() for buffer in self._buffers]
        yield
        stepped = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        for buffer, old in zip(self._buffers, before, strict=True):
            change = torch.sub(buffer.main.detach(), old, out=old)
            for index, parameter in enumerate(buffer.sharded):
                if id(parameter) in stepped:
                    self._note(parameter, change[buffer.sharded_span(index).slice], decay)

    def _note(self, parameter: ShardedParameter, change: Tensor, decay: float) -> None:
        # A state that is looked up is made, and an optimizer takes an empty one as the state of a first step.
        if self._name in self._optimizer.state.get(parameter, {}):
            mean = self._optimizer.state[parameter][self._name]
            mean_of_changes(mean, change.view_as(mean), decay)
        elif gradient_of(parameter) is not None:  # its first step
            self._optimizer.state[parameter][self._name] = change * (1.0 - decay)


class MovedWeights(NamedTuple):
    """The main parameters of a buffer some steps ahead, w + ahead * change; computed at a load."""

    buffer: FlatBuffer
    change: Change
    ahead: int

    @property
    def version(self) -> Hashable:
        """Equal where the values are the same."""
        return self.buffer.store.version, self.ahead

    @torch.no_grad()
    def load(self, out: Tensor) -> None:
        """Write them to memory like the main parameters, perhaps of another dtype."""
        main = self.buffer.main.detach()
        target = out if out.dtype == main.dtype else main.clone()  # padding too
        for index, parameter in enumerate(self.buffer.sharded):
            span = self.buffer.sharded_span(index).slice
            if target[span].numel():
                self.change.move(parameter, main[span], self.ahead, target[span])
        if target is not out:
            out.copy_(target)


class Delays(NamedTuple):
    """The delays of one pipeline rank in a list, as its methods use them."""

    uses: Mapping[Action, Use]
    """The weights of each of its compute actions."""
    kept: tuple[frozenset[int], ...]
    """For each of its steps, the older versions that are used after it."""
    taus: tuple[int, ...]
    """For each of its steps, the most steps since a forward whose gradient it applies."""


@functools.lru_cache(maxsize=32)
def read_delays(schedule: Schedule, rank: int, weights: str, max_crossed: int | None = None) -> Delays:
    """Return the delays of a pipeline rank with one chunk.

    Args:
        schedule: an asynchronous schedule.
        rank: the pipeline rank.
        weights: the name of a method in `WEIGHTS`.
        max_crossed: the most steps that may be crossed. None: any number.

    Raises:
        ValueError: a micro-batch crosses more steps on any rank; or an action of any rank uses a version that
            its chunk does not have yet; or a rank keeps more than two versions with "double".
    """
    ages, (chunk,) = Ages(schedule), schedule.chunks[rank]
    crossed = max(map(ages.most_crossed, range(schedule.num_chunks)))
    if max_crossed is not None and crossed > max_crossed:
        raise ValueError(
            f"pipeline.max_crossed_steps={max_crossed}: a micro-batch crosses {crossed} steps between its "
            "forward and its backward: take more micro-batches in each step (pipeline.microbatches_per_step)"
        )
    uses = WEIGHTS[weights](ages)
    for action, use in uses.items():
        if use.version is not None and use.version > ages.before[action]:
            raise ValueError(
                f"pipeline.weights={weights!r}: {action} uses the weights after step {use.version} of the "
                f"first pipeline rank, but comes after step {ages.before[action]} of its own: move that "
                "step before it in the lists of pipeline.schedule"
            )
    if weights == "double" and (live := max(count_live(ages, uses))) > 2:
        raise ValueError(
            f"pipeline.weights='double': a pipeline rank keeps {live} versions with this pipeline.schedule, "
            "and this method has two: let more micro-batches begin after each step, or take 'stash'"
        )
    kept = kept_versions(ages, rank, chunk, uses)
    own = {action: use for action, use in uses.items() if action.chunk == chunk}
    taus = tuple(ages.tau_of_step(chunk, step) for step in range(len(kept)))
    return Delays(own, kept, taus)


_REMEDY = "set pipeline.weights to 'stash', 'vertical' or 'double'"


def refuse_forwards_in_backward(modules: Iterable[nn.Module], changes: Changes, weights: str) -> None:
    """Refuse a forward inside a backward: it would have activations of the weights of the backward.

    Args:
        modules: the modules of this rank.
        changes: notes the hooks.
        weights: the method, which has other weights in the backward.
    """

    def check(module: nn.Module, args: Any) -> None:
        if is_in_backward():
            raise RuntimeError(
                f"the forward of {type(module).__name__} runs again inside the backward, where "
                f"pipeline.weights={weights!r} has other weights: turn checkpoints off, or {_REMEDY}"
            )

    for module in modules:
        if module._parameters:
            changes.hook(module.register_forward_pre_hook(check))


def noted_change(part: ModelPart) -> str | None:
    """Return the name of the state that a pipeline rank adds to its optimizer's states; None for none.

    A rank that crosses no steps has none.
    """
    name = NOTED_CHANGES.get(part.cut.pipeline.chosen_weights)
    return name if name is not None and _most_crossed(part) else None


def _most_crossed(part: ModelPart) -> int:
    """The most steps between a forward and its backward on a rank, while the pipeline is full.

    `train_batches` runs it so after the synchronous steps. The decay of changes is read from these: it
    belongs to the stage, and each step has the same one, in short lists and in synchronous steps, too.
    """
    (chunk,) = part.chunks
    return Ages(full_schedule_of(part.cut.pipeline, part.cut.num_ranks)).most_crossed(chunk)


class AsynchronousMethod:
    """The method that a config names, for the chunk of this rank.

    Args:
        runtime: the runtime of its units.
        part: the part of this rank.
        change: the change of a step, if the method moves weights.
        corrected: the correction of each step, if there is one.

    Raises:
        ValueError: see `read_delays`, for the lists of the config and the lists of a full pipeline.
    """

    def __init__(
        self, runtime: Runtime, part: ModelPart, change: Change | None, corrected: Corrected | None
    ) -> None:
        self._runtime, self._pipeline = runtime, part.cut.pipeline
        self._rank, weights = runtime.context.axes.pp.rank, self._pipeline.chosen_weights
        self._change, self._corrected = change, corrected
        is_newest = weights in NEWEST_WEIGHTS
        self._buffers = [] if is_newest else [buffer for buffer in runtime.buffers if buffer.trainable]
        """The buffers that have versions; none if all actions compute with the newest weights."""
        self._kept: dict[int, dict[FlatBuffer, Store]] = {}
        """Older versions by their numbers."""
        self.peak_bytes = 0
        """The most bytes of versions at a time since `reset_peak`."""
        if weights not in KEPT_WEIGHTS:
            refuse_forwards_in_backward(runtime.module.modules(), runtime.changes, weights)
        self._delays = self._read(part.schedule(self._pipeline.num_microbatches, has_backward=True))
        self._read(full_schedule_of(self._pipeline, part.cut.num_ranks))
        self._most_crossed = _most_crossed(part)
        self._first = self._taken = 0
        """The steps of training before the list, and the steps of the list so far."""
        self._has_begun = False
        """True if an action of the list has begun."""

    def reset_peak(self) -> None:
        """Count the most bytes of versions anew."""
        self.peak_bytes = self._num_bytes

    @property
    def _num_bytes(self) -> int:
        """The bytes of the versions other than the main parameters."""
        return sum(store.values.nbytes for kept in self._kept.values() for store in kept.values())

    def _read(self, schedule: Schedule) -> Delays:
        weights = self._pipeline.chosen_weights
        bound = self._pipeline.max_crossed_steps if weights == "bounded" else None
        return read_delays(schedule, self._rank, weights, bound)

    @contextmanager
    def batch(self, schedule: Schedule, steps_taken: int) -> Iterator[None]:
        """Run the lists of a schedule.

        Args:
            schedule: the schedule.
            steps_taken: the steps of training before it.

        Raises:
            RuntimeError: torch.autocast is on; or there are hooks of saved tensors, as of an activation
                checkpoint, which may give a backward a copy of a weight as it was in the forward.
        """
        if torch.is_autocast_enabled(self._runtime.context.device.type):
            raise RuntimeError(
                "train_batch() of an asynchronous pipeline inside torch.autocast, which keeps casts of the "
                "weights of an earlier version: set precision.param_dtype in the config instead"
            )
        self._delays, self._first, self._taken = self._read(schedule), steps_taken, 0
        self._has_begun = False
        weights = self._pipeline.chosen_weights
        unhooked: AbstractContextManager[None] = nullcontext()
        if weights not in KEPT_WEIGHTS:
            unhooked = torch.autograd.graph.disable_saved_tensors_hooks(
                "hooks of saved tensors, as of activation checkpoints and save_on_cpu, keep what a forward "
                f"had, and pipeline.weights={weights!r} has other weights in the backward: {_REMEDY}"
            )
        try:
            with unhooked:
                yield
        except BaseException:
            if self._has_begun:
                self._runtime.state.moments.add(Moment.BROKEN_LIST)
            raise
        finally:
            self._kept = {}
            for buffer in self._buffers:
                buffer.store.use()
            if self._buffers:
                self._runtime.passes.refresh()

    def enter(self, action: Action) -> None:
        """Let the units of this rank have the weights of a compute action that begins.

        Raises:
            RuntimeError: the action before it has edited weights that are not the main parameters.
        """
        self._has_begun = True
        if self._buffers and action.is_compute:
            self._runtime.check_edits()
            use = self._delays.uses[action]
            kept = None if use.version in (None, self._taken) else self._kept[use.version]
            for buffer in self._buffers:
                if use.ahead and self._change is not None:
                    buffer.store.use(MovedWeights(buffer, self._change, use.ahead))
                else:
                    buffer.store.use(None if kept is None else kept[buffer])
            self._runtime.passes.refresh()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Correct the optimizer's step inside, and keep the weights from before it that later actions use."""
        number, delays = self._taken, self._delays
        if self._buffers:
            self._runtime.check_edits()
        self._kept = {version: self._kept[version] for version in self._kept.keys() & delays.kept[number]}
        if number in delays.kept[number]:
            memory = self._runtime.context.memory
            self._kept[number] = {
                buffer: Store(buffer.main.detach().to(buffer.plan.compute_dtype, copy=True), memory)
                for buffer in self._buffers
            }
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        with ExitStack() as stack:
            if isinstance(self._change, NotedChange) and self._most_crossed:
                stack.enter_context(self._change.noting(self._most_crossed))
            if self._corrected is not None:
                stack.enter_context(self._corrected(delays.taus[number], self._first + number))
            yield
        self._taken += 1
