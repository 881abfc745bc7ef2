"""Note what each operation reads and writes, and on which stream it would run on a GPU.

A dispatch mode sees every operation, those of a backward included: autograd runs the nodes of CPU tensors
in the thread that called it, with its modes. Operations run at once on the CPU, so the values are right
whatever the streams say; only the notes tell what a GPU might have done. Of other threads than the main one
those are noted that enter the mode, see `threads.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend.clocks import HOST, Clock, Event, Point, Timeline
from tests.pretend.findings import Finding, Kind
from tests.pretend.memory import Access, Allocator, Block
from tests.pretend.orders import Collective
from tests.pretend.places import caller
from tests.pretend.signatures import (
    ALLOCATE_ONLY,
    COPIES,
    NO_KERNEL,
    READ_BACK,
    Region,
    regions_of,
    signature_of,
    tensors_of,
)


@dataclass
class Report:
    """What one rank's run gave; picklable."""

    findings: Counter[Finding]
    collectives: list[Collective]
    kernels: Counter[tuple[str, str]]
    """By the stream and what was run there."""


class _Thread(threading.local):
    """What each thread has of its own."""

    num_pauses = 0
    num_permits = 0
    """To wait for the device."""
    num_modes = 0
    """That are entered."""


@dataclass
class Trace:
    """The notes of one rank.

    A storage's key is the address of its C++ object; a block ends when that does.
    """

    timeline: Timeline = field(default_factory=Timeline)
    collectives: list[Collective] = field(default_factory=list)
    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: Counter[Finding] = field(default_factory=Counter)
    arriving: dict[int, Callable[[], None]] = field(default_factory=dict)
    """By a storage's key: to be called before its values are used; collectives put them there."""

    def __post_init__(self) -> None:
        self._allocator = Allocator(self.report)
        self._blocks: dict[int, Block | None] = {}
        """None for the host's memory, which no stream touches."""
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._names: dict[int, str] = {}
        self._thread = _Thread()
        self.lock = threading.RLock()
        """Held while something is noted."""

    # -- what a scenario asks ---------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing: what runs inside would not run on the device."""
        self._thread.num_pauses += 1
        try:
            yield
        finally:
            self._thread.num_pauses -= 1

    @contextmanager
    def syncs_allowed(self) -> Iterator[None]:
        """The host may wait for the device inside."""
        self._thread.num_permits += 1
        try:
            yield
        finally:
            self._thread.num_permits -= 1

    def name(self, tensor: Tensor, name: str) -> None:
        """Call the memory of a tensor by this name, from its next allocation on as well."""
        key = tensor.untyped_storage()._cdata
        self._names.setdefault(key, name)
        if (block := self._blocks.get(key)) is not None:
            block.name = self._names[key]

    def put_on_host(self, tensors: Iterable[Tensor]) -> None:
        """These lie in the host's memory: so do all values computed from nothing else."""
        for tensor in tensors:
            self._remember(tensor.untyped_storage(), None)

    def pin(self, memory: Tensor, *, is_kept: bool = True) -> None:
        """This is memory of the host that streams copy from and to, and the host must not touch meanwhile.

        Args:
            memory: all of a storage.
            is_kept: True if copies keep the memory, as torch's own pinned memory, until they are over.
        """
        name = f"{memory.nbytes} pinned bytes of {caller()}"
        block = self._allocator.pin(name, self.timeline.current, is_kept=is_kept)
        self._remember(memory.untyped_storage(), block)

    def is_on_host(self, tensor: Tensor) -> bool:
        """True for memory of the host."""
        return self._is_on_host(tensor.untyped_storage()._cdata)

    def device_bytes(self) -> int:
        """Bytes of the tensors on the device that have been seen and are alive."""
        on_device = [reference() for key, reference in self._ends.items() if not self._is_on_host(key)]
        return sum(storage.nbytes() for storage in on_device if storage is not None)

    def report(self, finding: Finding) -> None:
        self.findings[finding] += 1

    def to_report(self) -> Report:
        return Report(self.findings, self.collectives, self.kernels)

    def num_modes(self, more: int) -> None:
        """Note that this thread has entered the mode, or left it."""
        self._thread.num_modes += more

    # -- operations ---------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return bool(self._thread.num_pauses)

    def await_values(self, regions: Iterable[Region]) -> None:
        """Have the values of collectives arrive; the device would have waited, or there is a finding."""
        for region in regions if self.arriving else ():
            if (arrive := self.arriving.pop(region.key, None)) is not None:
                arrive()

    def run(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation and note it."""
        signature = signature_of(func)
        if signature.says_nothing:
            return func(*args, **kwargs)
        reads: list[Region] = []
        writes: list[Region] = []
        for position, name, is_written in signature.arguments:
            value = args[position] if position < len(args) else kwargs.get(name)
            (writes if is_written else reads).extend(regions_of(value))
        if signature.name == "aten::lift_fresh":  # torch.tensor() has made it
            fresh = [region for region in reads if region.key not in self._blocks]
            if caller().startswith("torch/optim"):  # a step's number, which optimizers keep on the host
                for region in fresh:
                    self._remember(region.storage, None)
            else:
                self.note("tensor", (), fresh, fresh)
            return func(*args, **kwargs)
        self.await_values([*reads, *writes])
        self._refuse_freed(signature.name, [*reads, *writes])
        out = func(*args, **kwargs)
        self._sort(signature.name, args, kwargs, reads, writes, out)
        return out

    def run_as_one(
        self, name: str, call: Callable[[], object], reads: Iterable[Tensor], writes: Iterable[Tensor]
    ) -> None:
        """Run operations that are one kernel on an accelerator, and note it."""
        if self.is_paused:
            call()
            return
        read, written = regions_of([*reads]), regions_of([*writes])
        with self.lock:
            self.await_values([*read, *written])
            self._refuse_freed(name, [*read, *written])
            with self.paused():
                call()
            self._sort(name, (), {}, read, written, None)

    def _sort(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        reads: list[Region],
        writes: list[Region],
        out: Any,
    ) -> None:
        """Note an operation by the memory that it uses: of the device, of the host, or of both."""
        short = name.removeprefix("aten::")
        known = {region.key for region in (*reads, *writes)}
        made = [region for region in regions_of(out) if region.key not in known]
        on_host = [self._is_on_host(key) for key in known]
        if on_host and all(on_host):
            self._note_on_host(short, reads, writes)
            for region in made:
                self._remember(region.storage, None)
        elif name in COPIES and any(on_host):
            self._copy(short, reads, writes, _is_async(args, kwargs))
        elif any(on_host):
            self._mix(short, [*args, *kwargs.values()], reads, writes, made)
        elif name in ALLOCATE_ONLY:
            for region in made:
                self._allocate(region.storage)
        elif name in READ_BACK:
            self._read_back(short, reads)
        elif name not in NO_KERNEL:
            self.note(short, reads, [*writes, *made], made)

    def note(
        self,
        name: str,
        reads: Iterable[Region],
        writes: Iterable[Region],
        made: Iterable[Region] = (),
    ) -> Point:
        """An operation on the current stream.

        Args:
            name: in findings.
            reads: memory that it reads.
            writes: memory that it writes.
            made: memory that is allocated for it.
        """
        stream, what = self.timeline.current, f"{name} at {caller()}"
        self.kernels[stream.name, what] += 1
        for region in made:
            self._allocate(region.storage)
        point = stream.issue()
        written = {(region.key, region.span): region for region in writes}
        read = {(region.key, region.span): region for region in reads}
        for regions, is_write in ((read, False), (written, True)):
            for key, region in regions.items():
                block = self.block_of(region.storage)
                if block is not None and (is_write or key not in written):
                    self._allocator.access(block, stream, Access(point, what, is_write, region.span))
        return point

    def _is_pinned(self, key: int) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.is_pinned

    def _is_on_host(self, key: int) -> bool:
        return self._blocks.get(key, self) is None or self._is_pinned(key)

    def _copy(self, name: str, reads: list[Region], writes: list[Region], is_async: bool) -> None:
        """Values go from the device to the host, or back; the host waits for it unless it is asked not to."""
        self.note(name, reads, writes)
        is_pageable = any(self._blocks.get(region.key, self) is None for region in writes)
        if is_pageable or not is_async:
            self._wait_here(name)

    def _mix(
        self, name: str, values: Any, reads: list[Region], writes: list[Region], made: list[Region]
    ) -> None:
        """A kernel that gets numbers of the host, 0-dim tensors; it can use no other memory of the host."""
        on_host = [tensor for tensor in tensors_of(values) if self.is_on_host(tensor)]
        numbers = [region for region in reads if self._is_on_host(region.key)]
        is_written = any(self._is_on_host(region.key) for region in writes)
        if is_written or "foreach" in name or any(tensor.dim() for tensor in on_host):
            raise RuntimeError(f"{name} of tensors on the device and on the host at {caller()}")
        self._note_on_host(name, numbers, ())
        self.note(name, [region for region in reads if region not in numbers], [*writes, *made], made)

    def join_hosts(self, tensor: Tensor) -> None:
        """This thread comes after all that other threads themselves did with pinned memory."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        with self.lock:
            for access in block.accesses() if block is not None else ():
                if access.point.stream.startswith(HOST):
                    self.timeline.host.join(Clock({access.point.stream: access.point.tick}))

    def touch(self, tensor: Tensor, name: str) -> None:
        """The host writes to memory past all operations; for memory of the device it waits."""
        regions = regions_of(tensor)
        with self.lock:
            if self.is_on_host(tensor):
                self._note_on_host(name, (), regions)
            else:
                self.await_values(regions)
                self.note(name, (), regions)
                self._wait_here(name)

    def transfer(self, tensor: Tensor, name: str, after: Iterable[Event] = (), *, writes: bool) -> Event:
        """A thread of the host reads or writes memory along with all others, between the events."""
        regions = regions_of(tensor)
        with self.lock, (stream := self.timeline.stream("transfer")):
            for event in after:
                stream.wait_event(event)
            self.note(name, () if writes else regions, regions if writes else ())
        return stream.record_event()

    def _note_on_host(self, name: str, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        """An operation that the host itself does at once."""
        for regions, is_write in ((reads, False), (writes, True)):
            for region in regions:
                block = self._blocks.get(region.key)
                if block is not None:  # pinned
                    point = self.timeline.act_on_host()
                    access = Access(point, f"{name} at {caller()}", is_write, region.span)
                    self._allocator.access_on_host(block, access, self.timeline.host)

    def read_on_host(self, tensor: Tensor, name: str) -> None:
        """The host takes the values of a tensor past all operations: tolist(), numpy(), cpu()."""
        if not self._thread.num_modes or self.is_paused:
            return
        with self.lock:
            regions = regions_of(tensor)
            self.await_values(regions)
            if all(self._is_on_host(region.key) for region in regions):
                self._note_on_host(name, regions, ())
            elif any(self.block_of(region.storage) is not None for region in regions):
                self._read_back(name, regions)

    def resized(self, storage: torch.UntypedStorage, before: int, after: int) -> None:
        """A storage gives its memory back, or gets new memory."""
        if before and not after:
            self.arriving.pop(storage._cdata, None)
            if (block := self.block_of(storage)) is not None:
                self._allocator.free(block)
        elif after and not before:
            self._allocate(storage, after)

    def _read_back(self, name: str, reads: Iterable[Region]) -> None:
        if caller().startswith("torch/optim"):
            return  # of a step's number, which optimizers keep on the host
        self.note(name, reads, ())
        self._wait_here(name)

    def _wait_here(self, name: str) -> None:
        """The host waits for all that the current stream was given."""
        self.timeline.current.synchronize()
        if not self._thread.num_permits:
            self.report(Finding(Kind.SYNC, f"{name} at {caller()}"))

    def _refuse_freed(self, name: str, regions: Iterable[Region]) -> None:
        """An operation would crash the process: its memory is really gone."""
        for region in regions:
            block = self._blocks.get(region.key)
            if block is not None and block.is_freed and not region.storage.nbytes():
                finding = Finding(Kind.FREED, f"{block.name}: {name} at {caller()} after its end")
                self.report(finding)
                raise RuntimeError(str(finding))

    # -- blocks -------------------------------------------------------------------------------------------

    def block_of(self, storage: torch.UntypedStorage) -> Block | None:
        """The memory of a storage; None where it is the host's, or there is none."""
        key = storage._cdata
        if key not in self._blocks:
            if not storage.nbytes():
                return None
            name = self._names.get(key, f"{storage.nbytes()} bytes first seen at {caller()}")
            self._remember(storage, self._allocator.adopt(name, self.timeline.current))
        return self._blocks[key]

    def _allocate(self, storage: torch.UntypedStorage, num_bytes: int | None = None) -> None:
        num_bytes = storage.nbytes() if num_bytes is None else num_bytes
        if not num_bytes:
            return
        key = storage._cdata
        name = self._names.get(key) or f"{num_bytes} bytes from {caller()}"
        self._remember(storage, self._allocator.allocate(name, self.timeline.current))

    def _remember(self, storage: torch.UntypedStorage, block: Block | None) -> None:
        key = storage._cdata
        if key not in self._ends:
            self._ends[key] = weakref.ref(storage, lambda _: self._end(key))
        self._blocks[key] = block

    def _end(self, key: int) -> None:
        with self.lock:
            self._names.pop(key, None)
            self._ends.pop(key, None)
            self.arriving.pop(key, None)
            if (block := self._blocks.pop(key, None)) is not None:
                clock = Clock(self.timeline.main)
                # The thread of a transfer, which has no clock, may let memory go last, after whoever waited.
                clock.join(self.timeline.host or self.timeline.awaited)
                self._allocator.free(block, clock)


def _is_async(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or any(args[2:]))


class TraceMode(TorchDispatchMode):
    """While entered, every operation is noted."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __enter__(self) -> TraceMode:
        self._trace.num_modes(1)
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._trace.num_modes(-1)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._trace.is_paused:
            return func(*args, **(kwargs or {}))
        with self._trace.lock:
            return self._trace.run(func, args, kwargs or {})
