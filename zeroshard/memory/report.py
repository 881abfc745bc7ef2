"""The memory of this rank, measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.memory.process import ProcessMemory, measure_process
from zeroshard.sharding.runtime import Runtime
from zeroshard.tables import LINE, format_bytes, render


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of a rank by kind. The first five are on the device."""

    parameters: int
    """Main parameters, and replicated parameters in the compute dtype."""
    gradients: int
    """Gradients for the optimizer, and sums that are not reduced yet."""
    optimizer: int
    """Optimizer states."""
    unsharded: int
    """Full parameters that are gathered for a forward or backward only."""
    peak_unsharded: int
    """The largest `unsharded` since the engine was made or `reset_memory_report()`."""
    host: int = 0
    """Host memory for offloaded values, with the buffers that are kept for the next step."""
    pinned: int = 0
    """The part of `host` that is pinned."""
    nvme: int = 0
    """Values that are offloaded to NVMe."""

    @property
    def total(self) -> int:
        """Bytes on the device: parameters, gradients, optimizer states, and `unsharded`."""
        return self.parameters + self.gradients + self.optimizer + self.unsharded


@dataclass(frozen=True, kw_only=True)
class MemoryReport(ProcessMemory, ModelStates):
    """Bytes of this rank: model states by kind, and the whole process, which has its activations too."""

    rank: int
    """This rank among the data-parallel ranks."""
    num_ranks: int
    device: str
    """The device of this rank, such as "cuda:0"."""

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("parameters", format_bytes(self.parameters)),
            ("gradients", format_bytes(self.gradients)),
            ("optimizer states", format_bytes(self.optimizer)),
        ]
        if self.peak_unsharded:
            rows.append(("gathered", format_bytes(self.unsharded)))
        rows += [LINE, ("total", format_bytes(self.total)), LINE]
        others = {
            "gathered at the peak": self.peak_unsharded or None,
            "on the host": self.host or None,
            "on the host, pinned": self.pinned or None,
            "on NVMe": self.nvme or None,
            "allocated by torch": self.allocated,
            "allocated by torch at the peak": self.peak_allocated,
            "reserved by torch": self.reserved,
            "process (RSS)": self.rss,
            "process at the peak (RSS)": self.peak_rss,
        }
        rows += [(kind, format_bytes(count)) for kind, count in others.items() if count is not None]
        title = f"memory of rank {self.rank} of {self.num_ranks}, now, on {self.device}"
        return render(title, ("kind", "bytes"), rows)


def measure(runtime: Runtime, optimizer: Optimizer | None) -> MemoryReport:
    """Add up the storages behind parameters, gradients and optimizer states, each once."""
    resident = (b.full for b in runtime.buffers if b.is_resident)
    grads = (p.grad for p in runtime.parameters if p.grad is not None)
    context = runtime.context
    return MemoryReport(
        parameters=_storage_bytes([*(b.main for b in runtime.buffers), *resident]),
        gradients=_storage_bytes(grads) + runtime.reducer.local_bytes,
        optimizer=_storage_bytes(_states(runtime, optimizer)),
        unsharded=context.meter.now,
        peak_unsharded=context.meter.peak,
        host=context.host.num_bytes,
        pinned=context.host.pinned,
        rank=context.axes.dp.rank,
        num_ranks=context.axes.dp.size,
        device=str(context.device),
        **asdict(measure_process(context.device)),
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
