"""The memory and the traffic of this rank, measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm.counter import KINDS, Counter
from zeroshard.forwards.quantized import scales_in
from zeroshard.memory.tiered import STATES, ModelStates, byte_rows
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.runtime import Runtime
from zeroshard.stores.store import TierMemory
from zeroshard.tables import LINE, format_bytes, render

if TYPE_CHECKING:
    from zeroshard.engine import Engine

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """Bytes of this process: of the allocator on an accelerator, of the operating system on the CPU."""

    allocated: int | None = None
    """Bytes in tensors, by the allocator of the device, also in tensors of others; None on the CPU."""
    reserved: int | None = None
    """Bytes that the allocator of the device has taken from the driver; None on the CPU."""
    peak_allocated: int | None = None
    """The largest `allocated` since the process began, or since torch's counters were reset."""
    rss: int | None = None
    """Resident memory of the process, with the code of Python and torch; None on an accelerator."""
    peak_rss: int | None = None
    """The largest `rss` since the process began."""


def measure_process(device: torch.device) -> ProcessMemory:
    """Read the counters for a device; the host does not wait for it."""
    if device.type == "cpu":
        import psutil  # when a report is asked for, not with the package

        rss = psutil.Process().memory_info().rss
        # The system's peak may lag by some pages.
        return ProcessMemory(rss=rss, peak_rss=max(rss, _peak_rss()))
    return ProcessMemory(
        allocated=torch.accelerator.memory_allocated(device),
        reserved=torch.accelerator.memory_reserved(device),
        peak_allocated=torch.accelerator.max_memory_allocated(device),
    )


def _peak_rss() -> int:
    if _STATUS.exists():  # Linux's ru_maxrss begins with the value of the process that started this one
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, others KiB


@dataclass(frozen=True, kw_only=True)
class MemoryReport(ProcessMemory, ModelStates):
    """Bytes of this rank: model states by kind, and the whole process, which has its activations too."""

    rank: int
    """This rank among the data-parallel ranks."""
    num_ranks: int
    device: str
    """The device of this rank, such as "cuda:0"."""
    expected: ModelStates | None = None
    """What `zeroshard.estimate` had said before, if that was given: a column of the table."""

    def __str__(self) -> str:
        columns: dict[str, ModelStates] = {"bytes": self}
        columns |= {} if self.expected is None else {"expected": self.expected}
        reports = columns.values()
        states = byte_rows(reports, STATES | {"gathered": "unsharded"})
        rows = [*states, LINE, *byte_rows(reports, {"total": "total"}), LINE, *byte_rows(reports, _OTHERS)]
        title = f"memory of rank {self.rank} of {self.num_ranks}, now, on {self.device}"
        return render(title, ("kind", *columns), rows)


_OTHERS = {
    "gathered at the peak": "peak_unsharded",
    "activations": "activations",
    "versions of weights at the peak": "peak_versions",
    "on the host": "host",
    "on the host, pinned": "pinned",
    "on NVMe": "nvme",
    "allocated by torch": "allocated",
    "allocated by torch at the peak": "peak_allocated",
    "reserved by torch": "reserved",
    "process (RSS)": "rss",
    "process at the peak (RSS)": "peak_rss",
}


def memory_report(engine: Engine, expected: ModelStates | None = None) -> MemoryReport:
    """Measured bytes of this rank: model states by kind, each storage once, and the process.

    Args:
        expected: what `zeroshard.estimate` says of the model; the table shows it, too.
    """
    method = None if engine._pipeline is None else engine._pipeline.method
    peak = 0 if method is None else method.peak_bytes
    runtime, context = engine._runtime, engine._runtime.context
    kept = (copy.values for b in runtime.buffers if (copy := b.store.copy) is not None)
    resident = (b.full for b in runtime.buffers if b.is_resident)
    parameters = _by_tier([*(b.main for b in runtime.buffers), *kept, *resident], context.memory)
    gradients = _by_tier((p.grad for p in runtime.parameters if p.grad is not None), context.memory)
    hooked = [] if runtime.state.hook is None else runtime.state.hook.tensors
    states = _by_tier([*_states(runtime, engine.optimizer), *hooked], context.memory)
    scales = _by_tier(scales_in(runtime.module), context.memory)
    averages = (tensor for own in engine._parts.averages.values() for tensor in own.tensors)
    averaged = _by_tier(averages, context.memory)
    kinds = parameters, gradients, states, averaged
    buffers = context.memory.staging_bytes
    pinned_buffers = buffers if context.device.type == "cuda" else 0
    return MemoryReport(
        parameters=parameters[Tier.DEVICE],
        gradients=gradients[Tier.DEVICE] + runtime.reducer.local_bytes,
        optimizer=states[Tier.DEVICE] + context.memory.piece_bytes,
        averages=averaged[Tier.DEVICE],
        scales=scales[Tier.DEVICE],
        unsharded=context.meter.now,
        peak_unsharded=context.meter.peak,
        peak_versions=peak,
        host=sum(kind[Tier.HOST] for kind in kinds) + buffers,
        pinned=sum(kind["pinned"] for kind in kinds) + pinned_buffers,
        nvme=context.memory.swap.num_bytes,
        rank=context.axes.world.rank,
        num_ranks=context.axes.world.size,
        device=str(context.device),
        expected=expected,
        **asdict(measure_process(context.device)),
    )


