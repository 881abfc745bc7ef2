"""Activations on the host between forward and backward: the tensors that autograd saves in units.

A segment is the time from the beginning of one unit's forward to the beginning of the next one's.

    forward     | unit 1        | unit 2        | unit 3       | unit 4 ...
    to host                     | saved in 1    | saved in 2   | saved in 3
                                                ^ saved in 1 is freed

    backward    | unit 3            | unit 2            | unit 1 ...
    to device   | saved in 2        | saved in 1        |

So the device holds what two units have saved. The last unit of a forward is followed by none, and is not
copied: its backward comes at once. With `recompute="unit"` the same is true of the inputs that a checkpoint
saves for each unit.

[Note: Only memory that nobody else holds] A copy is started only when no tensor is left over its memory but
tensors that autograd has saved here. Otherwise the memory would not become free: parameters, buffers, masks
and tables that all units share, outputs that the caller keeps. Then nobody can write to the memory any more.
Until then the saved tensors are there, and a backward compares their versions. Torch compares them itself,
but not the versions of tensors that hooks have taken.

[Note: Whole storages] Autograd saves several views of one memory, such as x and x.flatten(0, 1). So the
memory is copied as bytes, once, and views of the same shape and strides are laid over it again.

Host memory for values of the device is kept until the next step: to pin memory is slow. A buffer is
taken for a copy and given back later, perhaps while the device has not come to its last copy yet. That is
safe, as the next copy into the buffer is queued after that one.

Memory of the device is copied to the host, and comes back:

    to_host      |-- copy a --|                             after compute has made a
    compute      | next unit  | wait, a is freed  ...  | needs a: wait |
    to_device                                  |-- a --|    into new memory of compute

Memory of the device is allocated and freed on compute. A copy reads and writes it on a side stream, so it is
held until compute has been told to wait for that copy. A copy that nobody needs any more may die at any
moment, in any thread and stream. Then its memory is left to `HostCopies.release_dead`,
or to the end of the buffer if nobody calls that any more.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.comm.streams import Mark, SideStream, Streams
from zeroshard.internals.autograd import is_in_backward, outermost_checkpoint
from zeroshard.internals.warn import warn_user
from zeroshard.sharding.context import Changes, Context
from zeroshard.sharding.unit import Unit
from zeroshard.stores.host import HostBuffer
from zeroshard.stores.storage import count_views
from zeroshard.stores.store import TierMemory

LEAST_BYTES = 1 << 20
"""Smaller memory stays on the device. At 25 GB/s a copy of 1 MiB and its way back take 84 us; the host needs
about as long to issue them, 130 us per tensor on a busy core. Norms and masks save many smaller tensors."""


def offload_activations(units: Sequence[Unit], changes: Changes, context: Context) -> None:
    """Keep tensors that autograd saves in the forwards of units on the host until their backward.

    Args:
        units: the root unit first; its own tensors stay on the device, as its backward comes first.
        changes: the changes of the modules.
        context: the objects that the engine's buffers share.
    """
    activations = SavedActivations(units, context)
    for unit in units[1:]:
        if not unit.recomputed_in:  # else the unit around it saves its inputs alone
            changes.around(unit.module, "offload", functools.partial(offloading, activations, unit.module))


def offloading(
    activations: SavedActivations, module: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a forward of a module whose saved tensors go to the host."""

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or is_in_backward():
            return forward(*args, **kwargs)
        if outermost_checkpoint() is not None:
            activations.warn(type(module).__name__)
            return forward(*args, **kwargs)
        activations.begin_segment()
        with saved_tensors_hooks(activations.pack, lambda saved: saved()):
            return forward(*args, **kwargs)

    return offloaded


def storages_of(units: Iterable[Unit]) -> frozenset[int]:
    """Return the addresses of the storages of the parameters of units, gathered or not."""
    return frozenset(buffer.full.untyped_storage()._cdata for unit in units for buffer in unit.buffers)


