"""Edits of parameters in a forward or backward, which are refused if the next gather would overwrite them.

Versions and addresses of a unit's parameters are compared with those of the last look. `.data` shares the
version of its parameter. No value is compared: the answer is the same on all ranks, whose slices differ.
Where modules compute with the main parameters themselves, an edit is kept, as in DistributedDataParallel.
Equal values in other memory are no edit: a recurrent layer on a GPU moves its weights into one piece of
memory for cuDNN, and counts no version.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller

import torch

from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.unsharded import edit_error, equal_values, set_data
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.storage import is_allocated

_version_of = attrgetter("_version")
_address_of = methodcaller("data_ptr")


class Edits:
    """Notices edits of one unit's unsharded parameters.

    Args:
        buffers: the buffers of the unit.
    """

    def __init__(self, buffers: Sequence[FlatBuffer]) -> None:
        self._buffers = tuple(buffers)
        self._parameters = [parameter for buffer in buffers for parameter in buffer.unsharded]
        self._versions = list(map(_version_of, self._parameters))
        self._filled = [[p for p in buffer.unsharded if p.numel()] for buffer in buffers]
        self._starts = [
            [
                start * buffer.full.element_size()
                for start, size in zip(buffer.layout.offsets, buffer.layout.sizes, strict=True)
                if size
            ]
            for buffer in buffers
        ]
        """The first byte in `full` of each parameter that has elements."""

    def check(self) -> None:
        """Compare the parameters with those of the last look.

        Raises:
            RuntimeError: one was edited since, in memory of its own. It is gathered again.
        """
        # torch takes several times as long to read an attribute of a subclass of Parameter.
        with past_guards():
            versions = list(map(_version_of, self._parameters))
            moved = [buffer for number, buffer in enumerate(self._buffers) if self._has_moved(number, buffer)]
        if moved or versions != self._versions:
            self._refuse(versions, moved)

    def _has_moved(self, number: int, buffer: FlatBuffer) -> bool:
        if not is_allocated(buffer.full):
            return False
        first = buffer.full.data_ptr()
        addresses = [first + start for start in self._starts[number]]
        return list(map(_address_of, self._filled[number])) != addresses

    @torch.no_grad()
    def _refuse(self, versions: list[int], moved: Sequence[FlatBuffer]) -> None:
        before, now = iter(self._versions), iter(versions)
        self._versions, lost = versions, []
        for buffer in self._buffers:
            for index, parameter in enumerate(buffer.unsharded):
                is_lost = next(before) != next(now) and not buffer.shows_main
                if buffer in moved:
                    values, view = parameter.detach(), buffer.view(index)
                    set_data(parameter, view)
                    is_lost |= not equal_values(values, view)
                if is_lost:
                    buffer.source.changed()
                    lost.append(parameter.fqn)
        if lost:
            raise edit_error(lost[0])