def take_peak(engine: Engine) -> int:
    """Return the most bytes on the device since the last call; on the CPU, of model states alone."""
    device = engine._runtime.context.device
    if device.type == "cpu":
        report = engine.memory_report()
        gradients = sum(p.nbytes for p in engine._runtime.parameters if p.requires_grad)
        return report.total - report.unsharded - report.gradients + report.peak_unsharded + gradients
    peak = torch.accelerator.max_memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    return peak


def reset_memory_report(engine: Engine) -> None:
    """Start the search for the largest `unsharded` and versions anew, from those that are there now."""
    meter = engine._runtime.context.meter
    meter.peak = meter.now
    if engine._pipeline is not None and engine._pipeline.method is not None:
        engine._pipeline.method.reset_peak()


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


def _by_tier(tensors: Iterable[Tensor], memory: TierMemory) -> dict[Tier | str, int]:
    """The bytes of the storages under tensors, each once, by their tier, and of the pinned ones."""
    found, seen = dict[Tier | str, int].fromkeys((*Tier, "pinned"), 0), set[tuple[Tier, int]]()
    for tensor in tensors:
        tier, storage = memory.tier_of(tensor), tensor.untyped_storage()
        if (key := (tier, storage.data_ptr())) not in seen:
            seen.add(key)
            is_pinned = memory.device.type == "cuda" and tensor.is_cpu and tensor.is_pinned()
            found[tier] += storage.nbytes()
            found["pinned"] += storage.nbytes() * is_pinned
    return found


@dataclass(frozen=True)
class CommReport:
    """Traffic of this rank since the last reset, by collective, for any transport."""

    bytes_sent: Mapping[str, int]
    """Bytes that this rank sends to others, by collective."""
    calls: Mapping[str, int]
    """Number of collectives that were started, by collective."""
    waited_s: Mapping[str, float]
    """Seconds that the host stood still until a collective was over, by collective.

    Waiting for a slower rank is part of it; transfers while this rank computes are not. An accelerator waits
    by itself for "all_gather" and "reduce_scatter", which then have 0 here: the host goes on.
    """
    elapsed_s: float
    """Seconds since the last reset."""
    rank: int
    """This rank among the data-parallel ranks."""
    num_ranks: int

    def __str__(self) -> str:
        def row(name: str, calls: int, sent: int, waited_s: float) -> tuple[str, ...]:
            return name, str(calls), format_bytes(sent), f"{waited_s:.3f} s" if waited_s else "-"

        calls, sent, waited = self.calls, self.bytes_sent, self.waited_s
        rows = [row(kind, calls[kind], sent[kind], waited[kind]) for kind in KINDS if calls[kind]]
        total = row("total", sum(calls.values()), sum(sent.values()), sum(waited.values()))
        title = f"communication of rank {self.rank} of {self.num_ranks} in {self.elapsed_s:.3f} s"
        table = render(title, ("collective", "calls", "sent", "host waited"), [*rows, LINE, total])
        return (
            f"{table}\nhost waited: time in which the host stood still until a collective was over;\n"
            "-: not at all, as for gathers and reductions where the device waits by itself"
        )


def comm_report(engine: Engine) -> CommReport:
    """Calls, bytes and waits by collective since the last `reset_comm_report()`."""
    world = engine._axes.world
    return measure_traffic(world.ledger.counter, rank=world.rank, num_ranks=world.size)


def reset_comm_report(engine: Engine) -> None:
    """Start counting from zero."""
    engine._axes.world.ledger.counter = Counter()


def measure_traffic(counter: Counter, *, rank: int = 0, num_ranks: int = 1) -> CommReport:
    """Return the sums of a counter so far, for a report that names one rank of so many."""
    sent, calls = ({kind: sums[kind] for kind in KINDS} for sums in (counter.bytes_sent, counter.calls))
    waited_s, elapsed_s = dict(counter.waited_s), time.monotonic() - counter.since
    return CommReport(sent, calls, waited_s, elapsed_s, rank, num_ranks)