def storage_of(tensor: Tensor, device: torch.device, left_out: Container[int]) -> torch.UntypedStorage | None:
    """Return the storage of a saved tensor; None if it has none of its own on the device, or one left out."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    storage = tensor.untyped_storage() if is_plain and tensor.device == device else None
    return None if storage is None or storage._cdata in left_out else storage


class SavedActivations:
    """The saved tensors of one engine.

    They belong to the graphs of autograd and die with these; here are only weak references to them.

    Args:
        units: all units, whose parameters stay.
        context: the objects that their buffers share.
    """

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self._copies, self._left_out = HostCopies(context.memory, context.streams), storages_of(units)
        self._has_warned = False
        self._segment = _Segment(0)
        """The present one."""
        self._segments = weakref.WeakValueDictionary[int, _Segment]()
        """By number, those with saved tensors that are alive."""
        self._waiting = weakref.WeakValueDictionary[int, SavedMemory]()
        """By the address of the storage, which is alive: memory that is not copied yet."""
        self._copying: list[weakref.ref[SavedMemory]] = []
        """Memory whose copies were started at the beginning of the present segment."""
        self._entered = -1
        """The number of the segment in which a backward is, or was."""
        self._alone = count_views(torch.empty(0)) - 1
        """The holders that torch counts for a storage in addition to tensors."""

    # -- forward --------------------------------------------------------------------------------------

    def begin_segment(self) -> None:
        """Free the memory that was copied during the last segment, and start to copy what that has saved.

        Raises:
            RuntimeError: the host has not enough memory.
        """
        self._copies.release_dead()
        copying, self._copying = self._copying, []
        for reference in copying:
            if (memory := reference()) is not None:
                memory.release()
        for key, memory in list(self._waiting.items()):
            if any(tensor._version != version for tensor, version in memory.saved):
                del self._waiting[key]  # its backward is an error; the memory stays for the other tensors
            elif count_views(memory.saved[0][0]) - len(memory.saved) == self._alone:  # nobody else holds it
                del self._waiting[key]
                memory.start()
                self._copying.append(weakref.ref(memory))
        if self._segment:
            self._segment = _Segment(self._segment.number + 1)

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return the object that autograd saves instead of a tensor, whose call gives the tensor."""
        storage = storage_of(tensor, self._copies.device, self._left_out)
        if storage is None or storage.nbytes() < LEAST_BYTES or tensor.is_conj() or tensor.is_neg():
            return kept_near(tensor)
        key = storage._cdata
        memory = self._waiting.get(key)
        if memory is None:
            memory = self._waiting[key] = SavedMemory(self._copies)
        self._segment.append(weakref.ref(memory))
        self._segments[self._segment.number] = self._segment
        alias = tensor.detach()
        memory.saved.append((alias, alias._version))
        view = alias.storage_offset(), alias.shape, alias.stride()
        place = len(memory.saved) - 1
        return functools.partial(self._unpack, self._segment, memory, place, alias.dtype, view)

    def warn(self, name: str) -> None:
        """Warn once that a checkpoint of the model's own is around a unit."""
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                f"the host gets no activations of {name}: it is called inside an activation checkpoint of "
                "the model's own. Set recompute='unit' instead of that"
            )

    # -- backward -------------------------------------------------------------------------------------

    def _unpack(
        self, segment: _Segment, memory: SavedMemory, place: int, dtype: torch.dtype, view: tuple[Any, ...]
    ) -> Tensor:
        """Return a saved tensor, or one with its values, shape and strides.

        Args:
            segment: the segment in which it was saved.
            memory: the memory under it.
            place: its place among the tensors over this memory.
            dtype, view: its dtype; and its offset, shape and strides.

        Raises:
            RuntimeError: it was modified in place since; or the device has not enough memory.
        """
        is_needed = is_in_backward()
        if is_needed:
            self._enter(segment)
        if memory.saved:
            return checked(*memory.saved[place])
        values = memory.get()
        if not is_needed:  # somebody looks at the graph
            memory.drop()
        return torch.empty(0, dtype=dtype, device=values.device).set_(values.untyped_storage(), *view)

    def _enter(self, segment: _Segment) -> None:
        """Note that a backward needs a segment: fetch it and the one before.

        Of a graph that is kept for another backward, all that was fetched stays on the device.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        self._copies.release_dead()
        if segment.number == self._entered:
            return
        self._entered = segment.number
        before = max((number for number in self._segments if number < segment.number), default=-1)
        for near in (segment, self._segments.get(before, segment)):
            for reference in reversed(near):  # in the order of a backward
                if (memory := reference()) is not None:
                    memory.fetch()


class _Segment(list["weakref.ref[SavedMemory]"]):
    """The memory that was saved between the beginnings of two forwards; held by the tensors saved there.

    Memory of several saved tensors is there several times.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class SavedMemory:
    """One storage and the saved tensors over it: on the device, then on the host, and there again.

    Args:
        copies: the owner of the streams and of host memory.
    """

    __slots__ = ("__weakref__", "_buffer", "_copies", "_host", "_mark", "_near", "saved")

    def __init__(self, copies: HostCopies) -> None:
        self.saved: list[tuple[Tensor, int]] = []
        """Aliases of the saved tensors, which have no graph, with the versions that they had when they were
        saved; until the memory is freed on the device."""
        self._copies = copies
        self._buffer: HostBuffer | None = None
        """The host memory; None until the copy starts."""
        self._near: Tensor | None = None
        """The memory on the device, uint8, [num_bytes]: the source of the copy, or what it came back to."""
        self._mark: Mark | None = None
        """The end of the last copy, until compute waits for it."""

    def start(self) -> None:
        """Start to copy it to the host, after all compute so far.

        Raises:
            RuntimeError: the host has not enough memory.
        """
        storage = self.saved[0][0].untyped_storage()
        num_bytes, device = storage.nbytes(), self._copies.device
        self._buffer = self._copies.take(num_bytes)
        self._host = self._buffer.memory[:num_bytes]
        self._near = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))
        self._copy(self._copies.streams.to_host, self._host, self._near)

    def _copy(self, stream: SideStream, target: Tensor, values: Tensor) -> None:
        assert self._buffer is not None, "it has started"
        with torch.no_grad(), stream.after_compute():
            target.copy_(values, non_blocking=True)
        self._mark = self._buffer.last = stream.mark()

    def release(self) -> None:
        """Free it on the device, once compute has waited for the copy."""
        self.drop()
        self.saved.clear()

    def fetch(self) -> None:
        """Start to bring it back, if it was freed on the device.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        if self._buffer is not None and self._near is None:
            self._near = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._copies.device)
            self._copy(self._copies.streams.to_device, self._near, self._host)

    def get(self) -> Tensor:
        """Return the memory on the device, uint8, [num_bytes]; compute waits until it is there.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        self.fetch()
        self._follow()
        assert self._near is not None, "it has been fetched"
        return self._near

    def drop(self) -> None:
        """Free the memory on the device, once compute has waited for the copy; the host keeps the values."""
        self._follow()
        self._near = None

    def _follow(self) -> None:
        if self._mark is not None:
            self._mark.wait()
            self._mark = None

    def __del__(self) -> None:
        if self._buffer is not None:
            self._buffer.held = None if self._mark is None else self._near
            self._copies.left.append((self._buffer, self._mark))


