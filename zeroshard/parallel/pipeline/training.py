"""Steps of a pipeline: the runner calls the sharded chunks of this rank.

The hooks of the sharding gather and free units around each forward and backward, as in any training. The
gradients of all micro-batches but the last are added up here, and the last backward reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.messages import Messages
from zeroshard.data.losses import LossFunction, loss_of
from zeroshard.data.microbatch import split_batch, to_device
from zeroshard.parallel.pipeline.actions import Action, Kind
from zeroshard.parallel.pipeline.part import Part
from zeroshard.parallel.pipeline.runner import Runner
from zeroshard.sharding.runtime import Runtime

_TAG = (1 << 16) - 2
"""The last two tags of an engine's range; buffers take the first ones."""


class Pipelined:
    """The chunks of this rank as a runner calls them.

    Args:
        part: the chunks and the schedule.
        runtime: the runtime of their sharding.
        loss_fn: (output, targets) -> loss; None: the model has one.
    """

    def __init__(self, part: Part, runtime: Runtime, loss_fn: LossFunction | None) -> None:
        self._part, self._runtime, self._loss_fn = part, runtime, loss_fn
        self._axes = runtime.context.axes
        self._runner = Runner(part.schedule, Messages(self._axes.pp, _TAG), self)
        ends = [action for action in part.schedule.lists[self._axes.pp.rank] if action.kind in _ENDS]
        self._end = ends[-1]
        """The action after which this rank has all gradients."""
        self._batch: list[tuple[Any, Any]] = []
        self._factor: Callable[[Tensor], Tensor] = lambda loss: loss
        self._losses: list[Tensor] = []
        self._action = self._end
        self.loss_scale = 1.0

    @property
    def num_microbatches(self) -> int:
        """The micro-batches of a step."""
        return self._part.schedule.num_microbatches

    def run(self, inputs: Any, targets: Any, *, loss_scale: float, is_half: bool) -> Tensor:
        """Compute the gradients of a batch.

        Args:
            inputs, targets: as `Engine.train_batch` has them; the same on all ranks of a pipeline.
            loss_scale: the factor of the loss.
            is_half: True if there is one.

        Returns:
            The mean loss over the micro-batches, 0-dim, on all ranks of the pipeline.
        """
        num, device = self.num_microbatches, self._runtime.context.device
        pieces = zip(split_batch(inputs, num), split_batch(targets, num), strict=True)
        self._batch = [(to_device(piece, device), to_device(target, device)) for piece, target in pieces]
        scale = (loss_scale if is_half else 1.0) / num
        self._factor, self.loss_scale = lambda loss: loss * scale, loss_scale
        self._losses = []
        try:
            self._runner.run(_shapes(self._batch))
        finally:
            self._batch = []
        total = torch.zeros((), dtype=torch.float32, device=device)
        for loss in self._losses:
            total += loss
        return self._axes.pp.sum(total / num, "mean loss of a pipeline")

    def forward(self, chunk: int, microbatch: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute a chunk; see `Chunks`."""
        piece, target = self._batch[microbatch]
        value = inputs[0] if inputs else None
        if chunk < self._part.schedule.num_chunks - 1:
            return [self._part.chunked(chunk, value, _named(piece))]

        def last(**kwargs: Any) -> Any:
            return self._part.chunked(chunk, value, kwargs)

        loss = loss_of(last, self._loss_fn, _named(piece), target)
        self._losses.append(loss.detach().float())
        return [self._factor(loss)]

    def backward(self, chunk: int, is_last: bool, run: Callable[[], None]) -> None:
        """Run the backward of a chunk; that of the last micro-batch reduces."""
        reducer, has_more = self._runtime.reducer, self._action != self._end
        with reducer.deferring(has_more), reducer.scaled(self.loss_scale):
            run()

    def act(self, action: Action) -> None:
        """Do nothing: the hooks gather, free and reduce."""

    def enter(self, action: Action) -> None:
        """Note the action that begins."""
        self._action = action


_ENDS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


def _named(piece: Any) -> Mapping[str, Any]:
    """The arguments of a model, by name."""
    return piece if isinstance(piece, Mapping) else {"input": piece}


def _shapes(value: Any) -> Any:
    """A value that tells the shapes of a batch."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, _shapes(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_shapes, value))
    return repr(value)
