"""The log of an engine's steps."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from zeroshard.config.checked import flat
from zeroshard.engine import Engine
from zeroshard.internals.warn import warn_user
from zeroshard.memory.report import measure_process
from zeroshard.tables import format_bytes

_LONGEST_VALUE = 500
"""The characters of a parameter's value; MLflow's servers refuse more (its REST API)."""
_FIGURES: Mapping[str, Callable[[float], str]] = {
    "seconds": lambda value: "",
    "loss": lambda value: f"loss {value:.4f}",
    "grad_norm": lambda value: f"norm {value:.3g}",
    "lr": lambda value: f"lr {value:.2e}",
    "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    "memory_bytes": format_bytes,
    "skipped_steps": lambda value: f"{value:.0f} skipped" if value else "",
    "loss_scale": lambda value: f"scale {value:g}" if value != 1 else "",
}
"""The text of each metric; "" leaves it out."""


@runtime_checkable
class Target(Protocol):
    """A place that metrics are sent to. Rank 0 alone has one."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take values by name; several calls may have the same step, with other names.

        Args:
            step: steps so far: those that the optimizer has taken, and those that were skipped.
            values: values of the user's; or the metrics of the steps since the last report, as far as they
                are there:

                seconds         since the log was made
                loss            the mean over the micro-batches of these steps and over the ranks
                grad_norm       before the last clipping, if something clips
                lr              of the last of these steps and of the first parameter group
                tokens_per_s    of all ranks, if numbers of tokens were given
                memory_bytes    the largest of a rank: `peak_allocated` of torch on an accelerator, the
                                resident memory of the process on a CPU
                skipped_steps   steps so far that were skipped because gradients were not finite
                loss_scale      of the next step; 1.0 if nothing is computed in float16
        """

    def close(self) -> None:
        """Write what is still in buffers; nothing follows."""


class RunFacts(NamedTuple):
    """Facts about a run that a target may keep."""

    config: Mapping[str, Any]
    """The config of zeroshard by dotted keys, such as "zeroshard.stage", and values of the user's."""
    first_step: int
    """Steps that were taken before this log: above 0 for a run that goes on."""
    num_steps: int | None
    """Steps of the whole run, if it is known."""


class Calls(NamedTuple):
    """A target made of two functions."""

    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def open_terminal(place: str, run: RunFacts) -> Target:
    """Print each report as one line.

    Args:
        place: unused.
        run: the run, for the number of its steps.
    """
    of = "" if run.num_steps is None else f"/{run.num_steps}"

    def log(step: int, values: Mapping[str, float]) -> None:
        texts = [_FIGURES.get(name, f"{name} {{:.4g}}".format)(value) for name, value in values.items()]
        if run.num_steps is not None and run.first_step < step < run.num_steps and "seconds" in values:
            left = values["seconds"] / (step - run.first_step) * (run.num_steps - step)
            texts.append(f"{timedelta(seconds=round(left))} left")
        print("  ".join([f"step {step}{of}", *filter(None, texts)]), flush=True)  # noqa: T201 - it is asked for

    return Calls(log, lambda: None)  # each line is there


def open_json_lines(place: str, run: RunFacts) -> Target:
    """Append to a file, a line for each report, which other programs can read at once.

    JSON has no infinity: a value that is not finite becomes the text "nan", "inf" or "-inf". A run that goes
    on appends to its file. If it repeats steps, the last value of a step counts.

    Args:
        place: the file; its folder is made if needed.
        run: the run.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8", buffering=1)  # each line is written at once

    def log(step: int, values: Mapping[str, float]) -> None:
        plain = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        file.write(json.dumps({"step": step, **plain}, allow_nan=False) + "\n")

    return Calls(log, file.close)


def open_tensorboard(place: str, run: RunFacts) -> Target:
    """Write event files into a folder; `tensorboard --logdir FOLDER` shows them.

    Args:
        place: the folder; it is made if needed.
        run: the run. Of a run that goes on, TensorBoard hides earlier points that are written again.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(place, purge_step=run.first_step + 1 if run.first_step else None)
    text = json.dumps(dict(run.config), indent=2)
    writer.add_text("config", indent(text, "    "), run.first_step)  # a block of code in Markdown

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(f"train/{name}", value, step)
        writer.flush()

    return Calls(log, writer.close)


def open_wandb(place: str, run: RunFacts) -> Target:
    """Send metrics to a new run of Weights & Biases, which takes none for a step before its last one.

    The package's own environment variables hold: `WANDB_MODE=offline` keeps all in a folder, `WANDB_DIR`
    names it, `WANDB_RUN_ID` with `WANDB_RESUME` goes on with a run.

    Args:
        place: the name of the project.
        run: the run, for its config.
    """
    import wandb

    opened: Any = wandb.init(project=place, config=dict(run.config))

    def log(step: int, values: Mapping[str, float]) -> None:
        opened.log({f"train/{name}": value for name, value in values.items()}, step=step)

    return Calls(log, opened.finish)


