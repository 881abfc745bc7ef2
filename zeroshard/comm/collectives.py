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

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.comm import streams
from zeroshard.comm.counter import ALL_REDUCE, ALL_TO_ALL
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.watch.status import CONTROL, GATHER, REDUCE, TENSOR, find_difference
from zeroshard.comm.watch.watchdog import Waits, Watchdog


@dataclass(eq=False)
class Pending:
    """An exchange under way, in threads of the backend.

    Args:
        axis: the axis that it is over.
        label: the name of the exchange in messages.
        kind: one of the kinds of a counter.
        works: the works that the host waits for.
        then: a function to call when the values have arrived.
    """

    axis: Axis
    label: str
    kind: str
    works: Sequence[dist.Work | None]
    then: Callable[[], object] = object

    def wait(self) -> None:
        """Have the host wait until all values have arrived. A second call does nothing.

        Raises:
            RuntimeError: another rank is lost or too late; the text names this rank and the exchange.
        """
        self.axis.under_way.discard(self)
        works, self.works = self.works, ()
        then, self.then = self.then, object
        self.axis.waits.wait_for(works, self.label, self.kind)
        then()


Handle = Pending | streams.Mark
"""A collective under way; on an accelerator, its mark. `wait` may be called again."""

_OLDER = "the ranks have issued different collectives, the first one longer ago than what is kept"

Parts = Mapping[int, Tensor] | Sequence[Tensor]
"""A tensor for each rank."""


