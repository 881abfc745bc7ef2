"""The methods of an engine that take whole batches, cut into micro-batches here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeroshard.data.microbatch import loss_of, micro_batches
from zeroshard.parallel.pipeline.profile import same_modes
from zeroshard.parallel.pipeline.training import PipelineTraining, next_batch
from zeroshard.parameters.state import IN_BATCH, Moment

if TYPE_CHECKING:
    from zeroshard.engine import Engine


def train_batch(engine: Engine, inputs: Any, targets: Any = None) -> Tensor:
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
    _check_batch(engine, "train_batch()")
    if engine._pipeline is not None:
        return _train_pipeline(engine, engine._pipeline, iter([(inputs, targets)]), 1)[0]
    total = _zero(engine)
    for piece, target in micro_batches((inputs, targets), engine._num_micro_batches, engine.device):
        loss = loss_of(engine, engine.loss_fn, piece, target)
        total += engine._backward(loss, engine._num_micro_batches, engine._early).float()
        engine.step()
    return _mean(engine, total / engine._num_micro_batches)


def train_batches(engine: Engine, batches: Iterable[Any], num_batches: int | None = None) -> Tensor:
    """Train on several batches, one after the other: the same as `train_batch` for each of them.

    An asynchronous pipeline runs them as one list, which drains at its end alone. A batch is taken from
    `batches` when the pipeline needs it. All batches of a call have the same shapes there.

    Args:
        batches: each one a tuple of the arguments of `train_batch`, or the inputs alone.
        num_batches: the batches to take; None: `len(batches)`.

    Returns:
        [num_batches], the loss of each batch as `train_batch` returns it.

    Raises:
        ValueError: there are fewer batches; see `train_batch`.
        TypeError: `batches` has no length and `num_batches` is None.
        RuntimeError: see `train_batch`.
    """
    _check_batch(engine, "train_batches()")
    number = len(batches) if num_batches is None else num_batches  # type: ignore[arg-type]
    if number < 1:
        raise ValueError(f"train_batches(): expected at least 1 batch, got {number!r}")
    taken, pipeline = iter(batches), engine._pipeline
    if pipeline is None or pipeline.method is None:
        return torch.stack([engine.train_batch(*next_batch(taken, i, number)) for i in range(number)])
    return _train_pipeline(engine, pipeline, taken, number)


def _check_batch(engine: Engine, call: str) -> None:
    """Raise RuntimeError in the middle of a batch or a step, and where averages are shown."""
    engine._runtime.state.refuse(call, *IN_BATCH, Moment.AVERAGED)
    if engine._micro_step:
        raise RuntimeError(
            f"{call} after {engine._micro_step} micro-batches of an unfinished step: end it with "
            "backward() and step(), or drop it with zero_grad()"
        )
    if engine._boundary is not None:
        raise RuntimeError(f"{call} counts: call set_gradient_accumulation_boundary(None) before it")


def _train_pipeline(
    engine: Engine, pipeline: PipelineTraining, batches: Iterator[Any], num_batches: int
) -> Tensor:
    """Take the steps of some batches; return the mean loss of each."""
    engine._runtime.state.refuse("train_batch()", Moment.NO_OPTIMIZER)
    engine._saver.check()
    losses = pipeline.train(
        batches,
        num_batches,
        engine._num_micro_batches,
        steps_taken=engine.global_step,
        loss_scale=engine.loss_scale if engine._runtime.reducer.is_half else None,
        take_step=engine._take_step,
    )
    means = _mean(engine, losses)
    engine.watch(means.sum())
    return means


@torch.no_grad()
def eval_batch(engine: Engine, inputs: Any, targets: Any = None) -> Tensor:
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
    engine._runtime.state.refuse("eval_batch()", *IN_BATCH)
    with same_modes(engine.module):
        engine.module.eval()
        if engine._pipeline is not None:
            return _mean(engine, engine._pipeline.evaluate(inputs, targets, engine._num_micro_batches))[0]
        total = _zero(engine)
        for piece, target in micro_batches((inputs, targets), engine._num_micro_batches, engine.device):
            total += loss_of(engine, engine.loss_fn, piece, target).float()
    return _mean(engine, total / engine._num_micro_batches)


def _zero(engine: Engine) -> Tensor:
    """A sum of losses: a loss of another shape is an error at once."""
    return torch.zeros((), dtype=torch.float32, device=engine._runtime.context.device)


def _mean(engine: Engine, loss: Tensor) -> Tensor:
    return engine._axes.dp.sum(loss, "mean of the loss")() / engine._axes.dp.size
