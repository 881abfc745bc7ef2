"""The objects and settings that the units and buffers of one engine share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.comm.mesh import Axes
from zeroshard.comm.streams import Streams
from zeroshard.parameters.state import ModuleState
from zeroshard.plan.buffers import Setting
from zeroshard.stores.store import TierMemory


@dataclass(slots=True)
class Meter:
    """Bytes of unsharded parameters that are not there at rest."""

    now: int = 0
    peak: int = 0

    def add(self, num_bytes: int) -> None:
        """Add bytes to the present number; a negative number takes them away."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The objects and settings that the units and buffers of one engine share."""

    axes: Axes
    setting: Setting
    device: torch.device
    streams: Streams
    memory: TierMemory
    meter: Meter
    state: ModuleState
    num_prefetch: int
    """The number of units that are gathered ahead."""
    output_dtype: torch.dtype | None
    """The dtype to which floating-point outputs of the root are cast; None: they stay as they are."""
