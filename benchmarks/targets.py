"""The targets of the project, and the measurements that judge them: a table of docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from documents import Document
from medians import Median
from tables import Table, interval


def _step_ratio(engine: str, peer: str) -> Callable[[Document], Median]:
    """Find the ratio of two engines in a document of step_time.py."""

    def find(document: Document) -> Median:
        for i in range(document.length("rows", "ratios")):
            if (engine, peer) == tuple(
                document.field("rows", "ratios", i, key) for key in ("engine", "peer")
            ):
                return document.median("rows", "ratios", i)
        raise ValueError(f"Expected a ratio of {engine} to {peer} in {document.path.name}, got none")

    return find


def _row_ratio(name: str, key: str, **row: str) -> Callable[[Document], Median]:
    """Find the ratio `key` of the row of a list, `rows` or a list inside, that has these fields."""

    def find(document: Document) -> Median:
        where = ("rows", name) if name else ("rows",)
        for i in range(document.length(*where)):
            if all(document.field(*where, i, field) == value for field, value in row.items()):
                return document.median(*where, i, key)
        raise ValueError(f"Expected a row {row} in {document.path.name}, got none")

    return find


def _value(*keys: str) -> Callable[[Document], Median]:
    """Find a median at a path."""
    return lambda document: document.median("rows", *keys)


@dataclass(frozen=True)
class Target:
    """A bound for a measured value."""

    what: str
    bound: float
    """Of the median, in the unit of the value."""
    document: str
    """The name of the JSON document."""
    find: Callable[[Document], Median]
    is_least: bool = False
    """True if the bound is the least value, not the most."""

    def is_met(self, median: Median) -> bool:
        """True if the median keeps the bound."""
        return median.value >= self.bound if self.is_least else median.value <= self.bound


TARGETS = (
    Target(
        "a step of stage 1, batch 1, of DistributedDataParallel's",
        1.02,
        "step_time_2ranks_batch1",
        _step_ratio("zeroshard-1", "ddp"),
    ),
    Target(
        "a step of stage 1, batch 1, after an untimed one of DistributedDataParallel's",
        1.02,
        "step_time_2ranks_batch1_leadin",
        _step_ratio("zeroshard-1", "ddp"),
    ),
    Target(
        "a step of stage 2, batch 1, of DistributedDataParallel's",
        1.02,
        "step_time_2ranks_batch1",
        _step_ratio("zeroshard-2", "ddp"),
    ),
    Target(
        "a step of stage 2, batch 1, after an untimed one of DistributedDataParallel's",
        1.02,
        "step_time_2ranks_batch1_leadin",
        _step_ratio("zeroshard-2", "ddp"),
    ),
    Target(
        "a step of stage 3, batch 1, of FSDP2's",
        0.55,
        "step_time_2ranks_batch1",
        _step_ratio("zeroshard-3", "fsdp2"),
    ),
    Target(
        "a step of stage 3, batch 4, of FSDP2's",
        0.75,
        "step_time_2ranks_batch4",
        _step_ratio("zeroshard-3", "fsdp2"),
    ),
    Target(
        "a step of stage 3, batch 1, of DeepSpeed's",
        0.55,
        "step_time_2ranks_batch1",
        _step_ratio("zeroshard-3", "deepspeed-3"),
    ),
    Target(
        "a step of one rank alone, of plain PyTorch's",
        1.01,
        "step_time_1rank_batch1",
        _step_ratio("zeroshard-3", "plain"),
    ),
    Target(
        "on an H100, a step of stage 3 with 0.84 B parameters, of plain PyTorch's with fp32 main parameters",
        1.01,
        "step_time_cuda_1rank_dim2048",
        _step_ratio("zeroshard-3", "plain-main"),
    ),
    Target(
        "on an H100, the same of FSDP2's",
        1.0,
        "step_time_cuda_1rank_dim2048",
        _step_ratio("zeroshard-3", "fsdp2"),
    ),
    Target(
        "to save a checkpoint, of torch.distributed.checkpoint's time",
        1.1,
        "checkpoint_2ranks",
        _value("summary", "save, ratio to DCP"),
    ),
    Target("to load it", 1.1, "checkpoint_2ranks", _value("summary", "load, ratio to DCP")),
    Target(
        "the call that saves in the background, of a blocking save",
        0.2,
        "checkpoint_2ranks",
        _value("summary", "background call, ratio to blocking save"),
    ),
    Target(
        "a step of AdamW8bit with AVX2, of torch's fused AdamW",
        4.0,
        "optimizers_cpu",
        _row_ratio("steps", "ratio_to_fused", optimizer="zeroshard AdamW8bit"),
    ),
    Target(
        "the same without numba",
        20.0,
        "optimizers_cpu",
        _row_ratio("steps", "ratio_to_fused", optimizer="zeroshard AdamW8bit, torch operations"),
    ),
    Target(
        "AdamW8bit with main parameters of bf16, of the same in fp32",
        1.5,
        "main_dtype_cpu",
        _row_ratio("", "ratio_to_fp32", optimizer="AdamW8bit", main_dtype="bf16"),
    ),
    Target(
        "speed of a step with states in files, of one thread that reads these bytes and then writes them",
        0.9,
        "nvme",
        _value("summary", "speed, ratio"),
        is_least=True,
    ),
    Target(
        "microseconds of the host for a unit, one rank",
        100.0,
        "unit_cost_1ranks_stage3",
        _value("zeroshard, us a unit beyond plain"),
    ),
    Target(
        "the cost of a unit at 2 ranks, of FSDP2's",
        0.4,
        "unit_cost_2ranks_floor",
        _value("ratio zeroshard/fsdp2"),
    ),
)


def targets(*documents: Document) -> Table:
    """Each target that one of the documents judges: its bound, the median with its interval, met or not."""
    found = {document.path.stem: document for document in documents}
    rows = []
    for target in TARGETS:
        if target.document in found:
            median = target.find(found[target.document])
            bound = f"{'at least' if target.is_least else 'at most'} {target.bound:g}"
            verdict = "met" if target.is_met(median) else "**not met**"
            rows.append((target.what, bound, interval(median), verdict))
    return Table(("", "target", "measured", ""), rows)
