"""The report of a cut: blocks, time and parameters of each chunk."""

from __future__ import annotations

from typing import NamedTuple

from zeroshard.parallel.pipeline.actions import Schedule
from zeroshard.parallel.pipeline.cut import Cut
from zeroshard.tables import format_bytes, render


class ChunkReport(NamedTuple):
    """A chunk of the model."""

    rank: int
    """Its pipeline rank."""
    blocks: tuple[str, ...]
    """The names of its blocks."""
    time_share: float
    """Its part of the time of all chunks, 0 to 1. Without a measurement parameters stand for time."""
    parameter_bytes: int
    """Bytes of its parameters, as the model has them; with modules before or after the blocks."""


class PipelineReport(NamedTuple):
    """The chunks of a model, in its order; the same on all ranks."""

    chunks: tuple[ChunkReport, ...]
    is_measured: bool
    """True if times were measured. False: parameters stand for them."""

    def __str__(self) -> str:
        origin = "measured" if self.is_measured else "by number of parameters"
        rows = [
            (
                f"chunk {number}",
                str(chunk.rank),
                chunk.blocks[0] if len(chunk.blocks) == 1 else f"{chunk.blocks[0]} to {chunk.blocks[-1]}",
                f"{chunk.time_share:.1%}",
                format_bytes(chunk.parameter_bytes),
            )
            for number, chunk in enumerate(self.chunks)
        ]
        columns = ("", "pipeline rank", "blocks", "time", "parameters")
        return render(f"chunks of the model; time {origin}", columns, rows)


def report_cut(cut: Cut, schedule: Schedule) -> PipelineReport:
    """Return the report of a cut whose chunks are placed as in a schedule."""
    total = sum(block.time for block in cut.blocks)
    chunks = []
    for chunk, run in enumerate(cut.runs):
        own = [cut.blocks[number] for number in run]
        names = tuple(cut.outline.blocks[number] for number in run)
        share = sum(block.time for block in own) / total if total else 0.0
        num_bytes = sum(block.parameter_bytes for block in own)
        chunks.append(ChunkReport(schedule.placement[chunk], names, share, num_bytes))
    return PipelineReport(tuple(chunks), cut.is_measured)
