"""Stands in for `torch.distributed` where zeroshard's comm/ calls it, and behaves as NCCL does with streams.

A collective with async_op=False runs on the current stream. One with async_op=True runs on a stream of the
communicator's own, which begins after the current stream; only the wait() of its work orders others behind
it. The host waits for groups that were opened for CPU tensors (backend="gloo").

Values really travel, over Gloo, in messages whose tags follow from what a collective is for, not from when
it was issued. They arrive when somebody reads the memory that they belong to. So ranks whose orders differ
do not hang here unless the values depend on each other; `orders.py` compares the orders afterwards.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretend.clocks import Clock, Event, Point, Stream
from tests.pretend.findings import Finding, Kind
from tests.pretend.orders import Collective
from tests.pretend.signatures import regions_of
from tests.pretend.trace import Trace
from tests.pretend.transfers import LIMIT, Transfer

_SENT_LIMIT = timedelta(seconds=10)
"""How long values may take that have been sent."""


class _Thread(threading.local):
    """What each thread has of its own."""

    label = "no label"


class Transport:
    """The functions that comm/ uses; everything else is torch.distributed's own."""

    _cpu_groups: ClassVar[weakref.WeakSet[dist.ProcessGroup]] = weakref.WeakSet()
    """Of all transports: a group outlives the one that made it."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._thread = _Thread()
        self._own_streams: dict[str, Stream] = {}
        self._last: dict[str, Point] = {}
        """By communicator: where its last collective is."""
        self._num_sent: Counter[tuple[str, str, str]] = Counter()
        self._transfers: dict[Transfer, None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """What is issued inside is for this."""
        before, self._thread.label = self._thread.label, label
        try:
            yield
        finally:
            self._thread.label = before

    def finish(self) -> None:
        """Let all values arrive, so that the groups can be left; collective."""
        dist.barrier()
        with suppress(RuntimeError):  # of what a rank has never issued; the comparison of orders tells it
            for transfer in list(self._transfers):
                transfer.finish(_SENT_LIMIT)

    # -- groups -------------------------------------------------------------------------------------------

    def new_subgroups_by_enumeration(self, parts: Any, *, backend: str | None = None, **kwargs: Any) -> Any:
        own, groups = dist.new_subgroups_by_enumeration(parts, backend=backend, **kwargs)
        if backend == "gloo" and isinstance(own, dist.ProcessGroup):
            self._cpu_groups.add(own)
        return own, groups

    def get_backend(self, group: dist.ProcessGroup | None = None) -> str:
        return "gloo" if group in self._cpu_groups else "nccl"

    # -- collectives over device memory -------------------------------------------------------------------

    def all_gather_into_tensor(
        self, flat: Tensor, own: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> _Work | None:
        group = group or _world()
        chunks = flat.detach().chunk(group.size())
        # In place, NCCL does not write this rank's part.
        others = [chunk for chunk in chunks if chunk.data_ptr() != own.data_ptr()]
        work = self._issue("all-gather", group, [own], others, flat, async_op)
        self._send("all-gather", group, dict.fromkeys(range(group.size()), own), dict(enumerate(chunks)))
        return work

    def all_gather(
        self,
        parts: Sequence[Tensor],
        value: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> _Work | HostWork | None:
        group = group or _world()
        if group in self._cpu_groups:
            self._trace.put_on_host([*parts, value])
            return self._issue_on_host("all-gather", group, value, async_op, dist.all_gather, parts, value)
        work = self._issue("all-gather of a list", group, [value], parts, value, async_op)
        self._send(
            "all-gather of a list", group, dict.fromkeys(range(group.size()), value), dict(enumerate(parts))
        )
        return work

    def reduce_scatter_tensor(
        self,
        out: Tensor,
        flat: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> _Work | None:
        assert op == dist.ReduceOp.SUM, "the engine takes sums"
        group = group or _world()
        work = self._issue("reduce-scatter", group, [flat], [out], flat, async_op)
        sent = dict(enumerate(flat.detach().chunk(group.size())))
        self._send("reduce-scatter", group, sent, dict.fromkeys(range(group.size()), out), adds=True)
        return work

    def all_to_all_single(
        self,
        out: Tensor,
        flat: Tensor,
        out_sizes: Sequence[int],
        sizes: Sequence[int],
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> _Work | None:
        group = group or _world()
        # Ranks send as much as their slices have, so sizes are not compared.
        work = self._issue("all-to-all", group, [flat], [out], flat[:0], async_op)
        sent, received = flat.detach().split(list(sizes)), out.detach().split(list(out_sizes))
        self._send(
            "all-to-all",
            group,
            {rank: part for rank, part in enumerate(sent) if part.numel()},
            {rank: part for rank, part in enumerate(received) if part.numel()},
        )
        return work

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> _Work | HostWork | None:
        group = group or _world()
        if group in self._cpu_groups:
            self._trace.put_on_host([tensor])
            return self._issue_on_host("all-reduce", group, tensor, async_op, dist.all_reduce, tensor, op)
        assert op == dist.ReduceOp.SUM, "the engine takes sums"
        work = self._issue("all-reduce", group, [tensor], [tensor], tensor, async_op)
        everyone = range(group.size())
        self._send(
            "all-reduce", group, dict.fromkeys(everyone, tensor), dict.fromkeys(everyone, tensor), adds=True
        )
        return work

    def broadcast(
        self,
        tensor: Tensor,
        *,
        group_src: int,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> _Work | None:
        group = group or _world()
        source, rank = group_src, group.rank()
        reads, writes = ([tensor], []) if rank == source else ([], [tensor])
        work = self._issue("broadcast", group, reads, writes, tensor, async_op)
        sent = dict.fromkeys(range(group.size()), tensor) if rank == source else {}
        self._send("broadcast", group, sent, {} if rank == source else {source: tensor})
        return work

    # -- messages -----------------------------------------------------------------------------------------

    def isend(
        self, tensor: Tensor, dst: int | None = None, *, group: Any, group_dst: int = 0, tag: int = 0
    ) -> Any:
        target = group_dst if dst is None else dist.get_group_rank(group, dst)
        return self._message(tensor, group, group.rank(), target, tag)

    def irecv(
        self, tensor: Tensor, src: int | None = None, *, group: Any, group_src: int = 0, tag: int = 0
    ) -> Any:
        source = group_src if src is None else dist.get_group_rank(group, src)
        return self._message(tensor, group, source, group.rank(), tag)

    def _message(
        self, tensor: Tensor, group: dist.ProcessGroup, source: int, target: int, tag: int
    ) -> _Work | HostWork | None:
        """Note half of a message. As in NCCL, it waits for all that this rank has issued in the group."""
        is_sender = group.rank() == source
        if group in self._cpu_groups:
            if not is_sender:
                self._trace.put_on_host([tensor])
            with self._trace.paused():
                function, peer = (dist.isend, "group_dst") if is_sender else (dist.irecv, "group_src")
                other: dict[str, Any] = {peer: target if is_sender else source}
                work = function(tensor, group=group, tag=tag, **other)
            assert work is not None, "both ranks are members"
            return HostWork(work, Clock(), self._trace.timeline.host)
        with self.labelled(f"message {source} to {target}"):
            reads, writes = ([tensor], []) if is_sender else ([], [tensor])
            issued = self._issue("message", group, reads, writes, tensor, True, pair=(source, target))
            sent, received = ({target: tensor}, {}) if is_sender else ({}, {source: tensor})
            self._send("message", group, sent, received)
        return issued

    # -- streams ------------------------------------------------------------------------------------------

    def _issue(
        self,
        op: str,
        group: dist.ProcessGroup,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        whole: Tensor,
        async_op: bool,
        *,
        pair: tuple[int, int] | None = None,
    ) -> _Work | None:
        """Note a collective on the stream that it runs on; a message is one of a pair of ranks."""
        timeline, communicator = self._trace.timeline, _name(group, pair)
        current = timeline.current
        stream = self._own_stream(_name(group)) if async_op else current
        if async_op:
            stream.wait_stream(current)
        last = self._last.get(communicator)
        if last is not None and not stream.has_seen(last):
            text = f"{communicator}: {op} ({self._thread.label}) on {stream.name} is not ordered after "
            self._trace.report(Finding(Kind.UNORDERED, f"{text}its last one on {last.stream}"))
        begins_after = Clock(stream.clock)
        begins_after.join(timeline.host)
        timeline.current = stream
        try:
            point = self._trace.note(f"{op} ({self._thread.label})", regions_of(reads), regions_of(writes))
        finally:
            timeline.current = current
        self._last[communicator] = point
        self._log(communicator, _members(group, pair), op, whole, point, begins_after)
        return _Work(stream.record_event(), self._trace, [*reads, *writes]) if async_op else None

    def _issue_on_host(
        self,
        op: str,
        group: dist.ProcessGroup,
        tensor: Tensor,
        async_op: bool,
        function: Callable[..., dist.Work],
        *args: Any,
    ) -> HostWork | None:
        """Really run a collective among hosts."""
        communicator, host = _name(group), self._trace.timeline.host
        stream = self._own_stream(communicator)
        begins_after = Clock(stream.clock)
        begins_after.join(host)
        point = stream.issue()
        self._log(communicator, _members(group), op, tensor, point, begins_after)
        with self._trace.paused():
            work = HostWork(function(*args, group=group, async_op=True), Clock(stream.clock), host)
        if async_op:
            return work
        work.wait()
        return None

    def _log(
        self,
        communicator: str,
        members: tuple[int, ...],
        op: str,
        tensor: Tensor,
        point: Point,
        begins_after: Clock,
    ) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._trace.collectives.append(
            Collective(
                communicator, members, op, self._thread.label, tensor.numel(), dtype, point, begins_after
            )
        )

    def _own_stream(self, communicator: str) -> Stream:
        if communicator not in self._own_streams:
            self._own_streams[communicator] = self._trace.timeline.stream(f"stream of {communicator}")
        return self._own_streams[communicator]

    # -- values -------------------------------------------------------------------------------------------

    def _send(
        self,
        op: str,
        group: dist.ProcessGroup,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        adds: bool = False,
    ) -> None:
        """Exchange tensors with other ranks of the group; what is received is there when it is read.

        Args:
            sent: by the rank that gets it, this one included.
            received: by the rank that it comes from: where it goes.
            adds: the parts are added up, in rank order.
        """
        key = _name(group), op, self._thread.label
        tag = zlib.crc32(repr((key, self._num_sent[key])).encode()) >> 2
        self._num_sent[key] += 1
        with self._trace.paused(), torch.no_grad():
            self._trace.await_values(regions_of(list(sent.values()) + list(received.values())))
            transfer = Transfer(self._trace, group, tag, sent, received, adds, f"{op} ({self._thread.label})")
        self._transfers[transfer] = None
        transfer.on_finished = lambda: self._transfers.pop(transfer, None)
        for tensor in received.values():
            self._trace.arriving[tensor.untyped_storage()._cdata] = transfer.finish


class _Work:
    """As ProcessGroupNCCL's: it holds its tensors until wait(), which orders the current stream behind it."""

    def __init__(self, event: Event, trace: Trace, held: Sequence[Tensor]) -> None:
        self._event, self._trace = event, trace
        self._held: Sequence[Tensor] = held

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._trace.timeline.current.wait_event(self._event)
        self._held = ()
        return True

    def is_completed(self) -> bool:
        return True


class HostWork:
    """As ProcessGroupGloo's: the host waits."""

    def __init__(self, work: dist.Work, after: Clock, host: Clock) -> None:
        self._work, self._after, self._host = work, after, host

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._host.join(self._after)
        return self._work.wait(timeout or LIMIT)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "a process group is open"
    return dist.group.WORLD


def _members(group: dist.ProcessGroup, pair: tuple[int, int] | None = None) -> tuple[int, ...]:
    """The ranks of a group, or of a pair of its members."""
    ranks = dist.get_process_group_ranks(group)
    return tuple(ranks if pair is None else (ranks[member] for member in sorted(pair)))


def _name(group: dist.ProcessGroup, pair: tuple[int, int] | None = None) -> str:
    """The same on all ranks, and another one for each communicator."""
    return f"communicator {group.group_name} of ranks {list(_members(group, pair))}"
