"""Values that travel between ranks, over Gloo, beside everything that streams do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretend.trace import Trace

LIMIT = timedelta(seconds=40)
"""How long a value may take; after that, ranks wait for each other."""


class Transfer:
    """Messages under way. They are copies: the memory they come from and go to may be freed meanwhile."""

    def __init__(
        self,
        trace: Trace,
        group: dist.ProcessGroup,
        tag: int,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        adds: bool,
        what: str,
    ) -> None:
        self.on_finished: Callable[[], object] = object
        self._trace, self._adds, self._what = trace, adds, what
        rank = group.rank()
        self._parts = {
            source: sent[rank].clone() if source == rank else torch.empty_like(target)
            for source, target in received.items()
        }
        self._places = {source: _Place(target, trace) for source, target in received.items()}
        self._outgoing = {peer: tensor.contiguous().clone() for peer, tensor in sent.items() if peer != rank}
        self._works = [
            *(group.recv([_bytes(part)], peer, tag) for peer, part in self._parts.items() if peer != rank),
            *(group.send([_bytes(tensor)], peer, tag) for peer, tensor in self._outgoing.items()),
        ]

    def finish(self, limit: timedelta = LIMIT) -> None:
        """Wait for the messages and put them in their places."""
        works, self._works = self._works, []
        if not works:
            return
        with self._trace.paused(), torch.no_grad():
            try:
                for work in works:
                    work.wait(limit)
            except RuntimeError as error:
                raise RuntimeError(f"values did not arrive: {self._what}") from error
            if self._adds:
                total = self._parts[0]
                for part in list(self._parts.values())[1:]:
                    total = total + part
                self._places[0].fill(total)
            else:
                for source, part in self._parts.items():
                    self._places[source].fill(part)
        self.on_finished()


class _Place:
    """Where values go, unless the memory has been freed meanwhile."""

    def __init__(self, tensor: Tensor, trace: Trace) -> None:
        storage = tensor.untyped_storage()
        self._storage, self._block = weakref.ref(storage), trace.block_of(storage)
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._strides = tensor.shape, tensor.stride()

    def fill(self, values: Tensor) -> None:
        storage = self._storage()
        if storage is None or (self._block is not None and self._block.is_freed):
            return
        place = torch.empty(0, dtype=self._dtype)
        place.set_(storage, self._offset, self._shape, self._strides)
        place.copy_(values)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
