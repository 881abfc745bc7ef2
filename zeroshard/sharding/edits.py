"""Edits of parameters in a forward: a moving average kept in the model, a weight normalized in place.

The unsharded parameters are copies, unless one buffer is both. So when a forward is over, a rank writes its
own slice of the edited parameters into the main parameters. Every edit counts a version of the parameter,
except one through `.data`, which a property of the class notes. The hot path compares versions.

torch takes several times as long to read an attribute of a subclass of Parameter. So parameters are plain
ones in the places that read many of them. At all other times uses of `.data` are noted: a backward may run a
part of a forward again or call the user's hooks, and other code runs while everything stays gathered.

As with DistributedDataParallel, each rank makes its own edits and nothing is sent. With replicated parameters
a rank computes with its own edit until the next step; then all ranks have the slices of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from zeroshard.comm import moves
from zeroshard.parameters.unsharded import UnshardedParameter
from zeroshard.sharding.buffer import FlatBuffer

_version_of = attrgetter("_version")


class Edits:
    """Notices and keeps the edits of one unit's unsharded parameters.

    Args:
        buffers: the buffers of the unit.
    """

    def __init__(self, buffers: Sequence[FlatBuffer]) -> None:
        self._buffers = list(buffers)
        self._parameters = [parameter for buffer in self._buffers for parameter in buffer.unsharded]
        self._notes = [buffer.data_note for buffer in self._buffers]
        self._versions = self._read_versions()

    def keep(self) -> None:
        """Write this rank's slices of parameters that were edited since the last call into the main ones.

        Raises:
            RuntimeError: the main parameter was edited too.
        """
        if self._read_versions() != self._versions:
            self._keep()
            return
        for note in self._notes:
            if note.is_taken:
                self._keep()
                return

    def _read_versions(self) -> list[int]:
        parameters = self._parameters
        for parameter in parameters:
            parameter.__class__ = nn.Parameter
        versions = list(map(_version_of, parameters))
        for parameter in parameters:
            parameter.__class__ = UnshardedParameter
        return versions

    @torch.no_grad()
    def _keep(self) -> None:
        seen = iter(zip(self._parameters, self._versions, strict=True))
        for buffer in self._buffers:
            is_taken, buffer.data_note.is_taken = buffer.data_note.is_taken, False
            for index in range(len(buffer.unsharded)):
                parameter, version = next(seen)
                if is_taken or parameter._version != version:
                    buffer.take_back(index)
                    if not buffer.plan.is_alias:  # else it shares its memory with the main parameters
                        _write_own(buffer, index)
        self._versions = self._read_versions()


def _write_own(buffer: FlatBuffer, index: int) -> None:
    """Write the edited elements of this rank's slice; the others keep their value to the last bit."""
    span = buffer.sharded_span(index)
    own = buffer.main[span.slice]
    seen = moves.beside(buffer.full[span.shifted(buffer.main_span.start).slice], own)
    buffer.await_copies()
    is_edited = seen != own.to(seen.dtype)
    if not buffer.is_stale:
        own.copy_(torch.where(is_edited, seen.to(own.dtype), own))
        buffer.follow_main()
    elif bool(is_edited.any()):
        raise RuntimeError(
            f"'{buffer.originals[index].fqn}' was edited in a forward that still computed with the values "
            "before an earlier edit: call the whole model's forward between the two edits"
        )
    buffer.rest()
