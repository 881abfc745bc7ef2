"""The ranks of a pipeline compare their batches: shapes always, values now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Axis
from zeroshard.parallel.pipeline.chunked import surroundings_of, tell_hooked

_NUM_BITS = 32
"""Bits of the checksum that pipeline ranks compare."""


class Comparison:
    """Compares the batches of the ranks of one pipeline.

    Args:
        axis: these ranks.
        parameters: the parameters of this rank.
        containers: modules that must not get hooks from now on, with their names.
    """

    def __init__(
        self, axis: Axis, parameters: Iterable[nn.Parameter], containers: Iterable[tuple[str, nn.Module]]
    ) -> None:
        self._axis, self._parameters = axis, tuple(parameters)
        self._containers = [(name, one, surroundings_of(one)) for name, one in containers]
        """Each with the hooks that it had at the start: the engine's."""
        self._num_batches = self._num_changes = 0
        self._trained: Any = None
        """The parameters and inputs that need a gradient."""
        self._noted = 0
        """The checksum of batches that are to be compared later."""

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Begin to compare a batch; collective.

        Returns:
            A function that waits for the answer. It returns a value that all ranks have alike: where they
            had it before, the tensors between chunks have the forms that they had then. It raises a
            RuntimeError if the batches differ, or if a container was given hooks.
        """
        shapes = shapes_of(batch)
        value = crc32(repr(shapes).encode())
        if self._counts():
            value = _checksum(batch, value)
        trained = tuple(p.requires_grad for p in self._parameters), _trained_in(batch)
        has_changed, self._trained = self._trained not in (None, trained), trained
        hooked = [name for name, one, known in self._containers if surroundings_of(one) != known]
        flags = *_flags(value), has_changed, bool(hooked)
        answer = self._axis.any(flags, "comparison of the batches of a pipeline")

        def agree() -> Any:
            *found, any_has_changed, any_is_hooked = answer()
            if any_is_hooked:
                raise RuntimeError(tell_hooked(*hooked[:1]))
            self._num_changes += any_has_changed  # then activations may need gradients that did not before
            self._refuse_others(found)
            return self._num_changes, shapes

        return agree

    def note(self, batch: Any) -> None:
        """Note a batch that is used while other ranks are at other ones; `check_noted` compares it."""
        if self._counts():
            self._noted = _checksum(batch, self._noted)

    def check_noted(self) -> None:
        """Compare the batches that were noted; collective.

        Raises:
            RuntimeError: they differ.
        """
        value, self._noted = self._noted, 0
        self._refuse_others(self._axis.any(_flags(value), "comparison of the batches of a list")())

    def _counts(self) -> bool:
        """Count a batch; True if its values are compared: those of batches 1, 2, 4, 8 and so on."""
        self._num_batches += 1
        return not self._num_batches & (self._num_batches - 1)

    def _refuse_others(self, found: list[bool]) -> None:
        if any(one and other for one, other in zip(found[:_NUM_BITS], found[_NUM_BITS:], strict=True)):
            raise RuntimeError(
                f"pipeline ranks {list(self._axis.global_ranks)} have different batches: expected "
                "the same inputs and targets on all of them. Choose samples by engine.dp_rank and "
                "engine.dp_world_size, not by the global rank"
            )


def _flags(value: int) -> list[bool]:
    """The bits of a number, and their inverses: ranks have different ones if a bit is set in both."""
    bits = [bool(value >> bit & 1) for bit in range(_NUM_BITS)]
    return [*bits, *(not bit for bit in bits)]


def shapes_of(value: Any) -> Any:
    """Return a value that tells the shapes of a batch."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, shapes_of(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(shapes_of, value))
    return repr(value) if isinstance(value, bool | int | str | None) else type(value).__name__


def _trained_in(value: Any) -> Any:
    """A value that tells which tensors of a batch need a gradient."""
    if isinstance(value, Mapping):
        return tuple(map(_trained_in, value.values()))
    if isinstance(value, list | tuple):
        return tuple(map(_trained_in, value))
    return isinstance(value, Tensor) and value.requires_grad


def _checksum(value: Any, start: int) -> int:
    """The crc32 of all tensors of a batch."""
    if isinstance(value, Tensor):
        memory = value.detach().contiguous().view(-1).view(torch.uint8).cpu()
        return crc32(memory.numpy().data, start)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for item in items:
        start = _checksum(item, start)
    return start
