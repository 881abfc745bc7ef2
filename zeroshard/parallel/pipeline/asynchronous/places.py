"""The places from which the units of this rank read the weights of an action, for each buffer one.

Gathered    a version is this rank's shard. The units gather it before each forward and backward, in the
            place of the main parameters, and free it after that
Shown       a version is whole, as nothing is gathered. The parameters are views of it, without a copy.
            The newest weights are the main parameters themselves, if no action behind the next step uses
            them; else a copy is made at the first action, which is the kept version later
Moved       the same for weights that are moved along a direction: all actions read one copy, which is
            written where they differ. The weights of a forward and its backward share memory, so autograd
            finds the new ones
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.parallel.pipeline.asynchronous.directions import Change, moved, write_moved
from zeroshard.parallel.pipeline.asynchronous.uses import Use
from zeroshard.sharding.buffer import FlatBuffer


class Place(Protocol):
    """The weights of one buffer."""

    kept: dict[int, Tensor]
    """Older versions, and perhaps the newest one, by their numbers."""

    def begin(self, *, moves: bool) -> None:
        """Begin a list; `moves` if it has actions whose weights are moved."""

    def enter(self, use: Use, newest: int, *, is_kept: bool) -> None:
        """Let the units have the weights of an action.

        Args:
            use: the weights.
            newest: the number of the newest version.
            is_kept: True if it is used behind the next step.
        """

    def keep(self, newest: int) -> None:
        """Keep the newest version, before a step."""

    def end(self) -> None:
        """Let the units have the main parameters again."""


class Gathered:
    """The weights of a buffer that is gathered before each action.

    Args:
        buffer: the buffer.
        change: the change of a step, if the method moves weights.
    """

    def __init__(self, buffer: FlatBuffer, change: Change | None) -> None:
        self._buffer, self._change = buffer, change
        self.kept: dict[int, Tensor] = {}

    def begin(self, *, moves: bool) -> None:
        """Begin a list."""

    def enter(self, use: Use, newest: int, *, is_kept: bool) -> None:
        """Let gathers start from the weights of an action; see `Place`."""
        if use.ahead and self._change is not None:
            self._buffer.use((newest, use.ahead), moved(self._buffer, self._change, use.ahead))
        elif use.version in (None, newest):
            self._buffer.use_main()
        else:
            self._buffer.use((use.version, 0), _give(self.kept[use.version]))

    def keep(self, newest: int) -> None:
        """Copy the main parameters."""
        self.kept[newest] = _copy(self._buffer)

    def end(self) -> None:
        """Let gathers start from the main parameters."""
        self.kept = {}
        self._buffer.use_main()


class Shown:
    """The weights of a buffer that shows versions, for a method that keeps them.

    Args:
        buffer: the buffer.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer
        self.kept: dict[int, Tensor] = {}

    def begin(self, *, moves: bool) -> None:
        """Begin a list."""

    def enter(self, use: Use, newest: int, *, is_kept: bool) -> None:
        """Show the weights of an action; see `Place`."""
        version = newest if use.version is None else use.version
        if version == newest and not is_kept:
            self._buffer.show(None)  # all graphs over this memory end before the step that changes it
            return
        if version == newest:
            self.keep(newest)
        self._buffer.show(self.kept[version])

    def keep(self, newest: int) -> None:
        """Copy the main parameters, unless an action has computed with such a copy."""
        if newest not in self.kept:
            self.kept[newest] = _copy(self._buffer)

    def end(self) -> None:
        """Show the main parameters."""
        self.kept = {}
        self._buffer.show(None)


class Moved:
    """The weights of a buffer that shows versions, for a method that moves them.

    Args:
        buffer: the buffer.
        change: the change of a step.
    """

    def __init__(self, buffer: FlatBuffer, change: Change) -> None:
        self._buffer, self._change = buffer, change
        self.kept: dict[int, Tensor] = {}
        self._copy: Tensor | None = None
        self._written: tuple[int, int] | None = None
        """The version that is in the copy, and by how many steps it is moved."""

    def begin(self, *, moves: bool) -> None:
        """Make the copy, if an action needs it."""
        self._copy, self._written = _copy(self._buffer) if moves else None, (0, 0)
        self._buffer.show(self._copy)

    def enter(self, use: Use, newest: int, *, is_kept: bool) -> None:
        """Write the weights of an action into the copy; see `Place`."""
        if self._copy is not None and self._written != (newest, use.ahead):
            write_moved(self._copy, self._buffer, self._change, use.ahead)
            self._written = newest, use.ahead

    def keep(self, newest: int) -> None:
        """Nothing is kept: all weights are made of the newest ones."""

    def end(self) -> None:
        """Show the main parameters."""
        self._copy = None
        self._buffer.show(None)


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
