"""The micro-batches of a list: a batch is loaded when a forward needs its first micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A micro-batch."""

    arguments: Mapping[str, Any]
    """The arguments of the model, by name."""
    target: Any


class Feed:
    """The micro-batches of one list, in order.

    Args:
        first: those of the first batch.
        load: loads the batches behind it, in turns; None if there are none.
    """

    def __init__(
        self, first: Sequence[Piece] = (), load: Callable[[], Sequence[Piece]] | None = None
    ) -> None:
        self._pieces, self._load = first, load
        self._start = 0
        """The micro-batches before those of `_pieces`."""

    def __getitem__(self, microbatch: int) -> Piece:
        """Return a micro-batch; those of earlier batches than its own are gone afterwards."""
        while microbatch >= self._start + len(self._pieces):
            assert self._load is not None, "a list has no more micro-batches than its batches"
            self._start += len(self._pieces)
            self._pieces = self._load()
        return self._pieces[microbatch - self._start]


def next_batch(batches: Iterator[Any], number: int, num_batches: int) -> tuple[Any, Any]:
    """Return the inputs and the targets of the next batch.

    Args:
        batches: tuples of inputs and targets, or inputs alone.
        number: the number of the batch, from 0.
        num_batches: the batches that there must be.

    Raises:
        ValueError: there is no such batch, or it is a tuple of another length.
    """
    try:
        batch = next(batches)
    except StopIteration:
        raise ValueError(f"expected {num_batches} batches, got {number}") from None
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) not in (1, 2):
        raise ValueError(
            f"batch {number}: expected (inputs, targets) or the inputs alone, got a {type(batch).__name__} "
            f"of {len(batch)}; put several inputs into a tuple or a mapping of their own"
        )
    return batch[0], batch[1] if len(batch) == 2 else None
