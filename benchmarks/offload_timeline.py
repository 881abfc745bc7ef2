"""The reads, steps and writes of one training step of the nvme tier, recorded from outside, as a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from zeroshard.stepping.stored import StoreHome
from zeroshard.tiers.files import Extent, FileTransfer, Swap

KINDS = ("read", "step", "write")


@dataclass
class Event:
    """A read, the step or a write of one part."""

    kind: str
    start: float
    """Seconds of time.perf_counter()."""
    end: float
    num_bytes: int = 0


@dataclass
class Recording:
    """The events of a training step."""

    events: list[Event] = field(default_factory=list)

    def num_bytes(self, kind: str) -> int:
        """Bytes that were read, or written."""
        return sum(event.num_bytes for event in self.events if event.kind == kind)

    @property
    def seconds(self) -> float:
        """From the first event to the end of the last one."""
        return max(event.end for event in self.events) - min(event.start for event in self.events)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record all transfers and steps of nvme tiers in this process."""
    recording = Recording()
    fetched = StoreHome.fetched

    def timed(kind: str, move: Callable[..., FileTransfer]) -> Callable[..., FileTransfer]:
        def call(swap: Swap, extent: Extent, memory: Tensor) -> FileTransfer:
            event = Event(kind, time.perf_counter(), 0.0, extent.padded)
            transfer = move(swap, extent, memory)

            def end(_: Future[str]) -> None:
                event.end = max(event.end, time.perf_counter())

            for future in transfer._futures:
                future.add_done_callback(end)
            recording.events.append(event)
            return transfer

        return call

    @contextmanager
    def step(tier: StoreHome, parameters: Sequence[Any]) -> Iterator[None]:
        with fetched(tier, parameters):
            start = time.perf_counter()
            yield
            recording.events.append(Event("step", start, time.perf_counter()))

    with (
        mock.patch.object(Swap, "read", timed("read", Swap.read)),
        mock.patch.object(Swap, "write", timed("write", Swap.write)),
        mock.patch.object(StoreHome, "fetched", step),
    ):
        yield recording


def draw(recordings: dict[str, Recording], path: Path) -> None:
    """Write a picture: for each engine three rows, read, step and write, over the time of its events."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(recordings), 1, figsize=(9, 1.6 * len(recordings) + 0.6), squeeze=False, sharex=True
    )
    colors = dict(zip(KINDS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
    for axis, (name, recording) in zip(axes[:, 0], recordings.items(), strict=True):
        first = min(event.start for event in recording.events)
        for event in recording.events:
            left, width = 1e3 * (event.start - first), 1e3 * (event.end - event.start)
            row = len(KINDS) - 1 - KINDS.index(event.kind)
            axis.barh(row, width, left=left, color=colors[event.kind], edgecolor="white", linewidth=0.5)
        axis.set_yticks(range(len(KINDS)), reversed(KINDS))
        axis.set_title(f"{name}: one part after the other", fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("milliseconds since the first read")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