def open_mlflow(place: str, run: RunFacts) -> Target:
    """Send metrics to a new run of MLflow: below the active run, if there is one.

    `MLFLOW_EXPERIMENT_NAME` names the experiment.

    Args:
        place: the tracking URI, such as sqlite:///mlflow.db or the address of a server; "" for MLflow's own
            choice (`MLFLOW_TRACKING_URI`). MLflow 3.17 takes file:./mlruns only with
            MLFLOW_ALLOW_FILE_STORE=true.
        run: the run; its config becomes parameters.
    """
    import mlflow

    if place:
        mlflow.set_tracking_uri(place)
    opened: Any = mlflow.start_run(nested=True)
    mlflow.log_params({name: str(value)[:_LONGEST_VALUE] for name, value in run.config.items()})

    def log(step: int, values: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(values), step=step, run_id=opened.info.run_id)

    return Calls(log, mlflow.end_run)


KINDS: Mapping[str, tuple[Callable[[str, RunFacts], Target], str]] = {
    "terminal": (open_terminal, ""),
    "jsonl": (open_json_lines, ""),
    "tensorboard": (open_tensorboard, "runs"),
    "wandb": (open_wandb, "zeroshard"),
    "mlflow": (open_mlflow, ""),
}
"""The targets by name, each with the place if none is given. All but the first two need a package."""


def open_target(given: str | Target, run: RunFacts) -> Target:
    """Return the target that is given: an object, or the one of a text such as "jsonl:metrics.jsonl".

    Raises:
        ValueError: no target has this name, or it needs a place that is not given; an object without the
            methods.
        ModuleNotFoundError: its package is not installed.
    """
    if isinstance(given, Target):
        return given
    name, _, place = str(given).partition(":")
    if name not in KINDS or (name == "terminal" and place) or (name == "jsonl" and not place):
        raise ValueError(
            "log target: expected terminal, jsonl:FILE, tensorboard:FOLDER, wandb:PROJECT, mlflow:URI, or an "
            f"object with log() and close(), got {given!r}"
        )
    opened, default = KINDS[name]
    return opened(place or default, run)


class Share(NamedTuple):
    """The part of one rank in the metrics."""

    losses: float
    """The sum of the losses of its micro-batches."""
    num_losses: int
    num_tokens: int | None
    memory: int
    lr: float | None
    grad_norm: float | None


def combine(shares: Sequence[Share], num_data: int, seconds: float) -> dict[str, float]:
    """Return the sums and means of all ranks, as far as they are there; pure.

    Tensor and pipeline ranks have the same batches, losses and tokens as others. So a mean over all ranks is
    the mean over the data-parallel ranks, and tokens are counted by their share of the ranks.

    Args:
        shares: the shares of all ranks, in rank order.
        num_data: the number of data-parallel ranks, a divisor of the number of ranks.
        seconds: the time in which the tokens were consumed.
    """
    tokens = [share.num_tokens for share in shares if share.num_tokens is not None]
    found = {
        "loss": sum(share.losses for share in shares) / sum(share.num_losses for share in shares),
        "grad_norm": next((share.grad_norm for share in shares if share.grad_norm is not None), None),
        "lr": next((share.lr for share in shares if share.lr is not None), None),
        "tokens_per_s": sum(tokens) * num_data // len(shares) / seconds if tokens else None,
        "memory_bytes": max(share.memory for share in shares),
    }
    return {name: value for name, value in found.items() if value is not None}


