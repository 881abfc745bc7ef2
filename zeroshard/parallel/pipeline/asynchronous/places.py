"""The places from which the units of this rank read the weights of an action, for each buffer one.

Gathered    a version is this rank's shard. The units gather it before each forward and backward, in the
            place of the main parameters, and free it after that. Weights that are moved along a direction
            are computed for each gather, and at stage 3 for each use by a rank that gathers nothing
Shown       a version is whole, as nothing is gathered. The parameters are views of it, without a copy.
            A step whose weights are used behind it writes into new memory, and leaves theirs as a version
Moved       the same for weights that are moved, where units stay whole: all actions read one copy, which is
            written where they differ. The weights of a forward and its backward share memory, so autograd
            finds the new ones
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from zeroshard.parallel.pipeline.asynchronous.directions import Change, moved, write_moved
from zeroshard.parallel.pipeline.asynchronous.uses import Use
from zeroshard.sharding.buffer import FlatBuffer


class Place:
    """The weights of one buffer; a subclass tells how the units get them.

    Args:
        buffer: the buffer.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer
        self._kept: dict[int, Tensor] = {}
        """Older versions by their numbers."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights here, beside the main parameters."""
        return sum(values.nbytes for values in self._kept.values())

    def begin(self, *, moves: bool) -> None:
        """Begin a list; `moves` if it has actions whose weights are moved."""

    def enter(self, use: Use, newest: int) -> None:
        """Let the units have the weights of an action.

        Args:
            use: the weights.
            newest: the number of the newest version.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Show the main parameters where units stay gathered: a step may call hooks of the user."""

    def drop(self, but: Collection[int]) -> None:
        """Drop versions that nobody uses any more."""
        for version in self._kept.keys() - but:
            del self._kept[version]

    def keep(self, newest: int) -> None:
        """Keep the newest version, before a step."""
        self._kept[newest] = _copy(self._buffer)

    def end(self) -> None:
        """Let the units have the main parameters again."""
        self._kept = {}
        self.rest()


class Gathered(Place):
    """The weights of a buffer that is gathered or computed before each action.

    Args:
        buffer: the buffer.
        change: the change of a step, if the method moves weights.
    """

    def __init__(self, buffer: FlatBuffer, change: Change | None) -> None:
        super().__init__(buffer)
        self._change = change

    def enter(self, use: Use, newest: int) -> None:
        """Let gathers start from the weights of an action; see `Place`."""
        if use.ahead and self._change is not None:
            self._buffer.use((newest, use.ahead), moved(self._buffer, self._change, use.ahead))
        elif use.version in (None, newest):
            self._buffer.use_main()
        else:
            self._buffer.use((use.version, 0), _give(self._kept[use.version]))

    def end(self) -> None:
        """Let the units have the main parameters again."""
        super().end()
        self._buffer.use_main()


class Shown(Place):
    """The weights of a buffer that shows versions, for a method that keeps them."""

    def enter(self, use: Use, newest: int) -> None:
        """Show the weights of an action; see `Place`."""
        if use.version is None or use.version == newest:
            self._buffer.show(None)
        else:
            self._buffer.show(self._kept[use.version])

    def rest(self) -> None:
        """Show the main parameters; see `Place`."""
        self._buffer.show(None)

    def keep(self, newest: int) -> None:
        """Keep the newest version, before a step; graphs have its memory if an action has read it."""
        self._kept[newest] = _copy(self._buffer) if self._buffer.is_stale else self._buffer.leave()


class Moved(Place):
    """The weights of a buffer that shows versions, for a method that moves them.

    Args:
        buffer: the buffer.
        change: the change of a step.
    """

    def __init__(self, buffer: FlatBuffer, change: Change) -> None:
        super().__init__(buffer)
        self._change = change
        self._copy: Tensor | None = None
        self._written: tuple[int, int] | None = None
        """The version that is in the copy, and by how many steps it is moved."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the copy."""
        return 0 if self._copy is None else self._copy.nbytes

    def begin(self, *, moves: bool) -> None:
        """Make the copy, if an action needs it."""
        self._copy, self._written = _copy(self._buffer) if moves else None, (0, 0)

    def rest(self) -> None:
        """Show the main parameters; see `Place`."""
        self._buffer.show(None)

    def enter(self, use: Use, newest: int) -> None:
        """Write the weights of an action into the copy; see `Place`."""
        self._buffer.show(self._copy)
        if self._copy is not None and self._written != (newest, use.ahead):
            write_moved(self._copy, self._buffer, self._change, use.ahead)
            self._written = newest, use.ahead

    def end(self) -> None:
        """Let the units have the main parameters again."""
        self._copy = None
        super().end()


def place_of(buffer: FlatBuffer, change: Change | None) -> Place:
    """Return the place of the weights of a buffer.

    Args:
        buffer: the buffer.
        change: the change of a step, if the method moves weights.
    """
    if not buffer.plan.shows_versions:
        return Gathered(buffer, change)
    return Shown(buffer) if change is None else Moved(buffer, change)


@torch.no_grad()
def _copy(buffer: FlatBuffer) -> Tensor:
    return buffer.main.detach().to(buffer.plan.compute_dtype, copy=True)


def _give(values: Tensor) -> Callable[[], Tensor]:
    return lambda: values