class Axis:
    """One axis of the device mesh, as this rank sees it.

    Args:
        group: the process group of the axis; None for a single rank.
        device: the device of the tensors.
        timeout_s: seconds that a rank waits in a collective before it gives up.
        control: a group for small CPU tensors; None uses `group`, which must then be a Gloo one.
        waits: the waits of another axis, if both share the ledger and the watchdog.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        device: torch.device,
        timeout_s: float,
        control: dist.ProcessGroup | None = None,
        waits: Waits | None = None,
    ) -> None:
        self.rank: int = dist.get_rank(group) if group is not None else 0
        self.size: int = dist.get_world_size(group) if group is not None else 1
        self.waits = waits or Waits(f"rank {self.rank} of {self.size}", device, timeout_s)
        """Waits are shared with derived axes, so messages name the rank in the first one."""
        self.ledger = self.waits.ledger
        """The collectives that this rank has issued over this axis and axes that were derived from it."""
        self.note: Callable[..., str] = self.ledger.note
        """Notes a collective of this axis and returns its name in messages, see `Ledger.note`."""
        self.under_way: set[Pending] = set()
        self.groups = dict.fromkeys((GATHER, REDUCE), group)
        """A communicator runs its collectives one by one. Reductions may have another one of the same ranks,
        so that they run at the same time as gathers."""
        self.control = control or group
        """The group for small CPU tensors."""
        self.timeout_s = timeout_s
        self.exchanges = not streams.has_streams(device)
        """True if pairs of ranks send and receive; False if the backend's collectives are used."""
        self.first_tag = 0
        """The first tag of this engine's range, which no other engine uses."""
        # Peers from the next rank on, so that not all ranks send to the same one at first.
        self._peers = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self.device = device

    def over(self, group: dist.ProcessGroup | None, control: dist.ProcessGroup | None = None) -> Axis:
        """Return an axis over other ranks, on the same device, with the same ledger and watchdog."""
        return Axis(group, device=self.device, timeout_s=self.timeout_s, control=control, waits=self.waits)

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of this axis as the default group numbers them."""
        group = self.groups[GATHER]
        return [0] if group is None else dist.get_process_group_ranks(group)

    def serve_activations(self) -> None:
        """Let a forward exchange over this axis: its collectives have a line of the ledger for themselves.

        Data-parallel ranks may call a model unevenly, so collectives are not compared between these ranks.
        Messages name the ranks, because there are other groups with a collective of the same name.
        """
        note, place = self.ledger.note, f" over the tensor ranks {self.global_ranks}"
        self.note = lambda label, _, *sent: note(label, TENSOR, *sent) + place
        self.ledger.groups[TENSOR] = self.global_ranks[0]

    def watch(self, watchdog: Watchdog) -> None:
        """Have a watchdog watch this axis: an error then has the status of every rank."""
        self.waits.watchdog, self.waits.rank_status = watchdog, watchdog.rank_status
        watchdog.watch(self, self.timeout_s)

    def unwatch(self) -> None:
        """Have the watchdog forget this axis: the end of another rank is no alarm for it."""
        if self.waits.watchdog is not None:
            self.waits.watchdog.unwatch(self)

    def start(self, collective: Callable[..., Any], label: str, kind: str = CONTROL) -> Handle:
        """Start a collective of the backend; on an accelerator, on the current stream.

        Args:
            collective: a function of `torch.distributed` with all of its arguments but `async_op`.
            label: its name in error messages, as `note` gives it.
            kind: one of the kinds of a counter.
        """
        try:  # a context manager costs as much as all else here
            if self.waits.rank_status.is_interrupted:
                raise RuntimeError  # `error` gives the reason
            work = collective(async_op=self.exchanges)
        except RuntimeError as error:
            raise self.waits.error(label, error) from None
        if not self.exchanges:
            return self.waits.issue(label)
        pending = Pending(self, label, kind, [work])
        self.under_way.add(pending)
        return pending

    def all_gather(self, flat: Tensor, own: Tensor, *, tag: int, label: str, channel: str = GATHER) -> Handle:
        """Fill `flat` with the shards of all ranks, in rank order.

        Args:
            flat: [size * K], the result.
            own: [K], this rank's shard: its part of `flat`, or a tensor elsewhere.
            tag: the same number on all ranks for the same collective, other than the number of
                any other collective that may be under way.
            label: the name of the collective in error messages.
            channel: the communicator, GATHER or REDUCE; both halves of an all-reduce use the same one.
        """
        chunks, pending = flat.chunk(self.size), None
        if self.size > 1 and flat.numel():
            label = self.note(label, channel, "all_gather", own.nbytes * (self.size - 1))
            if not self.exchanges:
                gather = partial(dist.all_gather_into_tensor, flat, own, group=self.groups[channel])
                return self.start(gather, label)
            pending = self.exchange(dict.fromkeys(self._peers, own), chunks, tag, label, "all_gather")
        place = chunks[self.rank]
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)  # while the exchange runs
        return pending or streams.mark_here(self.device)

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
            return streams.mark_here(self.device)
        label = self.note(label, REDUCE, "reduce_scatter", own.nbytes * (self.size - 1))
        if not self.exchanges:
            target = out if out.dtype == flat.dtype else torch.empty_like(own)
            scatter = partial(dist.reduce_scatter_tensor, target, flat, group=self.groups[REDUCE])
            handle = self.start(scatter, label)
            if target is out:
                return handle
            out.copy_(target)  # on the same stream, where `target` is freed as well
            return streams.mark_here(self.device)
        received = {peer: pool.take(flat.dtype, own.numel()) for peer in self._peers}
        parts = [received.get(rank, own) for rank in range(self.size)]
        add = partial(_add, parts, own, out, pool)
        return self.exchange(chunks, received, tag, label, "reduce_scatter", add)

    def all_reduce(self, values: Tensor, label: str) -> Handle:
        """Begin to sum contiguous values over the ranks, in place, by the backend's own collective.

        On an accelerator it is on the current stream. Nobody reads or writes `values` meanwhile.
        """
        label = self.note(label, CONTROL, ALL_REDUCE, 2 * values.nbytes * (self.size - 1) // self.size)
        reduce = partial(dist.all_reduce, values, group=self.groups[GATHER])
        return self.start(reduce, label, ALL_REDUCE)

    def broadcast(self, tensor: Tensor, label: str) -> None:
        """Give every rank the values of rank 0 in `tensor`, contiguous; return when they have arrived.

        The host waits on accelerators too. Otherwise other ranks would issue the next broadcasts while rank 0
        still computes the values, and their devices would wait longer than a collective may take.
        """
        if self.size > 1 and tensor.numel():
            num_bytes = tensor.numel() * tensor.element_size() if self.rank == 0 else 0
            label = self.note(label, CONTROL, CONTROL, num_bytes)
            data = tensor.contiguous()
            raw = data.view(-1).view(torch.uint8)  # Gloo knows few dtypes
            broadcast = partial(dist.broadcast, raw, group=self.groups[GATHER], group_src=0)
            self.start(broadcast, label).wait()
            streams.mark_here(self.device).synchronize()
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
        proof = self.ledger.proof() if compares else []
        bitmap = torch.tensor([*flags, *proof], dtype=torch.uint8, device="cpu")
        label = self.note(label, CONTROL, CONTROL, bitmap.numel())
        work = dist.all_reduce(bitmap, dist.ReduceOp.MAX, group=self.control, async_op=True)

        def answer() -> list[bool]:
            self.waits.wait_for([work], label)
            maxima = bitmap.tolist()
            if maxima[len(flags) :] != proof:
                everyone = self.all_gather_object(self.ledger.entries(), "comparison of collectives")
                difference = find_difference(dict(enumerate(everyone)))
                raise RuntimeError(f"{self.waits.who}: {difference or _OLDER}")
            return [bool(flag) for flag in maxima[: len(flags)]]

        return answer

    def sum(self, value: Tensor, label: str) -> Callable[[], Tensor]:
        """Add up a tensor over the ranks, in rank order: the same bits on all ranks.

        Args:
            value: a small tensor of the same shape and dtype on all ranks; the result is on its device.
            label: the name of the exchange in errors.

        Returns:
            A function that waits for the sum; until its call the exchange runs during other work.
        """
        if self.size == 1:
            return lambda: value
        label = self.note(label, CONTROL, CONTROL, value.nbytes)
        parts = [torch.empty_like(value) for _ in range(self.size)]
        gather = partial(dist.all_gather, parts, value, group=self.groups[REDUCE])
        handle = self.start(gather, label)

        def total() -> Tensor:
            handle.wait()
            return reduce(torch.add, parts)

        return total

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        """Return a small picklable value of every rank, in rank order."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        label = self.note(label, CONTROL, CONTROL, own.numel())
        sizes = torch.cat(self._gather_small(torch.tensor([own.numel()], device="cpu"), label)).tolist()
        everyone = self._gather_small(nn.functional.pad(own, (0, max(sizes) - own.numel())), label)
        return [pickle.loads(part.numpy().tobytes()) for part in everyone]  # it reads no padding

    def _gather_small(self, value: Tensor, label: str) -> list[Tensor]:
        """Return a CPU tensor of every rank; all have the same shape."""
        parts = [torch.empty_like(value) for _ in range(self.size)]
        self.waits.wait_for([dist.all_gather(parts, value, group=self.control, async_op=True)], label)
        return parts

    def close(self, drain_s: float) -> None:
        """Wait up to `drain_s` for exchanges under way and forget the process groups.

        After an error the communicators of a device are aborted: its collectives would never end by
        themselves, and destroying a communicator waits for them.
        """
        self.drain(drain_s)
        if not self.exchanges and self.waits.rank_status.is_interrupted:
            for group in filter(None, self.groups.values()):
                group.abort()
        self.groups = dict.fromkeys(self.groups)
        self.control = None

    def drain(self, seconds: float) -> None:
        """Let exchanges under way end, with or without an error: Gloo works on the memory of their tensors.

        Nobody waits for them again: a second wait for a message of Gloo would not return.
        """
        until = time.monotonic() + seconds
        while self.under_way:
            pending = self.under_way.pop()
            works, pending.works = pending.works, ()
            with suppress(RuntimeError):  # the other side is gone
                for work in filter(None, works):
                    work.wait(timedelta(seconds=max(0.01, until - time.monotonic())))

    def exchange(
        self,
        sent: Parts,
        received: Parts,
        tag: int,
        label: str,
        kind: str,
        then: Callable[[], object] = object,
    ) -> Pending:
        """Start to send and receive one tensor to and from every other rank; see `Pending`."""
        works: list[dist.Work] = []
        group, tag = self.groups[GATHER], self.first_tag + tag
        assert group is not None, "the axis has other ranks, and is not closed"
        try:  # by methods of the group: `isend` and `irecv` around them take a fifth of the exchange of 5 kB
            for back, peer in zip(reversed(self._peers), self._peers, strict=True):
                works.append(group.recv([received[back]], back, tag))
                works.append(group.send([sent[peer]], peer, tag))
        except RuntimeError as error:
            raise self.waits.error(label, error) from None
        pending = Pending(self, label, kind, works, then)
        self.under_way.add(pending)
        return pending