def kept_near(tensor: Tensor) -> Callable[[], Tensor]:
    """Save a tensor on the device: an alias, as the tensor may hold the node that saves it."""
    alias = tensor.detach()
    return functools.partial(checked, alias, alias._version)


def checked(tensor: Tensor, version: int) -> Tensor:
    """Return a saved tensor if nobody has modified it; torch checks only tensors that no hook has taken."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(tensor.shape)} and {tensor.dtype} is at version {tensor._version}; "
            f"expected version {version} instead"
        )
    return tensor


# ------------------------------------------------------------------------------------- copies on the host


_PAGE = 4096
_CLASSES = 8
"""Classes of sizes between a power of two and the next, so that batches of many lengths share buffers. A
buffer is at most an eighth larger than asked for, or a page."""


def size_class(num_bytes: int) -> int:
    """Return the bytes of the buffer for `num_bytes`: a multiple of a page, up to an eighth more."""
    step = max(_PAGE, (1 << (max(num_bytes, 1).bit_length() - 1)) // _CLASSES)
    return -(-num_bytes // step) * step


class HostCopies:
    """Copy memory of one device to the host and back, each direction on its side stream.

    Host memory is in buffers by size class. Those in use and the free ones are never more than were in use at
    once.

    Args:
        memory: the memory of the rank, which counts the bytes of all buffers.
        streams: the side streams of the engine.
    """

    def __init__(self, memory: TierMemory, streams: Streams) -> None:
        self.device, self.streams, self._memory = memory.device, streams, memory
        self._free: list[HostBuffer] = []
        """The buffer that was given back last is at the end."""
        self._bytes_in_use = self._most_in_use = 0
        self.left: deque[tuple[HostBuffer, Mark | None]] = deque()
        """Buffers of dead copies, and the mark of each for which the compute stream has not waited yet.

        A buffer holds the memory of the device that is in use up to the mark. Dying copies fill this, which
        may interrupt anything: nothing else changes there.
        """

    def take(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of `size_class(num_bytes)`; the host waits for copies of buffers that go for it.

        Raises:
            RuntimeError: there is not so much memory.
        """
        size = size_class(num_bytes)
        buffer = next((one for one in reversed(self._free) if one.memory.nbytes == size), None)
        if buffer is not None:
            self._free.remove(buffer)
        self._most_in_use = max(self._most_in_use, self._bytes_in_use + size)
        most_free = self._most_in_use - self._bytes_in_use - size
        while sum(free.memory.nbytes for free in self._free) > most_free:
            self._memory.staging_bytes -= self._free.pop(0).memory.nbytes
        if buffer is None:
            buffer = HostBuffer(self._memory.host(size))
            self._memory.staging_bytes += size
        self._bytes_in_use += size
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back, as `take` returned it."""
        self._bytes_in_use -= buffer.memory.nbytes
        self._free.append(buffer)

    def release_dead(self) -> None:
        """Take back the memory of copies that have died. Called on the compute stream."""
        while self.left:
            buffer, mark = self.left.popleft()
            if mark is not None:
                mark.wait()
            buffer.held = None
            self.give(buffer)
