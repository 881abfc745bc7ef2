"""Edits of parameters in a forward: a moving average kept in the model, a weight normalized in place.

The unsharded parameters are copies, unless one buffer is both. So when a forward is over, a rank writes its
own slice of the edited parameters into the main parameters. Every edit counts a version of the parameter,
except one through `.data`, which a property of the class notes. A recurrent layer on a GPU gives its weights
other memory, which counts no version: cuDNN wants them in one piece. The hot path compares versions and
addresses.

torch takes several times as long to read an attribute of a subclass of Parameter. So its dispatch to
subclasses is off where many are read. At all other times uses of `.data` are noted: a backward may run a part
of a forward again or call the user's hooks, and other code runs while everything stays gathered.

As with DistributedDataParallel, each rank makes its own edits and nothing is sent. With replicated parameters
a rank computes with its own edit until the next step; then all ranks have the slices of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import attrgetter, methodcaller

import torch

from zeroshard.comm import moves
from zeroshard.internals.dispatch import past_guards
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.storage import is_allocated
from zeroshard.sharding.views import equal_values

_version_of = attrgetter("_version")
_address_of = methodcaller("data_ptr")


class Edits:
    """Notices and keeps the edits of one unit's unsharded parameters.

    Args:
        buffers: the buffers of the unit.
    """

    def __init__(self, buffers: Sequence[FlatBuffer]) -> None:
        self._buffers = list(buffers)
        self._parameters = [parameter for buffer in self._buffers for parameter in buffer.unsharded]
        self._notes = [buffer.data_note for buffer in self._buffers]
        self._filled = [[p for p in buffer.unsharded if p.numel()] for buffer in self._buffers]
        self._starts = [
            [
                offset * buffer.full.element_size()
                for offset, size in zip(buffer.layout.offsets, buffer.layout.sizes, strict=True)
                if size
            ]
            for buffer in self._buffers
        ]
        """The first byte of each parameter that has elements, in `full`."""
        self._bases, self._known = [-1] * len(self._buffers), list(self._starts)
        self._versions, _ = self._read()

    def keep(self) -> None:
        """Write this rank's slices of parameters that were edited since the last call into the main ones.

        Raises:
            RuntimeError: the main parameter was edited too.
        """
        versions, has_moved = self._read()
        if has_moved or versions != self._versions:
            self._keep(has_moved)
            return
        for note in self._notes:
            if note.is_taken:
                self._keep()
                return

    def _read(self) -> tuple[list[int], bool]:
        """The versions of all parameters, and whether some lie in other memory than `full`."""
        has_moved = False
        with past_guards():
            versions = list(map(_version_of, self._parameters))
            for number, buffer in enumerate(self._buffers):
                if is_allocated(buffer.full):
                    addresses = list(map(_address_of, self._filled[number]))
                    has_moved |= addresses != self._addresses(number, buffer.full.data_ptr())
        return versions, has_moved

    def _addresses(self, number: int, first: int) -> list[int]:
        """The addresses of the parameters of a buffer whose memory begins at `first`."""
        if self._bases[number] != first:
            self._bases[number] = first
            self._known[number] = [first + start for start in self._starts[number]]
        return self._known[number]

    @torch.no_grad()
    def _keep(self, has_moved: bool = False) -> None:
        seen = iter(zip(self._parameters, self._versions, strict=True))
        for buffer in self._buffers:
            is_taken, buffer.data_note.is_taken = buffer.data_note.is_taken, False
            counted = {
                index: parameter._version != version
                for index, (parameter, version) in enumerate(islice(seen, len(buffer.unsharded)))
            }
            edited = [index for index, is_edited in counted.items() if is_taken or has_moved or is_edited]
            moved = {index for index in edited if buffer.take_back(index)}
            if buffer.shows_other:
                _refuse_edits(buffer, [index for index in edited if counted[index] or index in moved])
            elif edited and not buffer.plan.is_alias:  # else they share their memory with the main parameters
                is_stale = buffer.is_stale
                for index in edited:
                    _write_own(buffer, index, is_stale)
                if not is_stale:  # only now: this may copy all main parameters into `full`
                    buffer.source.follow()
                buffer.source.rest()
        self._versions, _ = self._read()


def _refuse_edits(buffer: FlatBuffer, edited: Sequence[int]) -> None:
    """Refuse edits of other values than the main parameters.

    Args:
        buffer: the buffer, which shows the other values.
        edited: the places of parameters that are known to be edited. Those whose `.data` was taken are
            compared with the values that they had then.

    Raises:
        RuntimeError: there are edits.
    """
    names = [buffer.originals[index].fqn for index in edited]
    before, buffer.data_note.before = buffer.data_note.before or {}, {}
    for parameter in buffer.unsharded if before else ():
        values = before.get(fqn := getattr(parameter, "fqn", ""))
        if values is not None and not equal_values(parameter.detach(), values):
            names.append(fqn)
    if names:
        raise RuntimeError(
            f"'{names[0]}' was edited in a forward, which computed with a version of "
            "it, and versions do not change: edit main parameters between batches, or choose a method that "
            "computes with the newest weights, such as pipeline.schedule='pb'"
        )


def _write_own(buffer: FlatBuffer, index: int, is_stale: bool) -> None:
    """Write the edited elements of this rank's slice; the others keep their value to the last bit.

    Args:
        buffer: the buffer of the parameter.
        index: its place there.
        is_stale: True if main parameters have other values than those that the forward has edited.

    Raises:
        RuntimeError: they do, and there are edits.
    """
    span = buffer.sharded_span(index)
    own = buffer.main[span.slice]
    seen = moves.beside(buffer.full[span.shifted(buffer.main_span.start).slice], own)
    buffer.source.await_copies()
    is_edited = seen != own.to(seen.dtype)
    if not is_stale:
        own.copy_(torch.where(is_edited, seen.to(own.dtype), own))
    elif bool(is_edited.any()):
        raise RuntimeError(
            f"'{buffer.originals[index].fqn}' was edited in a forward that still computed with the values "
            "before an earlier edit: call the whole model's forward between the two edits"
        )