class StepLog:
    """Sends loss, gradient norm, learning rate, speed, memory and skipped steps to some targets.

        with zeroshard.StepLog(engine, "terminal", "jsonl:metrics.jsonl", every=10) as log:
            for batch in dataloader:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                log.step(loss, num_tokens=batch["input_ids"].numel())

    All ranks make the log and call its methods; rank 0 alone has the targets. Between two reports nothing is
    exchanged, and the host waits for no device. A report is one small exchange. A target that fails after its
    opening gets no more metrics, with a warning, and training goes on. Without targets nothing happens.

    Its construction is collective. Make it after `load_checkpoint`, so that the steps of a run go on.

    Args:
        engine: the engine.
        targets: the places for the metrics: "terminal", "jsonl:FILE", "tensorboard:FOLDER",
            "wandb:PROJECT", "mlflow:URI", or an object with the methods `log` and `close` of `Target`.
        every: steps from one report to the next.
        num_steps: steps of the whole run, for the terminal, which then shows the time that is left.
        config: values that belong to the run, in addition to the config of the engine.

    Raises:
        ValueError: there is no such target; on all ranks.
        RuntimeError: a target's package is not installed, or rank 0 could not open it; on all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        *targets: str | Target,
        every: int = 10,
        num_steps: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine, self._every, self._has_targets = engine, every, bool(targets)
        self._targets: list[tuple[str, Target]] = []
        self._losses: list[Tensor] = []
        self._num_tokens: int | None = None
        self._seen = self._reported = engine.global_step + engine.skipped_steps
        self._lr = self._used_lr = next(iter(engine.get_lr()), None)
        if targets:
            self._open(targets, RunFacts(_plain(engine, config or {}), self._seen, num_steps))
        self._begin = self._since = time.perf_counter()  # the opening of targets takes seconds

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.report()
        finally:  # a report fails where another rank is gone
            self.close()

    def step(self, loss: Tensor | float, num_tokens: int | None = None) -> None:
        """Note a micro-batch, after `engine.step()` or `engine.train_batch()`.

        A report follows each `every`-th step. In the middle of a step, while micro-batches accumulate, the
        loss is only noted.

        Args:
            loss: the loss of the micro-batch, or the mean of the step; one element, on any device. It
                is averaged over the ranks.
            num_tokens: tokens of the micro-batch on this rank, or of all micro-batches of the step.

        Raises:
            RuntimeError: torch's own, of a loss that has more than one element, or none.
        """
        if not self._has_targets:
            return
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
        self._losses.append(value.reshape(()))
        if num_tokens is not None:
            self._num_tokens = (self._num_tokens or 0) + num_tokens
        now = self._engine.global_step + self._engine.skipped_steps
        if now == self._seen:
            return
        self._seen, self._used_lr, self._lr = now, self._lr, next(iter(self._engine.get_lr()), None)
        if now - self._reported >= self._every:
            self.report()

    def note(self, **values: float) -> None:
        """Send values of your own at once, with the present step: `log.note(held_out_loss=2.3)`.

        Nothing is exchanged; rank 0's values count. A tensor of one element is a number, too.

        Raises:
            TypeError, ValueError: `float()` makes no number of a value.
        """
        if self._has_targets:
            numbers = {n: value if isinstance(value, int) else float(value) for n, value in values.items()}
            self._call("log", self._seen, numbers)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time inside out of the speed: an evaluation, for example."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begin

    def report(self) -> None:
        """Send the metrics of the steps since the last report, if there are any; collective."""
        if not self._losses:
            return
        engine, losses = self._engine, torch.stack(self._losses).tolist()
        process, norm = measure_process(engine.device), engine.grad_norm
        own = Share(
            losses=sum(losses),
            num_losses=len(losses),
            num_tokens=self._num_tokens,
            memory=process.peak_allocated or process.rss or 0,
            lr=self._used_lr,
            grad_norm=None if norm is None else norm.item(),
        )
        shares = engine.on_all("metrics of steps", lambda: own)
        now = time.perf_counter()
        found = combine(shares, engine.dp_world_size, now - self._since)
        engine.watch(found["loss"], found.get("grad_norm"))
        metrics = {"seconds": now - self._begin, **found, "skipped_steps": engine.skipped_steps}
        self._losses, self._num_tokens = [], None
        self._since, self._reported = now, self._seen
        self._call("log", self._seen, metrics | {"loss_scale": engine.loss_scale})

    def close(self) -> None:
        """Close the targets; nothing is exchanged. A second call does nothing."""
        self._call("close")
        self._targets, self._has_targets = [], False

    def _open(self, targets: Sequence[str | Target], run: RunFacts) -> None:
        def open_all() -> None:
            for target in targets if self._engine.global_rank == 0 else ():
                name = target if isinstance(target, str) else type(target).__name__
                self._targets.append((name, open_target(target, run)))

        try:
            self._engine.on_all("opening of log targets", open_all)
        except BaseException:
            self.close()
            raise

    def _call(self, method: str, *args: Any) -> None:
        """Call each target; drop one that fails with a warning, as training is worth more than its log."""
        for name, target in list(self._targets):
            try:
                getattr(target, method)(*args)
            except Exception as error:  # of somebody else's package: a network, a full disk
                self._targets.remove((name, target))
                warn_user(f"log target {name}: {type(error).__name__}: {error}. It gets no more metrics")


def _plain(engine: Engine, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run as plain values."""
    own = {f"zeroshard.{key}": value for key, value in flat(engine.config).items()}
    plain = str | int | float | bool | None
    return {name: one if isinstance(one, plain) else str(one) for name, one in {**config, **own}.items()}
