"""All that finetune.py shows: the run, its progress, memory per rank, the loss curve, samples."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

import zeroshard
from blocks import Blocks

if TYPE_CHECKING:
    from training import History

MIB = 2**20
SHARDED = {
    0: "each rank holds the whole model, its gradients and its optimizer states",
    1: "optimizer states are shared out over the ranks",
    2: "gradients and optimizer states are shared out over the ranks",
    3: "parameters, gradients and optimizer states are shared out over the ranks",
}


# -------------------------------------------------------------------------------------- before training


@contextmanager
def reading() -> Iterator[Callable[[int, int], None]]:
    """Show how much of the text has been read; yields the function that text_datasets calls.

    text_datasets calls it on one rank, which need not be rank 0: that rank shows the bar.
    """
    console = Console()
    columns = (TextColumn("reading the text"), BarColumn(20), TaskProgressColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("")

    def update(num_read: int, num_all: int) -> None:
        progress.start()
        progress.update(task, completed=num_read, total=num_all)

    try:
        yield update
    finally:
        if progress.live.is_started:
            progress.stop()


def show_run(
    console: Console, args: Namespace, engine: zeroshard.Engine, train: Blocks, held_out: Blocks, steps: int
) -> None:
    """Tell what will be trained, on what, and how."""
    config, world_size = engine.config, engine.world_size
    batch = config.micro_batch_size * config.gradient_accumulation_steps * engine.dp_world_size
    name = args.model or "a small Llama with random weights, which reads bytes"
    adapters = f", adapters of rank {args.lora}" if args.lora else ""
    adapters += f", frozen weights in {args.quantize}" if args.quantize else ""
    device = engine.device.type.upper()
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    divided = f", {config.mesh.tp} for each layer" if config.mesh.tp > 1 else ""
    source = f"the documentation of {args.data}" if args.data in ("python", "zeroshard") else args.data
    documents = "1 document is" if held_out.num_documents == 1 else f"{held_out.num_documents} documents are"
    share = held_out.num_labels / (train.num_labels + held_out.num_labels)
    rate = f"learning rate up to {args.lr:g}"
    rows = {
        "model": f"{name}; {engine.num_parameters() / 1e6:,.1f} million parameters{adapters}",
        "text": f"{source}: {len(train):,} blocks of {train.seq_len} {args.unit}s; "
        f"{documents} held out ({share:.0%})",
        "ranks": f"{processes} on {device}{divided}, stage {config.stage}: {SHARDED[config.stage]}",
        "training": f"{steps} steps of {batch} blocks ({steps * batch / len(train):.1f} epochs), {rate}",
        "result": result(args),
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan")
    table.add_column()
    for kind, text in rows.items():
        table.add_row(kind, text)
    console.print(Panel(table, title="fine-tuning with zeroshard", border_style="cyan", box=box.ROUNDED))


def result(args: Namespace) -> Text | str:
    """Return the line that tells what a run leaves, a warning if it leaves no model."""
    kept = []
    if args.output:
        replaces = ", in place of the one there" if Path(args.output, "config.json").is_file() else ""
        dtype = f", {str(args.saved_dtype).removeprefix('torch.')}" if args.saved_dtype else ""
        kept.append(f"the model in {args.output}{dtype}{replaces}")
    if args.checkpoint_dir:
        kept.append(f"checkpoints in {args.checkpoint_dir}")
    if kept:
        return " and ".join(kept)
    return Text("the trained model will NOT be kept: give --output DIR to keep it", style="yellow")


def show_answer(console: Console, when: str, question: str, text: str) -> None:
    """Show a question and what the model answers."""
    body = Text.assemble((f"{question}\n\n", "bold"), text or "(nothing)")
    console.print(Panel(body, title=f"asked {when}", box=box.ROUNDED))


def answers_table(questions: list[tuple[str, str]], before: list[str], after: list[str]) -> Table:
    """Return the answers before and after training side by side; an answer is right if it is the file's."""
    table = Table(box=box.ROUNDED, show_lines=True)
    for column in ("question", "before", "after", "right"):
        table.add_column(column, overflow="fold")
    num_right = [0, 0]
    for (question, right), *given in zip(questions, before, after, strict=False):
        is_right = [text == right for text in given]
        num_right = [num + one for num, one in zip(num_right, is_right, strict=True)]
        cells = (question, *given, "yes" if is_right[1] else f"no: {right}")
        table.add_row(*(Text(" ".join(cell.split())) for cell in cells))
    table.title = f"right answers: {num_right[0]} of {len(questions)} before, {num_right[1]} after"
    return table


def show_sample(console: Console, prompt: str, text: str) -> None:
    """Show the beginning of a held-out document and how the model goes on."""
    console.print(
        Panel(Text.assemble((prompt, "bold"), text), title="a held-out text, continued by the model")
    )


# -------------------------------------------------------------------------------------------- progress


