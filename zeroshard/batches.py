"""The part of an engine that takes whole batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.checkpoint.save import Saver
from zeroshard.comm.mesh import Axes
from zeroshard.data.microbatch import LossFunction, loss_of, split_batch, to_device
from zeroshard.parallel.pipeline.training import PipelineTraining, next_batch
from zeroshard.parameters.state import refuse_averages, refuse_in_batch
from zeroshard.sharding.runtime import Runtime


class Batches:
    """Training and evaluation on batches that are cut into micro-batches here."""

    module: nn.Module
    loss_fn: LossFunction | None
    _runtime: Runtime
    _axes: Axes
    _pipeline: PipelineTraining | None
    _micro_step: int
    _num_micro_batches: int
    _boundary: bool | None
    _is_frozen_part: bool
    _saver: Saver
    global_step: int
    optimizer: Optimizer | None

    if TYPE_CHECKING:

        @property
        def loss_scale(self) -> float: ...

        def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> Tensor: ...

        def _step_in_list(self, around: AbstractContextManager[None]) -> None: ...

        def step(self) -> bool: ...

        def _watch(self, *values: Tensor | None) -> None: ...

    def train_batch(self, inputs: Any, targets: Any = None) -> Tensor:
        """Take one optimizer step on this rank's batch, cut along dim 0 into the micro-batches of a step.

        An asynchronous pipeline takes all steps of its list here, and is empty before and after it. Use
        `train_batches` to run many batches without a drain between them.

        Args:
            inputs: tensors [batch, ...]: one, a tuple of positional or a mapping of keyword arguments. Each
                micro-batch is copied to the engine's device; out of pinned memory, without a wait. All ranks
                of a pipeline, and all tensor ranks, get the same batch.
            targets: [batch, ...], the second argument of `loss_fn`. Without a `loss_fn` the model must
                return an object or mapping with a `loss`, and gets them as `labels`.

        Returns:
            The mean loss over all ranks and micro-batches; 0-dim, detached.

        Raises:
            ValueError: the batch does not divide into the micro-batches; there is no loss.
            RuntimeError: some of the accumulation steps were taken outside, or their end is set there.
        """
        self._check_batch("train_batch()")
        if self._is_asynchronous:
            return self.train_batches([(inputs, targets)])[0]
        if self._pipeline is not None:
            mean = self._mean(self._train_pipeline(self._pipeline, inputs, targets))
            self._watch(mean)
            return mean
        total = self._zero()
        for piece, target in self._pieces(inputs, targets):
            loss = loss_of(cast(Any, self), self.loss_fn, piece, target)
            total += self.backward(loss).float()
            self.step()
        return self._mean(total / self._num_micro_batches)

    def train_batches(self, batches: Iterable[Any], num_batches: int | None = None) -> Tensor:
        """Train on several batches, one after the other: the same as `train_batch` for each of them.

        An asynchronous pipeline runs them as one list, which drains at its end alone. A batch is taken from
        `batches` when the pipeline needs it. All batches of a call have the same shapes there.

        Args:
            batches: each one a tuple of the arguments of `train_batch`, or the inputs alone.
            num_batches: the batches to take; None: `len(batches)`.

        Returns:
            [num_batches], the loss of each batch as `train_batch` returns it.

        Raises:
            ValueError: there are fewer batches, or `batches` has no length and `num_batches` is None; see
                `train_batch`.
            RuntimeError: see `train_batch`.
        """
        self._check_batch("train_batches()")
        number = num_batches
        if number is None:
            if not isinstance(batches, Sized):
                raise ValueError(
                    f"train_batches(): expected num_batches, as {type(batches).__name__} has no length"
                )
            number = len(batches)
        if type(number) is not int or number < 1:
            raise ValueError(f"train_batches(): expected at least 1 batch, got {number!r}")
        taken, pipeline = iter(batches), self._pipeline
        if pipeline is None or not self._is_asynchronous:
            return torch.stack([self.train_batch(*next_batch(taken, i, number)) for i in range(number)])
        self._require_optimizer()
        self._saver.check(self._axes.world)
        num, steps = self._num_micro_batches, self.global_step
        means = self._mean(pipeline.run_steps(taken, number, num, steps, self._step_in_list))
        self._watch(means.sum())
        return means

    @property
    def _is_asynchronous(self) -> bool:
        return self._pipeline is not None and self._pipeline.method is not None

    def _check_batch(self, call: str) -> None:
        """Raise RuntimeError in the middle of a batch or a step, and where averages are shown."""
        refuse_in_batch(self._runtime.state, call)
        refuse_averages(self._runtime.state, call)
        if self._micro_step:
            raise RuntimeError(
                f"{call} after {self._micro_step} micro-batches of an unfinished step: end it with "
                "backward() and step(), or drop it with zero_grad()"
            )
        if self._boundary is not None:
            raise RuntimeError(f"{call} counts: call set_gradient_accumulation_boundary(None) before it")

    def _require_optimizer(self) -> None:
        if self.optimizer is None and not self._is_frozen_part:
            raise RuntimeError("train_batch() needs an optimizer: give one to zeroshard.initialize")

    def _train_pipeline(self, pipeline: PipelineTraining, inputs: Any, targets: Any) -> Tensor:
        """Run a batch of a pipeline and take the step."""
        self._require_optimizer()
        num, is_half = self._num_micro_batches, self._runtime.reducer.is_half
        mean = pipeline.run(inputs, targets, num, loss_scale=self.loss_scale, is_half=is_half)
        self._boundary, pipeline.is_stepping = True, True
        try:
            self.step()
        finally:
            self._boundary, pipeline.is_stepping = None, False
        return mean()  # ranks whose list ends early have stepped meanwhile

    @torch.no_grad()
    def eval_batch(self, inputs: Any, targets: Any = None) -> Tensor:
        """Return the mean loss of a batch, without gradients, in evaluation mode (no dropout); collective.

        Args:
            inputs: as in `train_batch`.
            targets: as in `train_batch`.

        Returns:
            The mean loss over all ranks and micro-batches; 0-dim.

        Raises:
            ValueError: the batch does not divide into the micro-batches; there is no loss.
            RuntimeError: another batch is under way, or a list of an asynchronous pipeline has failed.
        """
        refuse_in_batch(self._runtime.state, "eval_batch()")
        with _evaluating(self.module):
            if self._pipeline is not None:
                return self._mean(self._pipeline.evaluate(inputs, targets, self._num_micro_batches))
            total = self._zero()
            for piece, target in self._pieces(inputs, targets):
                total += loss_of(cast(Any, self), self.loss_fn, piece, target).float()
        return self._mean(total / self._num_micro_batches)

    def _pieces(self, inputs: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
        """The micro-batches, on the device."""
        num, device = self._num_micro_batches, self._runtime.context.device
        for piece, target in zip(split_batch(inputs, num), split_batch(targets, num), strict=True):
            yield to_device(piece, device), to_device(target, device)

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float32, device=self._runtime.context.device)

    def _mean(self, loss: Tensor) -> Tensor:
        return self._axes.dp.sum(loss, "mean of the loss") / self._axes.dp.size


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off the training mode of all modules, and give each its own back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