def _add(parts: Sequence[Tensor], own: Tensor, out: Tensor, pool: BufferPool) -> None:
    """parts[0] + parts[1] + ... from the left, into `out`; every part but `own` goes back to the pool."""
    if out.dtype != own.dtype:
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)
    else:
        scratch = parts[0] if parts[0] is not own else parts[1]
        total = parts[0]
        for part in parts[1:-1]:
            total = torch.add(total, part, out=scratch)
        torch.add(total, parts[-1], out=out)
    for part in parts:
        if part is not own:
            pool.give(part)


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
    label = axis.note(label, REDUCE, ALL_TO_ALL, out.numel())
    exchange = partial(dist.all_to_all_single, received, out, *sizes, group=axis.groups[REDUCE])
    axis.start(exchange, label, ALL_TO_ALL).wait()
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
    try:
        outcome: Any = None, step()
    except Exception as caught:  # of whatever kind: the other ranks wait
        error, speaks_for_itself = caught, isinstance(caught, ValueError | RuntimeError | OSError)
        text = str(caught) if speaks_for_itself else f"{type(caught).__name__}: {caught}"
        outcome = (ValueError if isinstance(caught, ValueError) else RuntimeError)(text), None
    everyone = axis.all_gather_object(outcome, label)
    for rank, (failed, _) in enumerate(everyone):
        if failed is not None:
            place = f" (rank {rank})" if axis.size > 1 else ""
            raise type(failed)(f"{failed}{place}") from error
    return [given for _, given in everyone]


def on_first(axis: Axis, label: str, step: Callable[[], T]) -> T:
    """Do something on rank 0 alone and give every rank its answer; collective. As `on_all` otherwise."""
    first, *_ = on_all(axis, label, lambda: [step()] if axis.rank == 0 else [])
    return first[0]
