"""The benchmarks of `make bench` and of `make bench-gpu`: what they measure, their commands, their time."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MINUTES = 20.0
"""The most time of a suite, unless the user gives another one. On 2 cores that of the CPU takes less."""
MARGIN = 0.85
"""The share of the minutes that rounds are planned for; machines differ from the estimates."""
LEAST_ROUNDS = 6
"""Fewer values have no interval of 95%; see `medians.rank_of_bound`."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A script with its arguments. It writes one JSON document."""

    name: str
    """Of the document."""
    command: str
    """The script and its arguments, without --rounds and --name."""
    start_s: float
    """Seconds that it takes beside its rounds; estimated, on 2 cores."""
    rounds: int = 0
    """Timed turns; 0 for a script that has none."""
    round_s: float = 0.0
    """Seconds of a round."""

    def scaled_rounds(self, scale: float) -> int:
        """The rounds, where the benchmarks have `scale` times their time."""
        return max(LEAST_ROUNDS, round(self.rounds * scale)) if self.rounds else 0

    def arguments(self, scale: float, folder: str) -> list[str]:
        """The script and its arguments; `folder` is the place of the document, in benchmarks/results/."""
        rounds = ["--rounds", str(self.scaled_rounds(scale))] if self.rounds else []
        return [*shlex.split(self.command), *rounds, "--name", f"{folder}/{self.name}"]

    def estimated_s(self, scale: float) -> float:
        """Seconds that it takes."""
        return self.start_s + self.scaled_rounds(scale) * self.round_s


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A section of the page."""

    name: str
    """For --only. Also the kind of its table and of its picture, if `kind` is empty."""
    title: str
    text: str
    """The comparison, and how to read it."""
    runs: tuple[Run, ...]
    kind: str = ""
    """In `tables.TABLES`."""

    @property
    def table(self) -> str:
        """The kind of its table."""
        return self.kind or self.name


def alone(name: str, title: str, text: str, command: str, **seconds: Any) -> Benchmark:
    """A benchmark with one run, of its own name; `seconds` are the other fields of `Run`."""
    run = Run(name=name, command=command, **seconds)
    return Benchmark(name=name, title=title, text=text, runs=(run,))


STEP_TIME = alone(
    name="step_time",
    title="Time of a training step",
    text="A GPT of 33.7 M parameters, batch 1, fp32, 2 ranks. Ratios: zeroshard's time / the row's.",
    command="step_time.py --ranks 2 --batch 1 --engines plain,ddp,torch-zero1,fsdp2,"
    "deepspeed-1,deepspeed-3,zeroshard-0,zeroshard-1,zeroshard-2,zeroshard-3",
    start_s=45,
    rounds=15,
    round_s=8,
)
MEMORY = alone(
    name="memory",
    title="Model states of a rank",
    text="Bytes of all live tensors after a step with AdamW. In brackets: measured / formula, with full "
    "gradients at stage 1; a step of one micro-batch keeps only the rank's own.",
    command="memory.py --dim 256 --depth 4 --vocabulary 2048",
    start_s=40,
)
CPU = (
    STEP_TIME,
    MEMORY,
    alone(
        name="rss",
        title="Peak memory of a rank's process",
        text="All memory of the process: parameters, gradients, states, activations, buffers, libraries. So "
        "only differences mean something. The smaller of two runs.",
        command="rss.py --runs 2 --engines ddp,torch-zero1,fsdp2,deepspeed-3,zeroshard-1,zeroshard-3",
        start_s=150,
    ),
    alone(
        name="checkpoint",
        title="Save and load a checkpoint",
        text="404 MB with all states, 2 ranks, all files synced, loaded from the page cache.",
        command="checkpoint.py --steps 5",
        start_s=20,
        rounds=6,
        round_s=9,
    ),
    alone(
        name="optimizers",
        title="Optimizers with 8-bit states",
        text="A step over one parameter of 33.6 M elements, 2 threads.",
        command="optimizers.py",
        start_s=45,
        rounds=15,
        round_s=1.9,
    ),
    alone(
        name="main_dtype",
        title="Main parameters of bfloat16",
        text="A step over 17 M elements in 10 parameters, 2 threads.",
        command="optimizers.py --main-dtypes --elements 17000000",
        start_s=15,
        rounds=30,
        round_s=0.4,
    ),
    Benchmark(
        name="muon",
        title="Muon",
        text="The optimizer's step alone, 2 ranks: each matrix is orthogonalized by one rank, or by all.",
        runs=tuple(
            Run(
                name=f"muon_stage{stage}",
                command=f"muon.py --ranks 2 --stage {stage}",
                start_s=10,
                rounds=30,
                round_s=0.3,
            )
            for stage in (3, 0)
        ),
    ),
    alone(
        name="nvme",
        title="Files of the nvme tier",
        text="Three buffers in turns, against one thread that reads all and then writes all.",
        command="nvme.py",
        start_s=10,
        rounds=7,
        round_s=2.5,
    ),
    alone(
        name="offload_rss",
        title="Peak memory with offload",
        text="Growth of the peak memory of a process that builds, shards and trains a model, and its bound.",
        command="offload_rss.py --cases host,nvme,nvme-8bit-bf16",
        start_s=60,
    ),
    alone(
        name="pipeline",
        title="Pipelines",
        text="A Llama of 8 layers, 2 pipeline ranks, 8 micro-batches, against torch's schedules over chunks "
        "that were cut by hand. The simulator predicts the time from the first action to the last one.",
        command="pipeline.py --ranks 2 --width 256 --length 64 --schedules 1f1b,interleaved,zb-h1",
        start_s=25,
        rounds=15,
        round_s=3.2,
    ),
    alone(
        name="pipeline_async",
        title="Asynchronous pipelines",
        text="A Llama of 8 layers, 2 pipeline ranks, against 1F1B with a step after 2 micro-batches. The "
        "bound is the ratio of a pipeline that is never empty and whose steps take no time.",
        command="pipeline_async.py --ranks 2 --width 256 --length 64 --size 4 --microbatches 16 "
        "--noted 3 --methods pb,pipedream,2bw,pipemare",
        start_s=25,
        rounds=6,
        round_s=7,
    ),
    alone(
        name="tensor_parallel",
        title="Tensor parallelism",
        text="A GPT of 4 blocks, width 512, against torch's parallelize_module.",
        command="tensor_parallel.py --ranks 2",
        start_s=15,
        rounds=20,
        round_s=1.2,
    ),
    alone(
        name="unit_cost",
        title="Time of a unit on the host",
        text="60 tiny blocks, each a unit, one rank: microseconds beyond plain PyTorch, without compute.",
        command="unit_cost.py --ranks 1",
        start_s=10,
        rounds=30,
        round_s=0.1,
    ),
    alone(
        name="qlora",
        title="Memory of QLoRA",
        text="Adapters over frozen 4-bit weights, stage 3, built without memory and quantized by parts.",
        command="qlora.py --ranks 2 --width 1024",
        start_s=60,
    ),
)
GPU = (
    alone(
        name="step_time",
        title=STEP_TIME.title,
        text="A GPT of 0.84 B parameters, bf16, batch 8. Ratios: zeroshard's time / the row's.",
        command="step_time.py --device cuda --ranks 1 --precision bf16 --batch 8 --dim 2048 "
        "--depth 16 --heads 16 --sequence 1024 "
        "--engines plain-main,fsdp2,fsdp2-keep,zeroshard-0,zeroshard-3",
        start_s=60,
        rounds=15,
        round_s=0.6,
    ),
    alone(
        name="memory",
        title=MEMORY.title,
        text=MEMORY.text,
        command="memory.py --device cuda --ranks 1",
        start_s=60,
    ),
    alone(
        name="optimizers",
        title="Optimizers with 8-bit states",
        text="A step over one parameter of 33.6 M elements.",
        command="optimizers.py --device cuda",
        start_s=60,
        rounds=20,
        round_s=0.1,
    ),
    Benchmark(
        name="offload_gpu",
        title="Llama shapes with offload",
        text="Sequences of 2048 tokens, units recomputed; 8-bit states and bf16 main parameters. Next to "
        "peers both are fp32.",
        runs=tuple(
            Run(name=f"offload_gpu_{part}", command=f"offload_gpu.py --part {part}", start_s=60 * minutes)
            for part, minutes in (("core", 5), ("compile", 5), ("sweep", 6), ("peers", 9))
        ),
    ),
)
SUITES = {"cpu": CPU, "cuda": GPU}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The time of the benchmarks of a call, and the share of their rounds that fits in."""

    limit_s: float
    """Seconds for all of them."""
    scale: float
    """The factor of the rounds of each run."""


