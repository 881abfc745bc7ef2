"""Collectives over one axis of the mesh, with asynchronous handles and counts.

On CPU ranks all-gather and reduce-scatter are direct exchanges between each pair of ranks: Gloo's own
are several times slower, and an exchange runs in Gloo's thread while this one computes. Sums are taken
in rank order, so that results do not depend on timing. Other backends use their own collectives.

[Note: Collectives run on the current stream] On accelerators a collective is issued with async_op=False.
Since torch 2.8 ProcessGroupNCCL then launches it on the stream that is current, here a side stream of ours,
and the host goes on. With async_op=True it would run on the one internal stream of its process group, where
gathers and reductions queue one after another, and a mark on our side stream would not cover it.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm import streams
from zeroshard.comm.counter import ALL_TO_ALL, Counter
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.watch.status import (
    CONTROL,
    GATHER,
    REDUCE,
    Entries,
    Ledger,
    RankStatus,
    find_difference,
    is_proven,
)
from zeroshard.comm.watch.watchdog import Waits, Watchdog


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result may be used by the current stream; a second call does nothing."""


class Issued:
    """A collective that the host left to the device."""

    def __init__(self, mark: streams.Mark) -> None:
        self._mark: streams.Mark | None = mark

    def wait(self) -> None:
        """Let the current stream wait for the collective; the host goes on. A second call does nothing."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.wait()


class Several:
    """Several collectives, waited for in order."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Wait for each collective in turn. Raises the error of the first that fails."""
        for handle in self._handles:
            handle.wait()


DONE: Handle = Several(())
"""The handle of a collective that had nothing to exchange."""


class Pending:
    """An exchange under way.

    Args:
        waits: the waits of the axis.
        under_way: the exchanges of the axis that nobody has waited for.
        label: the name of the exchange in messages.
        kind: one of the kinds of a counter.
        works: the works that the host waits for.
        then: a function to call when the values have arrived.
    """

    def __init__(
        self,
        waits: Waits,
        under_way: set[Pending],
        label: str,
        kind: str,
        works: Sequence[dist.Work | None],
        then: Callable[[], None] | None = None,
    ) -> None:
        self._waits, self._under_way = waits, under_way
        self._label, self._kind, self._works, self._then = label, kind, works, then
        under_way.add(self)

    def wait(self) -> None:
        """Have the host wait until all values have arrived. A second call does nothing.

        Raises:
            RuntimeError: another rank is lost or too late; the text names this rank and the exchange.
        """
        self._under_way.discard(self)
        works, self._works = self._works, ()
        then, self._then = self._then, None
        self._waits.wait_for(works, self._label, self._kind)
        if then is not None:
            then()

    def drain(self, timeout: timedelta) -> None:
        """Let the exchange end, with or without an error: peers may still read this rank's buffers.

        Nobody waits for it again: Gloo's second wait for a message would not return.
        """
        works, self._works = self._works, ()
        try:
            for work in works:
                if work is not None:
                    work.wait(timeout)
        except RuntimeError:
            pass  # the other side is gone


Parts = Mapping[int, Tensor] | Sequence[Tensor]
"""A tensor for each rank."""


class Channel(Enum):
    """The communicator that carries a collective: one communicator runs its collectives one by one."""

    GATHER = GATHER
    REDUCE = REDUCE


class GatherPart(NamedTuple):
    """One tensor of an all-gather of several."""

    flat: Tensor
    """[size * K], the result."""
    own: Tensor
    """[K], this rank's shard."""
    tag: int


