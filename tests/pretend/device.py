"""Put the pretend device under zeroshard, and take it away again.

The engine's own streams.py and the accelerator's branches of collectives.py run unchanged; what they call
of torch is replaced. Besides, `resize_` of a storage tells when memory is freed and refilled, and a few
methods of tensors tell when the host reads values.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.pretend.clocks import Event, Stream, Timeline
from tests.pretend.trace import Trace, TraceMode
from tests.pretend.transport import Transport
from zeroshard.checkpoint import tensors
from zeroshard.comm import collectives, mesh, messages, moves, streams
from zeroshard.optim import onebit
from zeroshard.parallel.tensor.sequence import Activations
from zeroshard.stepping import rounding, wholes
from zeroshard.stores import files, store
from zeroshard.stores.files import FileTransfer, Swap

_resize = torch.UntypedStorage.resize_


@contextmanager
def pretend_device() -> Iterator[Trace]:
    """Inside, zeroshard believes that it runs on an accelerator, and everything is noted.

    A process group must be open. Nothing of the engine may be used any more after the end.
    """
    trace = Trace()
    transport = Transport(trace)
    with pytest.MonkeyPatch.context() as patch:
        _install(patch, trace, transport)
        with TraceMode(trace):
            yield trace
        with trace.paused():
            gc.collect()  # what the engine does when it ends needs the device
            transport.finish()


def _install(patch: pytest.MonkeyPatch, trace: Trace, transport: Transport) -> None:
    pretend_torch = _Torch(trace.timeline)
    patch.setattr(streams, "torch", pretend_torch)
    patch.setattr(streams, "has_streams", lambda device: True)
    patch.setattr(streams.Streams, "on", staticmethod(pretend_torch.naming_streams(streams.Streams.on)))
    for module in (collectives, mesh, messages):
        patch.setattr(module, "dist", transport)
    for module in (onebit, wholes):
        patch.setattr(module, "all_to_all", _labelling(collectives.all_to_all, transport))
    for cls in (collectives.Axis, Activations):
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_") and "label" in inspect.signature(method).parameters:
                patch.setattr(cls, name, _labelling(method, transport))

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        trace.resized(storage, before, size)
        return _resize(storage, size)

    patch.setattr(torch.UntypedStorage, "resize_", resize)
    _install_host(patch, trace)
    _install_moves(patch, trace)
    for name in ("cpu", "numpy", "tolist"):
        patch.setattr(torch.Tensor, name, _reading(getattr(torch.Tensor, name), trace))


def _install_host(patch: pytest.MonkeyPatch, trace: Trace) -> None:
    """Tell of memory of the host, which torch cannot tell from that of the pretend device."""
    patch.setattr(store, "host_memory", _pinning(store.host_memory, trace))
    map_ranges, round_ = files.map_ranges, rounding.round_in_chunks

    def mapped(*args: Any) -> torch.Tensor:
        memory = map_ranges(*args)
        trace.put_on_host([memory])
        return memory

    def rounded(out: torch.Tensor, values: torch.Tensor, key: int, start: int) -> None:
        """It is one kernel on a GPU."""
        trace.run_as_one("round", lambda: round_(out, values, key, start), [values], [out])

    with torch.device("cpu"):  # torch notes its functions with the first context, and keeps the note
        torch.empty(0)
    for name in ("empty", "zeros", "tensor"):
        patch.setattr(torch, name, _making(getattr(torch, name), trace))
    for name in ("frombuffer", "from_numpy", "get_rng_state"):
        patch.setattr(torch, name, _making(getattr(torch, name), trace, is_on_host=True))
    patch.setattr(files, "map_ranges", mapped)
    patch.setattr(rounding, "round_in_chunks", rounded)
    patch.setattr(tensors, "fill", _touching(tensors.fill, trace))
    _install_transfers(patch, trace)


def _install_transfers(patch: pytest.MonkeyPatch, trace: Trace) -> None:
    """Let transfers of files use their memory until somebody waits for them."""
    ends: weakref.WeakKeyDictionary[FileTransfer, Event] = weakref.WeakKeyDictionary()
    join = FileTransfer.join

    def starting(method: Callable[..., FileTransfer], *, is_write: bool) -> Callable[..., FileTransfer]:
        @functools.wraps(method)
        def start(swap: Swap, values: torch.Tensor, memory: torch.Tensor, *is_ready: Any) -> FileTransfer:
            with trace.paused():
                transfer = method(swap, values, memory)
            after = [wait.__self__.event for wait in is_ready]
            ends[transfer] = trace.transfer(memory, method.__name__, after, writes=is_write)
            return transfer

        return start

    def joined(transfer: FileTransfer) -> str:
        failure = join(transfer)
        if transfer in ends:
            ends[transfer].synchronize()
        return failure

    patch.setattr(Swap, "read", starting(Swap.read, is_write=True))
    patch.setattr(Swap, "write", starting(Swap.write, is_write=False))
    patch.setattr(FileTransfer, "join", joined)


def _install_moves(patch: pytest.MonkeyPatch, trace: Trace) -> None:
    """Let values of kernels move between device and host, whose tensors are all on the CPU."""

    def move(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
        if trace.is_on_host(tensor) is on_host:
            return tensor
        with trace.paused():
            moved = torch.empty_like(tensor, requires_grad=False)
        if on_host:
            trace.put_on_host([moved])
        return moved.copy_(tensor, non_blocking=not on_host)

    def by_device(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
        groups: dict[bool, list[int]] = {}
        for index, tensor in enumerate(tensors):
            groups.setdefault(trace.is_on_host(tensor), []).append(index)
        return list(groups.values())

    patch.setattr(moves, "to_device", lambda tensor, device: move(tensor, on_host=False))
    patch.setattr(moves, "beside", lambda tensor, other: move(tensor, on_host=trace.is_on_host(other)))
    patch.setattr(moves, "is_beside", lambda *both: len({*map(trace.is_on_host, both)}) == 1)
    patch.setattr(moves, "by_device", by_device)


def _pinning(host_memory: Callable[..., torch.Tensor], trace: Trace) -> Callable[..., Any]:
    """The function that allocates memory of the host, which goes with its last tensor."""

    def pinned(num_bytes: int, pinned: bool) -> torch.Tensor:
        with trace.paused():
            memory = host_memory(num_bytes, False)
        if num_bytes:
            trace.pin(memory, is_kept=False)
        return memory

    return pinned


def _making(make: Callable[..., Any], trace: Trace, *, is_on_host: bool = False) -> Callable[..., Any]:
    """The function of torch that makes a tensor: on the host always, or where the device is spelled "cpu".

    The pretend device itself is a `torch.device`, by which the engine asks for memory of the device.
    """

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if trace.is_paused or not (is_on_host or (isinstance(device, str) and device == "cpu")):
            return make(*args, **kwargs)
        with trace.paused():
            tensor = make(*args, **kwargs)
        trace.put_on_host([tensor])
        return tensor

    return made


def _touching(method: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    """The method that writes to the memory of its last argument past all operations."""

    @functools.wraps(method)
    def touch(*args: Any) -> Any:
        trace.touch(args[-1], method.__name__)
        with trace.paused():
            return method(*args)

    return touch


def _reading(method: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    """The method of a tensor, by which the host gets its values."""

    @functools.wraps(method)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        trace.read_on_host(tensor, method.__name__)
        return method(tensor, *args, **kwargs)

    return read


def _labelling(method: Callable[..., Any], transport: Transport) -> Callable[..., Any]:
    """The method of an axis; what it issues is noted with its label."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        with transport.labelled(signature.bind(*args, **kwargs).arguments["label"]):
            return method(*args, **kwargs)

    return labelled


class _Torch:
    """Stands in for `torch` in comm/streams.py."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._names: deque[str] = deque()
        self.accelerator = _Accelerator(timeline)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> Stream:  # noqa: N802
        return self._timeline.stream(self._names.popleft() if self._names else "side")

    def Event(self, device: torch.device | None = None, **kwargs: Any) -> Event:  # noqa: N802
        return Event(self._timeline, **kwargs)

    def naming_streams(self, make: Callable[..., streams.Streams]) -> Callable[..., streams.Streams]:
        """The streams that `make` makes are called as the fields that they are for."""

        def named(*args: Any) -> streams.Streams:
            self._names.extend(field.name for field in dataclasses.fields(streams.Streams))
            made = make(*args)
            self._names.clear()
            return made

        return named


class _Accelerator:
    """Stands in for `torch.accelerator`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._timeline.current

    def set_stream(self, stream: Stream) -> None:
        self._timeline.current = stream

    def synchronize(self, device: torch.device | None = None) -> None:
        self._timeline.current.synchronize()