def budget(benchmarks: Sequence[Benchmark], minutes: float | None) -> Budget:
    """The rounds that fit in the minutes; for None all rounds, and no less than `MINUTES`."""
    runs = [run for one in benchmarks for run in one.runs]
    if minutes is None:
        estimated_s = sum(run.estimated_s(1) for run in runs)
        return Budget(limit_s=max(60 * MINUTES, estimated_s / MARGIN), scale=1.0)
    start_s = sum(run.start_s for run in runs)
    rounds_s = sum(run.rounds * run.round_s for run in runs)
    scale = (60 * minutes * MARGIN - start_s) / rounds_s if rounds_s else 1.0
    return Budget(limit_s=60 * minutes, scale=max(0.0, scale))


def chosen(suite: Sequence[Benchmark], only: str | None) -> list[Benchmark]:
    """The benchmarks of a comma-separated list, in the order of the suite; all for None.

    Raises:
        ValueError: a name that the suite does not have.
    """
    if only is None:
        return list(suite)
    names = only.split(",")
    unknown = sorted(set(names) - {one.name for one in suite})
    if unknown:
        raise ValueError(
            f"Expected benchmarks among {', '.join(one.name for one in suite)}, got {', '.join(unknown)}"
        )
    return [one for one in suite if one.name in names]