class Axis:
    """One axis of the device mesh, as this rank sees it.

    Args:
        group: the process group of the axis; None for a single rank. It serves both channels until
            `reduce_over` gives reductions one of their own.
        device: the device of the tensors.
        counter: counts the traffic.
        timeout_s: seconds that a rank waits in a collective before it gives up.
        control: a group for small CPU tensors; None uses `group`, which must then be a Gloo one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        device: torch.device,
        counter: Counter,
        timeout_s: float,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank: int = dist.get_rank(group) if group is not None else 0
        self.size: int = dist.get_world_size(group) if group is not None else 1
        self.waits = Waits(f"rank {self.rank} of {self.size}", device, timeout_s, counter)
        """Waits are shared with derived axes, so messages name the rank in this axis."""
        self.counter = counter
        self.under_way: set[Pending] = set()
        self._groups = dict.fromkeys(Channel, group)
        self.control = control or group
        """The group for small CPU tensors."""
        self.timeout_s = timeout_s
        self.exchanges = not streams.has_streams(device)
        """True if pairs of ranks send and receive; False if the backend's collectives are used."""
        self._line: str | None = None
        self._place = ""
        self.first_tag = 0
        """The first tag of this engine's range, which no other engine uses."""
        # Peers from the next rank on, so that not all ranks send to the same one at first.
        self._peers = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self.device = device

    def over(self, group: dist.ProcessGroup | None, control: dist.ProcessGroup | None = None) -> Axis:
        """Return an axis over other ranks, on the same device, with the same counter, ledger and watchdog."""
        axis = Axis(
            group, device=self.device, counter=self.counter, timeout_s=self.timeout_s, control=control
        )
        axis.waits = self.waits
        return axis

    @property
    def rank_status(self) -> RankStatus:
        """The status of this rank; the watchdog's, once there is a watchdog."""
        return self.waits.rank_status

    @property
    def ledger(self) -> Ledger:
        """The collectives that this rank has issued over this axis and axes that were derived from it."""
        return self.waits.ledger

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of this axis as the default group numbers them."""
        group = self._groups[Channel.GATHER]
        return [0] if group is None else dist.get_process_group_ranks(group)

    def group(self, channel: Channel) -> dist.ProcessGroup | None:
        """Return the process group of a channel; None for a single rank."""
        return self._groups[channel]

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        """Give reductions another group of the same ranks, so that they run at the same time as gathers."""
        self._groups[Channel.REDUCE] = group

    def serve_activations(self, line: str) -> None:
        """Let a forward exchange over this axis: its collectives have a line of the ledger for themselves.

        Data-parallel ranks may call a model unevenly, so collectives are not compared between these ranks.
        Messages name the ranks, because there are other groups with a collective of the same name.
        """
        self._line, self._place = line, f" over the tensor ranks {self.global_ranks}"
        self.ledger.groups[line] = self.global_ranks[0]

    def watch(self, watchdog: Watchdog) -> None:
        """Have a watchdog watch this axis: an error then has the status of every rank."""
        self.waits.watchdog, self.waits.rank_status = watchdog, watchdog.rank_status
        watchdog.watch(self, self.timeout_s)

    def unwatch(self) -> None:
        """Have the watchdog forget this axis: the end of another rank is no alarm for it."""
        if self.waits.watchdog is not None:
            self.waits.watchdog.unwatch(self)

    def all_gather(
        self, flat: Tensor, own: Tensor, *, tag: int, label: str, channel: Channel = Channel.GATHER
    ) -> Handle:
        """Fill `flat` with the shards of all ranks, in rank order.

        Args:
            flat: [size * K], the result.
            own: [K], this rank's shard: its part of `flat`, or a tensor elsewhere.
            tag: the same number on all ranks for the same collective, other than the number of
                any other collective that may be under way.
            label: the name of the collective in error messages.
            channel: the communicator; both halves of an all-reduce use the same one.
        """
        if self.size == 1 or not flat.numel():
            if flat.data_ptr() != own.data_ptr():
                flat.copy_(own)
            return self._copied()
        label = self.note("all_gather", own.nbytes * (self.size - 1), label, channel.value)
        if not self.exchanges:
            with self.waits.naming(label):
                dist.all_gather_into_tensor(flat, own, group=self._groups[channel], async_op=False)
            return Issued(self.waits.issue(label))
        chunks = flat.chunk(self.size)
        sent = dict.fromkeys(self._peers, own)
        works = self._exchange(sent, chunks, tag, label)
        if chunks[self.rank].data_ptr() != own.data_ptr():
            chunks[self.rank].copy_(own)  # while the exchange runs
        return Pending(self.waits, self.under_way, label, "all_gather", works)

    def all_gather_together(self, parts: Sequence[GatherPart], *, label: str) -> Handle:
        """All-gather several tensors, of any dtypes; on an accelerator as one launch.

        Args:
            parts: arguments of `all_gather`, in the same order on all ranks.
            label: the name of the collective in error messages.
        """
        if self.exchanges or self.size == 1 or len(parts) == 1:
            return Several([self.all_gather(p.flat, p.own, tag=p.tag, label=label) for p in parts])
        group = self._groups[Channel.GATHER]
        # Private to torch, which has nothing public that gathers several tensors at once; tests/comm shows
        # when it changes.
        with self.waits.naming(label), dist._coalescing_manager(group=group, async_ops=False):
            for part in parts:
                self.note("all_gather", part.own.nbytes * (self.size - 1), label, GATHER)
                dist.all_gather_into_tensor(part.flat, part.own, group=group, async_op=False)
        return Issued(self.waits.issue(label))

    def _copied(self) -> Handle:
        """Return the handle of a copy on this rank alone."""
        return DONE if self.exchanges else Issued(streams.mark_here(self.device))

    def reduce_scatter(self, flat: Tensor, out: Tensor, pool: BufferPool, *, tag: int, label: str) -> Handle:
        """Sum `flat` over the ranks in rank order and leave this rank's part in `out`.

        Args:
            flat: [size * K], scaled by the caller; unusable afterwards.
            out: [K], in the dtype of `flat` or a wider one, in which the sum is then taken; may be this
                rank's part of `flat`.
            pool: where the exchange takes its receive buffers from.
            tag, label: as in `all_gather`.
        """
        chunks = flat.chunk(self.size)
        own = chunks[self.rank]
        if self.size == 1 or not flat.numel():
            out.copy_(own)
            return self._copied()
        label = self.note("reduce_scatter", own.nbytes * (self.size - 1), label, REDUCE)
        if not self.exchanges:
            target = out if out.dtype == flat.dtype else torch.empty_like(own)
            group = self._groups[Channel.REDUCE]
            with self.waits.naming(label):
                dist.reduce_scatter_tensor(target, flat, group=group, async_op=False)
            if target is not out:
                out.copy_(target)  # on the same stream, where `target` is freed as well
            return Issued(self.waits.issue(label))
        received = {peer: pool.take(flat.dtype, own.numel()) for peer in self._peers}
        works = self._exchange(chunks, received, tag, label)

        def add() -> None:
            _sum([received.get(rank, own) for rank in range(self.size)], own, out)
            for buffer in received.values():
                pool.give(buffer)

        return Pending(self.waits, self.under_way, label, "reduce_scatter", works, add)

    def broadcast(self, tensor: Tensor, label: str) -> None:
        """Give every rank the values of rank 0 in `tensor`, contiguous; return when they have arrived.

        The host waits on accelerators too. Otherwise other ranks would issue the next broadcasts while rank 0
        still computes the values, and their devices would wait longer than a collective may take.
        """
        if self.size > 1 and tensor.numel():
            num_bytes = tensor.numel() * tensor.element_size() if self.rank == 0 else 0
            label = self.note("control", num_bytes, label)
            group = self._groups[Channel.GATHER]
            source = dist.get_global_rank(group, 0) if group is not None else 0
            data = tensor.contiguous()
            raw = data.view(-1).view(torch.uint8)  # Gloo knows few dtypes
            if self.exchanges:
                self.waits.wait_for([dist.broadcast(raw, source, group=group, async_op=True)], label)
            else:
                with self.waits.naming(label):
                    dist.broadcast(raw, source, group=group, async_op=False)
                self.waits.wait_for_device(self.waits.issue(label), label)
            if data is not tensor:
                tensor.copy_(data)

    def any(self, flags: Sequence[bool], label: str, *, compares: bool = False) -> Callable[[], list[bool]]:
        """Combine flags over the ranks by OR. Runs on the CPU: a GPU never waits for it.

        Args:
            flags: the same number of flags on all ranks.
            label: the name of the collective in error messages.
            compares: True makes the answer raise a RuntimeError, on all ranks, when they have issued
                different collectives so far, or the same ones in different orders. Sends 16 bytes more.

        Returns:
            A function that waits for the answer; until its call the exchange runs during other work.
        """
        if self.size == 1 or not flags:
            return lambda: list(flags)
        proof, entries = (self.ledger.proof(), self.ledger.entries()) if compares else ([], None)
        bitmap = torch.tensor([*flags, *proof], dtype=torch.uint8, device="cpu")
        label = self.note("control", bitmap.numel(), label)
        work = dist.all_reduce(bitmap, dist.ReduceOp.MAX, group=self.control, async_op=True)

        def answer() -> list[bool]:
            self.waits.wait_for_agreement(work, label)
            maxima = bitmap.tolist()
            if entries is not None and not is_proven(maxima[len(flags) :]):
                raise self._differing(entries)
            return [bool(flag) for flag in maxima[: len(flags)]]

        return answer

    def _differing(self, entries: Entries) -> RuntimeError:
        """Return the error of ranks that have issued different collectives; collective."""
        everyone = self.all_gather_object(tuple(entries), "comparison of collectives")
        difference = find_difference({rank: Entries(*entries) for rank, entries in enumerate(everyone)})
        older = "the ranks have issued different collectives, the first one longer ago than what is kept"
        return RuntimeError(f"{self.waits.who}: {difference or older}")

    def sum(self, value: Tensor, label: str) -> Tensor:
        """Return the sum of a tensor over the ranks, added in rank order: the same bits on all ranks.

        Args:
            value: a small tensor of the same shape and dtype on all ranks; the result is on its device.
            label: the name of the exchange in errors.
        """
        return self.begin_sum(value, label)()

    def begin_sum(self, value: Tensor, label: str) -> Callable[[], Tensor]:
        """Begin a `sum`; arguments as it has them.

        Returns:
            A function that waits for the sum; until its call the exchange runs during other work.
        """
        if self.size == 1:
            return lambda: value
        label = self.note("control", value.numel() * value.element_size(), label)
        parts = [torch.empty_like(value) for _ in range(self.size)]
        group = self._groups[Channel.REDUCE]
        works: list[dist.Work | None] = []
        if self.exchanges:
            works.append(dist.all_gather(parts, value, group=group, async_op=True))
        else:
            with self.waits.naming(label):
                dist.all_gather(parts, value, group=group, async_op=False)
            self.waits.issue(label)

        def total() -> Tensor:
            if works:
                self.waits.wait_for(works, label)
            return functools.reduce(torch.add, parts)

        return total

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        """Return a small picklable value of every rank, in rank order."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        label = self.note("control", own.numel(), label)
        sizes = self._gather_small(torch.tensor([own.numel()], device="cpu"), label)
        longest = int(torch.stack(sizes).max())
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: own.numel()] = own
        everyone = self._gather_small(padded, label)
        return [
            pickle.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(everyone, sizes, strict=True)
        ]

    def _gather_small(self, value: Tensor, label: str) -> list[Tensor]:
        """Return a CPU tensor of every rank; all have the same shape."""
        parts = [torch.empty_like(value) for _ in range(self.size)]
        self.waits.wait_for_agreement(dist.all_gather(parts, value, group=self.control, async_op=True), label)
        return parts

    def note(self, kind: str, num_bytes: int, label: str, line: str = CONTROL) -> str:
        """Count and note a collective that sends `num_bytes`; return its name in messages."""
        self.counter.add(kind, num_bytes)
        self.ledger.note(label, self._line or line)
        return label + self._place

    def close(self, drain_s: float) -> None:
        """Wait up to `drain_s` for exchanges under way and forget the process groups.

        After an error the communicators of a device are aborted: its collectives would never end by
        themselves, and destroying a communicator waits for them.
        """
        self.drain(drain_s)
        if not self.exchanges and (self.waits.have_failed or self.rank_status.is_interrupted):
            for group in self._groups.values():
                if group is not None:
                    group.abort()
        self._groups = dict.fromkeys(Channel)
        self.control = None

    def drain(self, seconds: float) -> None:
        """Wait for all exchanges under way: Gloo works on the memory of their tensors."""
        until = time.monotonic() + seconds
        for pending in self.under_way:
            pending.drain(timedelta(seconds=max(0.01, until - time.monotonic())))
        self.under_way.clear()

    def _exchange(self, sent: Parts, received: Parts, tag: int, label: str) -> list[dist.Work | None]:
        """Start to send and receive one tensor to and from every other rank."""
        works: list[dist.Work | None] = []
        try:
            for back, peer in zip(reversed(self._peers), self._peers, strict=True):
                works.append(self._receive(received[back], back, tag))
                works.append(self._send(sent[peer], peer, tag))
        except RuntimeError as error:
            raise self.waits.error(label, error) from None
        return works

    def _send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work | None:
        group = self._groups[Channel.GATHER]
        return dist.isend(tensor, group=group, group_dst=peer, tag=self.first_tag + tag)

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work | None:
        group = self._groups[Channel.GATHER]
        return dist.irecv(tensor, group=group, group_src=peer, tag=self.first_tag + tag)


