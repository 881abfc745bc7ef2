"""The memory of this rank, measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.sharding.runtime import Runtime
from zeroshard.tables import format_bytes, render


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes on this rank. The first five are on the device."""

    _title: ClassVar[str] = "memory of this rank"

    parameters: int
    """Main parameters, and replicated parameters in the compute dtype."""
    gradients: int
    """Gradients for the optimizer, and sums that are not reduced yet."""
    optimizer: int
    """Optimizer states."""
    unsharded: int
    """Full parameters that are gathered for a forward or backward only."""
    peak_unsharded: int
    """The largest `unsharded` since the engine was made."""
    host: int = 0
    """Values that are offloaded to host memory."""
    pinned: int = 0
    """The part of `host` that is pinned."""
    nvme: int = 0
    """Values that are offloaded to NVMe."""

    def __str__(self) -> str:
        rows = [(field.name, format_bytes(getattr(self, field.name))) for field in fields(self)]
        return render(self._title, ("kind", "bytes"), rows)


def measure(runtime: Runtime, optimizer: Optimizer | None) -> MemoryReport:
    """Add up the storages behind parameters, gradients and optimizer states, each once."""
    resident = (b.full for b in runtime.buffers if b.is_resident)
    grads = (p.grad for p in runtime.parameters if p.grad is not None)
    return MemoryReport(
        parameters=_storage_bytes([*(b.main for b in runtime.buffers), *resident]),
        gradients=_storage_bytes(grads) + runtime.reducer.local_bytes,
        optimizer=_storage_bytes(_states(runtime, optimizer)),
        unsharded=runtime.context.meter.now,
        peak_unsharded=runtime.context.meter.peak,
    )


def _states(runtime: Runtime, optimizer: Optimizer | None) -> Iterator[Tensor]:
    if optimizer is None:
        return
    for parameter in runtime.parameters:
        # Not `.get`: a state that is looked up is made by the optimizer's defaultdict.
        if parameter in optimizer.state:
            for value in optimizer.state[parameter].values():
                if isinstance(value, Tensor):
                    yield from _with_storage(value)


def _with_storage(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that a subclass without a storage of its own wraps, as torchao's states are."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _with_storage(getattr(tensor, name))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