class TrainingProgress:
    """A bar with the newest figures on a terminal; elsewhere a line for every twentieth of the run."""

    def __init__(self, console: Console, steps: int, unit: str, eval_every: int) -> None:
        self._console, self._steps, self._unit, self._eval_every = console, steps, unit, eval_every
        self._is_shown = console.is_terminal and not console.quiet
        columns = (
            BarColumn(16),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[state]}"),
        )
        self._bar = Progress(*columns, console=console, disable=not self._is_shown)
        self._task = self._bar.add_task("", total=steps, state="")
        self._every = max(1, steps // (100 if console.is_terminal else 20))
        self._tokens, self._first, self._begin, self._told = 0, 0, 0.0, 0
        self._evaluation, self._evaluating = 0.0, 0.0  # seconds of the last evaluation, and of all

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def begin(self, first: int, evaluation: float) -> None:
        """Start the clock, after `first` steps of an earlier part of the run.

        Args:
            evaluation: the seconds of an evaluation, as far as they are known.
        """
        self._first, self._told, self._evaluation = first, first, evaluation
        self._begin = time.perf_counter()
        self._bar.update(self._task, completed=first)

    def is_due(self, step: int) -> bool:
        """True if the figures are told after the step with this number, which counts from 0."""
        return (step + 1) % self._every == 0 or step + 1 == self._steps

    def evaluated(self, seconds: float) -> None:
        """Count an evaluation, which is no part of the speed."""
        self._evaluation = seconds
        self._evaluating += seconds

    def count(self, num_tokens: int) -> None:
        """Count the tokens of a step, of all ranks."""
        self._tokens += num_tokens
        self._bar.advance(self._task)

    def tell(self, done: int, history: History, engine: zeroshard.Engine) -> None:
        """Tell the figures after `done` steps."""
        seconds = time.perf_counter() - self._begin
        training = seconds - self._evaluating
        recent = history.losses[self._told :]
        left = training / (done - self._first) * (self._steps - done)
        left += self._evaluation * (-(-self._steps // self._eval_every) - done // self._eval_every)
        (lr,) = set(engine.get_lr()[:1])
        norm = engine.grad_norm
        evaluated, held_out = history.evaluations[-1]
        is_new = evaluated > self._told
        losses = [f"loss {sum(recent) / len(recent):.3f}", f"held-out {held_out:.3f}"]
        pace = [
            f"lr {lr:.1e}",
            f"grad norm {norm.item():.2f}" if norm is not None else "",
            f"{self._tokens / training:,.0f} {self._unit}s/s",
        ]
        memory = engine.memory_report()
        ends = [f"{(memory.peak_allocated or memory.rss or 0) / MIB:,.0f} MiB"]
        ends.append(f"{clock(left)} left" if done < self._steps else f"{clock(seconds)} in all")
        self._told = done
        lines = (losses + ends, pace)  # two lines, for a terminal of 80 columns
        self._bar.update(self._task, state="\n".join(map(joined, lines)))
        if not self._is_shown:
            figures = joined(losses[: 1 + is_new] + pace + ends)
            self._console.print(f"step {done}/{self._steps}: {figures}", soft_wrap=True)


def joined(figures: list[str]) -> str:
    """Return figures as one text, without those that are empty."""
    return ", ".join(filter(None, figures))


def clock(seconds: float) -> str:
    """Return a time as 0:05, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --------------------------------------------------------------------------------------- after training


def held_bytes(memory: zeroshard.MemoryReport) -> int:
    """Return the most bytes that a rank has held on its device, activations aside."""
    trained = memory.gradients + memory.optimizer
    return memory.parameters + memory.scales + trained + memory.peak_unsharded


def memory_table(memory: zeroshard.MemoryReport, engine: zeroshard.Engine, world_size: int) -> Table:
    """Return measured bytes by kind, next to those of DistributedDataParallel with AdamW in fp32.

    Parameters that are not trained have no gradients or optimizer states there either.
    """
    num_params, num_trained = engine.num_parameters(), engine.num_parameters(only_trainable=True)
    table = Table(
        title=f"Memory of a rank (MiB), stage {engine.config.stage}, ranks: {world_size}",
        box=box.ROUNDED,
        title_style="bold",
    )
    for column in ("", "zeroshard, measured", "DDP, fp32"):
        table.add_column(column, justify="right" if table.columns else "left")
    rows = [
        ("parameters", memory.parameters, 4 * num_params),
        *([("scales of frozen weights", memory.scales, 0)] if memory.scales else []),
        ("gradients", memory.gradients, 4 * num_trained),
        ("optimizer states", memory.optimizer, 8 * num_trained),
        ("gathered for use, at most", memory.peak_unsharded, 0),
    ]
    for kind, ours, ddp in rows:
        table.add_row(kind, f"{ours / MIB:,.2f}", f"{ddp / MIB:,.2f}")
    for place, ours in (("in host memory", memory.host), ("in files", memory.nvme)):
        if ours:
            table.add_row(place, f"{ours / MIB:,.2f}", "")
    table.add_section()
    table.add_row(
        "all on the device", f"{held_bytes(memory) / MIB:,.2f}", f"{sum(ddp for *_, ddp in rows) / MIB:,.2f}"
    )
    return table


def save_plot(path: str, history: History, unit: str) -> bool:
    """Draw the loss of each step and the held-out losses; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    losses = torch.tensor(history.losses)
    window = max(1, len(losses) // 50)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    smooth: Any = losses.unfold(0, window, 1).mean(1)
    label = f"training, mean of {window} steps" if window > 1 else "training"
    axes.plot(range(window, len(losses) + 1), smooth, color="tab:blue", label=label)
    taken, held_out = zip(*history.evaluations, strict=True)
    axes.plot(taken, held_out, "o-", color="tab:red", label="held-out text")
    axes.annotate(f"{held_out[-1]:.2f}", (taken[-1], held_out[-1]), (-4, 8), textcoords="offset points")
    axes.set(title="Loss of fine-tuning", xlabel="optimizer step", ylabel=f"loss (nats per {unit})")
    axes.set_ylim(0, None)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(path, dpi=150)
    return True
