"""The report of a training run: memory per rank, beside DistributedDataParallel's, and the loss curve."""

from __future__ import annotations

import psutil
from rich.table import Table

import zeroshard

MIB = 2**20


def held_bytes(memory: zeroshard.MemoryReport) -> int:
    """The most bytes that a rank has held on its device."""
    return memory.parameters + memory.gradients + memory.optimizer + memory.peak_unsharded


def resident_bytes() -> int:
    """The host memory of this process."""
    return int(psutil.Process().memory_info().rss)


def memory_table(memory: zeroshard.MemoryReport, num_params: int, title: str) -> Table:
    """Measured bytes by kind, next to those of DistributedDataParallel with AdamW in fp32."""
    table = Table(title=title)
    for column in ("MiB per rank", "zeroshard, measured", "DDP, fp32"):
        table.add_column(column, justify="right" if table.columns else "left")
    rows = [
        ("parameters", memory.parameters, 4 * num_params),
        ("gradients", memory.gradients, 4 * num_params),
        ("optimizer", memory.optimizer, 8 * num_params),
        ("unsharded, peak", memory.peak_unsharded, 0),
    ]
    for kind, ours, ddp in rows:
        table.add_row(kind, f"{ours / MIB:,.2f}", f"{ddp / MIB:,.2f}")
    table.add_section()
    table.add_row("all", f"{held_bytes(memory) / MIB:,.2f}", f"{16 * num_params / MIB:,.2f}")
    return table


def save_plot(path: str, losses: list[float], evaluations: tuple[float, float], unit: str) -> bool:
    """Draw the loss of each step and the evaluation losses before and after; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", linewidth=0.8, label="training")
    axes.plot((0, len(losses)), evaluations, "o", color="tab:red", label="evaluation")
    axes.annotate(f"{evaluations[1]:.2f}", (len(losses), evaluations[1]), (-4, 8), textcoords="offset points")
    axes.set(xlabel="step", ylabel=f"loss, nats per {unit}", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=150)
    return True