def _sum(parts: Sequence[Tensor], own: Tensor, out: Tensor) -> None:
    """parts[0] + parts[1] + ... from the left, into `out`; every part but `own` may be overwritten."""
    if out.dtype != own.dtype:
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)
        return
    scratch = parts[0] if parts[0] is not own else parts[1]
    total = parts[0]
    for part in parts[1:-1]:
        total = torch.add(total, part, out=scratch)
    torch.add(total, parts[-1], out=out)


def all_to_all(
    axis: Axis, sent: Sequence[tuple[int, Tensor]], expected: Sequence[tuple[int, int]], *, label: str
) -> Sequence[Tensor]:
    """Send pieces to other ranks and return what they send; collective, on the current stream.

    All pieces go as bytes in one buffer, so they may have any dtypes.

    Args:
        axis: the ranks.
        sent: in the order of ranks, pieces for other ranks: 1-D contiguous, on the device of the axis.
        expected: in the order of ranks, the rank that sends a piece, and the bytes of the piece.
        label: the name of the collective in error messages, the same on all ranks.

    Returns:
        The pieces that are expected, [num_bytes] uint8 each.

    Raises:
        RuntimeError: a rank is lost or too late.
    """
    sizes: tuple[list[int], list[int]] = [0] * axis.size, [0] * axis.size
    for source, num_bytes in expected:
        sizes[0][source] += num_bytes
    for target, piece in sent:
        sizes[1][target] += piece.nbytes
    pieces = [piece.view(torch.uint8) for _, piece in sent]
    out = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=axis.device)
    received = torch.empty(sum(sizes[0]), dtype=torch.uint8, device=axis.device)
    label = axis.note(ALL_TO_ALL, out.numel(), label, REDUCE)
    group = axis.group(Channel.REDUCE)
    with axis.waits.naming(label):
        work = dist.all_to_all_single(received, out, *sizes, group=group, async_op=axis.exchanges)
    if axis.exchanges:
        Pending(axis.waits, axis.under_way, label, ALL_TO_ALL, [work]).wait()
    else:
        axis.waits.issue(label)
    parts: Sequence[Tensor] = received.split([num_bytes for _, num_bytes in expected])
    return parts


