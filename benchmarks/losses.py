"""The main job, `examples/finetune.py` on 2 ranks, with one optimizer after the other: its losses."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

MAIN_JOB = Path(__file__).parents[1] / "examples" / "finetune.py"
OPTIMIZERS = ("adamw", "adamw8bit", "bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit")
"""The names of the optimizers in the main job; the others are compared with the first one."""
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")


class Run(NamedTuple):
    """The output of the main job; losses are nats per byte."""

    optimizer: str
    seed: int
    steps: list[int]
    """The steps at the ends of twentieths of the run."""
    losses: list[float]
    """The mean losses over these twentieths."""
    evaluation_before: float
    evaluation_after: float


def run(optimizer: str, seed: int, num_steps: int) -> Run:
    """Run the main job.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(MAIN_JOB), "--optimizer", optimizer, "--seed", str(seed), "--steps", str(num_steps)]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--plot", str(Path(folder, "loss.png"))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"Expected the main job to end well with {optimizer}, got:\n{done.stderr}")
    told = re.findall(r"^step (\d+)/\d+: loss ([\d.]+)", done.stdout, re.MULTILINE)
    before, after = re.findall(
        r"^held-out loss (?:before|after) training: ([\d.]+)", done.stdout, re.MULTILINE
    )
    steps, losses = [int(step) for step, _ in told], [float(loss) for _, loss in told]
    return Run(optimizer, seed, steps, losses, float(before), float(after))


def run_all(seeds: Sequence[int], num_steps: int, console: Console) -> list[Run]:
    """Run each optimizer with each seed; print each run as it ends, and all in a table."""
    runs: list[Run] = []
    installed = [name for name in OPTIMIZERS if "." not in name or find_spec(name.partition(".")[0])]
    for seed in seeds:
        for optimizer in installed:
            runs.append(run(optimizer, seed, num_steps))
            console.print(f"{optimizer}, seed {seed}: evaluation loss {runs[-1].evaluation_after:.3f}")
    if runs:
        table = Table("optimizer", "evaluation loss, mean", "ratio", title=f"main job, {num_steps} steps")
        for row in rows_of(runs):
            table.add_row(row["optimizer"], f"{row['mean']:.4f}", f"{row['ratio']:.4f}")
        console.print(table)
    return runs


def rows_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each optimizer, the mean evaluation loss at the end, its ratio to the first one's, and all runs."""
    by_optimizer: dict[str, list[Run]] = {}
    for run in runs:
        by_optimizer.setdefault(run.optimizer, []).append(run)
    means = {
        name: statistics.fmean(run.evaluation_after for run in own) for name, own in by_optimizer.items()
    }
    return [
        {
            "optimizer": name,
            "mean": means[name],
            "ratio": means[name] / means[OPTIMIZERS[0]],
            "runs": [run._asdict() for run in own],
        }
        for name, own in by_optimizer.items()
    ]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw a line for each run, and a mark where its evaluation ended."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = dict(zip(OPTIMIZERS, COLORS, strict=False))
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    labelled: set[str] = set()
    for one in runs:
        label = None if one.optimizer in labelled else one.optimizer
        labelled.add(one.optimizer)
        color = colors[one.optimizer]
        axis.plot(one.steps, one.losses, color=color, linewidth=0.9, label=label)
        axis.plot(one.steps[-1], one.evaluation_after, "o", color=color, markersize=4, alpha=0.7)
    axis.set(xlabel="step", ylabel="loss, nats per byte", ylim=(0, None))
    axis.set_title("training loss; dots: evaluation at the end", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
