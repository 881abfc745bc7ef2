"""The device of a run of the fuzz: the CPU, or an accelerator that all ranks may share.

On CPUs a sharded run has the bits of plain PyTorch. On a GPU kernels are chosen by the addresses of their
operands too, so losses and norms are compared within a part of their size. There a case is also run with all
work on one stream, where nothing can be too early or too late. With side streams the same kernels run, so
the bits must be the same. In that run all streams are kept busy by turns, so that a missing wait gives wrong
numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroshard.comm.streams import SideStream

VARIABLE = "FUZZ_DEVICE"
_BUSY_CYCLES = 2_000_000
"""Of the device's clock, about a millisecond."""


def device() -> torch.device:
    """The device of the models."""
    return torch.device(os.environ.get(VARIABLE, "cpu"))


def has_streams() -> bool:
    """Whether two runs are compared that differ in their streams."""
    return device().type != "cpu"


def open_group() -> None:
    """Open the process group of a run on an accelerator; its kernels give the same bits each time."""
    if has_streams():
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.allow_tf32 = False
        dist.init_process_group(f"cpu:gloo,{device().type}:nccl", timeout=timedelta(seconds=45))


def delay() -> None:
    """Let the current stream be late."""
    if device().type == "cuda":
        torch.cuda._sleep(_BUSY_CYCLES)


@contextmanager
def one_stream() -> Iterator[None]:
    """Engines that are made inside put all work on the stream of compute."""
    init = SideStream.__init__

    def start(self: SideStream, device: torch.device) -> None:
        init(self, device)
        self._stream = torch.accelerator.current_stream(device)

    SideStream.__init__ = start
    try:
        yield
    finally:
        SideStream.__init__ = init


@contextmanager
def late_streams() -> Iterator[None]:
    """Inside, work on a side stream begins late."""
    after_compute = SideStream.after_compute

    @contextmanager
    def late(self: SideStream) -> Iterator[None]:
        with after_compute(self):
            delay()
            yield

    SideStream.after_compute = late
    try:
        yield
    finally:
        SideStream.after_compute = after_compute