# ---------------------------------------------------------------------------------- agreements on errors


T = TypeVar("T")


def on_all(axis: Axis, label: str, step: Callable[[], T]) -> list[T]:
    """Do something on every rank; collective.

    Args:
        label: the name of the exchange in errors.
        step: the function to call on each rank; it exchanges nothing itself.

    Returns:
        The result of each rank, in rank order.

    Raises:
        ValueError, RuntimeError: the error of the first rank that failed, on all ranks; an error of another
            class becomes a RuntimeError.
    """
    error: Exception | None = None
    answer: T | None = None
    try:
        answer = step()
    except Exception as caught:  # of whatever kind: the other ranks wait
        error = caught
    failure = None if error is None else (isinstance(error, ValueError), _tell(error))
    everyone = axis.all_gather_object((failure, answer), label)
    for rank, (failed, _) in enumerate(everyone):
        if failed is not None:
            is_value_error, text = failed
            place = f" (rank {rank})" if axis.size > 1 else ""
            raise (ValueError if is_value_error else RuntimeError)(text + place) from error
    return [given for _, given in everyone]


def _tell(error: Exception) -> str:
    speaks_for_itself = isinstance(error, ValueError | RuntimeError | OSError)
    return str(error) if speaks_for_itself else f"{type(error).__name__}: {error}"


def on_first(axis: Axis, label: str, step: Callable[[], T]) -> T:
    """Do something on rank 0 alone and give every rank its answer; collective. As `on_all` otherwise."""
    answers = on_all(axis, label, lambda: step() if axis.rank == 0 else None)
    answer: T = answers[0]  # type: ignore[assignment]
    return answer
