"""Messages between the ranks of a pipeline: tensors from one rank to another, in the order of the sends.

A message is a list of tensors. Their forms (dtype, shape, and if they need a gradient) go ahead of them, on
the CPU, unless the receiver knows them already, in a header of one size, which a receiver may await early. A
sender keeps a few messages until they are gone; then it waits for the oldest.

[Note: A communicator for each sender and receiver]
On an accelerator a communicator runs its sends and receives one after another, in the order in which a rank
issues them. A rank posts receives ahead. On a shared communicator they would hold up its own sends, which
other ranks may need before they send what it waits for. So each pair of a sender and a receiver has a
communicator for itself. It carries messages of one direction alone, and both sides know their order.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.collectives import Axis
from zeroshard.comm.watch.status import GATHER

POINT_TO_POINT = "point_to_point"
_LAST_TAGS = (1 << 16) - 2
"""The last two tags of an engine's range, which serve all of its messages; buffers take the first tags."""
_HEADER_BYTES = 1 << 16
"""The bytes of a header: the forms of about 2,500 tensors, pickled."""


class Form(NamedTuple):
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """Return the form of a tensor."""
        return Form(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


Forms = tuple[Form, ...]


_Sent = tuple[Sequence[dist.Work | None], Sequence[Tensor], str]
"""A message on its way: its works, the memory that must live until they are over, and its label."""


class Messages:
    """The messages of this rank over the axis of pipeline ranks.

    Args:
        axis: the axis.
        groups: on an accelerator, the groups of this rank by (sender, receiver), see
            [Note: A communicator for each sender and receiver]. Without one, messages go one at a time over
            the group of the axis.
    """

    def __init__(self, axis: Axis, groups: Mapping[tuple[int, int], dist.ProcessGroup] | None = None) -> None:
        self.rank, self.device = axis.rank, axis.device
        self._axis, self._tag, self._groups = axis, axis.first_tag + _LAST_TAGS, groups or {}
        self.most_sends = 1
        """The messages to each rank that may be on their way; a schedule may need more to go on."""
        self._sent: dict[int, deque[_Sent]] = {}

    def send(self, tensors: Sequence[Tensor], target: int, label: str, *, with_forms: bool) -> None:
        """Send tensors to a pipeline rank.

        Args:
            tensors: the tensors; their values must not change before `finish`.
            target: the pipeline rank that gets them.
            label: the name of the message in error messages.
            with_forms: True if the receiver does not know their forms.

        Raises:
            ValueError: the forms of so many tensors do not go into a header.
        """
        under_way = self._sent.setdefault(target, deque())
        while len(under_way) >= self.most_sends:
            self._end_first(under_way)
        values = [tensor.detach().contiguous() for tensor in tensors]
        works, memory = [], [*values]
        if with_forms:
            data = pickle.dumps(tuple(map(Form.of, tensors))).ljust(_HEADER_BYTES, b"\0")
            if len(data) > _HEADER_BYTES:
                raise ValueError(f"{label}: expected fewer tensors in a message, got {len(tensors)}")
            memory.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            works.append(self.transfer(memory[-1], self.rank, target, on_host=True))
        works += [self.transfer(_bytes_of(value), self.rank, target) for value in values if value.numel()]
        counter = self._axis.ledger.counter
        counter.bytes_sent[POINT_TO_POINT] += sum(one.nbytes for one in memory)
        counter.calls[POINT_TO_POINT] += 1
        under_way.append((works, memory, label))

    def expect(self, source: int, label: str, forms: Forms | None) -> Callable[[], list[Tensor]]:
        """Begin to receive the next message of a pipeline rank.

        Args:
            source: the pipeline rank that sends it.
            label: its name in error messages.
            forms: the forms of its tensors; None if the sender sends them, too.

        Returns:
            A function that waits for the tensors; on an accelerator the current stream waits. Those of one
            source are called in the order of its messages. It raises a RuntimeError if the sender is lost.
        """
        if forms is None:
            header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
            work = self.transfer(header, source, self.rank, on_host=True)

            def arrived_first() -> list[Tensor]:
                self.wait([work], f"forms of the {label}", on_host=True)
                return self.expect(source, label, pickle.loads(header.numpy().tobytes()))()

            return arrived_first
        tensors = [torch.empty(form.shape, dtype=form.dtype, device=self.device) for form in forms]
        works = [self.transfer(_bytes_of(tensor), source, self.rank) for tensor in tensors if tensor.numel()]

        def arrived() -> list[Tensor]:
            self.wait(works, label)
            return [one.requires_grad_(form.requires_grad) for one, form in zip(tensors, forms, strict=True)]

        return arrived

    def finish(self) -> None:
        """Wait until all messages of this rank are gone."""
        for under_way in self._sent.values():
            while under_way:
                self._end_first(under_way)

    def _end_first(self, under_way: deque[_Sent]) -> None:
        works, _, label = under_way[0]
        self.wait(works, f"send of the {label}")
        under_way.popleft()  # its memory may go now

    def wait(self, works: Sequence[dist.Work | None], label: str, *, on_host: bool = False) -> None:
        """Wait for works: the host on CPUs and for forms, the current stream on an accelerator."""
        if self._axis.exchanges or on_host:
            self._axis.waits.wait_for(works, label, POINT_TO_POINT)
            return

        def wait_on_stream(*, async_op: bool) -> None:
            for work in works:
                assert work is not None, "this rank is a member of the group"
                work.wait()

        self._axis.start(wait_on_stream, label)

    def transfer(
        self, values: Tensor, source: int, target: int, *, on_host: bool = False
    ) -> dist.Work | None:
        """Begin to send values to another pipeline rank, or to receive them.

        Args:
            values: the memory.
            source, target: the pipeline ranks, one of which is this rank.
            on_host: True for forms, which lie on the CPU, and have an order of their own.
        """
        call, peer = (dist.isend, target) if source == self.rank else (dist.irecv, source)
        own = self._groups.get((source, target), self._axis.groups[GATHER])
        group = self._axis.control if on_host else own
        return call(values, self._axis.global_ranks[peer], group=group, tag=self._tag + on_host)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes: Gloo knows few dtypes."""
    return tensor.view(-1).view(torch.uint8)
