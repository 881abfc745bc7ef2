"""The engines that benchmarks/pipeline.py compares: zeroshard, and the schedules of torch by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import zeroshard
from pipeline_jobs import Job
from zeroshard.parallel.pipeline.actions import Schedule
from zeroshard.parallel.pipeline.schedules import build_schedule

TORCHS = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
"""torch's schedule beside each of ours; there is none beside Varuna's."""


@dataclass(frozen=True)
class Setting:
    """The setting that all engines of a run share."""

    job: Job
    num_microbatches: int

    def schedule(self, name: str) -> Schedule:
        """Our schedule with a name."""
        return build_schedule(name, dist.get_world_size(), self.num_microbatches)

    def runs(self, name: str) -> list[range]:
        """The run of blocks of each chunk; all have the same length."""
        num_chunks = self.schedule(name).num_chunks
        if self.job.num_blocks % num_chunks:
            raise ValueError(f"{name}: expected a multiple of {num_chunks} blocks, got {self.job.num_blocks}")
        size = self.job.num_blocks // num_chunks
        return [range(chunk * size, (chunk + 1) * size) for chunk in range(num_chunks)]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of all engines."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Ours:
    """An engine of zeroshard.

    Raises:
        RuntimeError: it cuts the model in other places than torch's chunks are cut by hand.
    """

    def __init__(self, setting: Setting, name: str) -> None:
        self._setting = setting
        config = {
            "stage": 0,
            "mesh": {"pp": dist.get_world_size()},
            "pipeline": {"schedule": name, "num_microbatches": setting.num_microbatches},
        }
        job = setting.job
        self.engine = zeroshard.initialize(job.model(), adamw, config, loss_fn=job.loss).engine
        own, runs = setting.schedule(name).chunks[dist.get_rank()], setting.runs(name)
        want = sum(_count(job.chunk(runs[chunk], job.cuts[0])) for chunk in own)
        if (got := _count(self.engine.module)) != want:
            raise RuntimeError(f"{name}: expected chunks with {want} elements on this rank, got {got}")

    def turn(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Take a step; return the mean loss."""
        return self.engine.train_batch(self._setting.job.named(inputs), targets)


class Torchs:
    """A schedule of torch.distributed.pipelining, its chunks cut by hand in one of the ways of the job."""

    def __init__(self, setting: Setting, name: str, cut: str) -> None:
        schedule, runs = setting.schedule(name), setting.runs(name)
        own, device = schedule.chunks[dist.get_rank()], torch.device("cpu")
        chunks = [setting.job.chunk(runs[chunk], cut) for chunk in own]
        stages = [
            PipelineStage(module, chunk, schedule.num_chunks, device)
            for module, chunk in zip(chunks, own, strict=True)
        ]
        is_single = name in ("gpipe", "1f1b")
        self._schedule = TORCHS[name](
            stages[0] if is_single else stages, setting.num_microbatches, loss_fn=setting.job.loss
        )
        self._is_first, self._is_last = 0 in own, schedule.num_chunks - 1 in own
        self._optimizer = adamw([parameter for chunk in chunks for parameter in chunk.parameters()])

    def turn(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Take a step; return the mean loss on the rank of the last chunk."""
        losses: list[Tensor] = []
        args = (inputs,) if self._is_first else ()
        if self._is_last:
            self._schedule.step(*args, target=targets, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*args, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if self._is_last else None


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
