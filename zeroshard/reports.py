"""The part of an engine that tells what this rank holds and sends."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zeroshard.checkpoint.capture import EngineState
from zeroshard.comm.counter import CommReport
from zeroshard.comm.mesh import Axes
from zeroshard.memory.report import MemoryReport, measure
from zeroshard.parallel.pipeline.choice import schedule_of
from zeroshard.parallel.pipeline.cut import PipelineReport, report_cut
from zeroshard.parallel.pipeline.part import ModelPart
from zeroshard.parallel.pipeline.training import PipelineTraining
from zeroshard.sharding.runtime import Runtime


class Reports:
    """The reports of an engine about its rank."""

    optimizer: Optimizer | None
    _parts: EngineState
    _runtime: Runtime
    _axes: Axes
    _part: ModelPart | None
    _pipeline: PipelineTraining | None

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh; gone once the interpreter ends."""
        assert self._axes.mesh is not None, "the interpreter has not ended"
        return self._axes.mesh

    def memory_report(self) -> MemoryReport:
        """Measured bytes of this rank: model states by kind, and the process."""
        versions = None if self._pipeline is None else self._pipeline.versions
        peak = 0 if versions is None else versions.peak_bytes
        averages = self._parts.averages.values()
        return measure(self._runtime, self.optimizer, averages, peak_versions=peak)

    def reset_memory_report(self) -> None:
        """Start the search for the largest `unsharded` and versions anew, from those that are there now."""
        meter = self._runtime.context.meter
        meter.peak = meter.now
        if self._pipeline is not None and self._pipeline.versions is not None:
            self._pipeline.versions.reset_peak()

    def comm_report(self) -> CommReport:
        """Calls, bytes and waits by collective since the last `reset_comm_report()`."""
        axis = self._axes.world
        return axis.counter.report(rank=axis.rank, num_ranks=axis.size, is_host_waiting=axis.exchanges)

    def pipeline_report(self) -> PipelineReport:
        """Blocks, share of the time and parameters of each chunk of the pipeline.

        Raises:
            RuntimeError: the model is not cut into chunks.
        """
        if self._part is None:
            raise RuntimeError("pipeline_report(): expected mesh.pp above 1, got 1")
        config = self._part.config
        return report_cut(self._part.cut, schedule_of(config, config.pipeline.num_microbatches))

    def reset_comm_report(self) -> None:
        """Start counting from zero."""
        self._axes.world.counter.reset()
