"""The memory of a rank over time, by kind, with what is alive at the peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from zeroshard.memory.report import MemoryReport
from zeroshard.profiling.timeline import Label
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import UnitState

KINDS = ("states", "unsharded", "packed", "other")
"""The kinds of memory, as `MemorySample` has them."""


class MemorySample(NamedTuple):
    """Bytes of a rank at the begin of a phase."""

    seconds: float
    """Since the begin of the profile, on the clock of the host."""
    phase: Label
    states: int
    """Parameters, scales, optimizer states and averages at rest: at the begin, and from the first step on."""
    unsharded: int
    """Gathered parameters."""
    packed: int
    """Buffers in which gradients are packed for a reduction."""
    other: int
    """The rest: activations, gradients, and all that the rest of the program holds."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.states + self.unsharded + self.packed + self.other

    @property
    def kinds(self) -> Mapping[str, int]:
        """Bytes by kind."""
        return {kind: getattr(self, kind) for kind in KINDS}


class Peak(NamedTuple):
    """The sample with the most bytes."""

    sample: MemorySample
    units: tuple[str, ...]
    """The units that were gathered."""


class MemoryWatch:
    """Takes samples.

    On an accelerator they add up to what torch has allocated there; on the CPU to the resident memory of the
    process. So there `other` also has Python, the libraries, and freed memory that the process keeps.

    Args:
        runtime: the runtime of the engine.
        at_rest: the memory at the begin.
    """

    def __init__(self, runtime: Runtime, at_rest: MemoryReport) -> None:
        self._runtime = runtime
        self.note_states(at_rest)
        self._count = _counter(runtime.context.device)
        self.samples: list[MemorySample] = []
        self.peak: Peak | None = None

    def note_states(self, at_rest: MemoryReport) -> None:
        """Take over the memory at rest, which the first step of an optimizer adds its states to."""
        self._states = at_rest.total - at_rest.gradients - at_rest.unsharded

    def take(self, seconds: float, phase: Label) -> None:
        """Take a sample at the begin of a phase."""
        unsharded, packed = self._runtime.context.meter.now, self._runtime.reducer.packed_bytes
        other = self._count() - self._states - unsharded - packed
        sample = MemorySample(seconds, phase, self._states, unsharded, packed, max(0, other))
        self.samples.append(sample)
        if self.peak is None or sample.total > self.peak.sample.total:
            units = self._runtime.units
            gathered = (u.described for u in units if u.state is not UnitState.SHARDED and not u.is_resident)
            self.peak = Peak(sample, tuple(gathered))


def _counter(device: torch.device) -> Callable[[], int]:
    """Return a function that counts the bytes of this process on a device."""
    if device.type != "cpu":
        return lambda: torch.accelerator.memory_allocated(device)
    import psutil  # when a profile is asked for, not with the package

    process = psutil.Process()
    return lambda: int(process.memory_info().rss)
