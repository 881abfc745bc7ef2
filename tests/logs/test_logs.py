"""The metrics of a log are those of all ranks, it changes nothing of a training, and each target gets them.

TensorBoard is in the extra dev, and its files are read. Weights & Biases and MLflow are large: stand-ins note
the calls.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import zeroshard
from tests.distributed.models import Tiny
from tests.distributed.training import SOME_STAGES, caught, seeded, square_loss, start
from tests.ranks import on_ranks
from zeroshard.logs.steplog import RunFacts, Share, Target, combine, open_target


class Kept:
    """A target that keeps the values of each call, with its step; it may raise at a step."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.metrics: list[dict[str, float]] = []
        self.num_closed, self._fails_at = 0, fails_at

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise OSError("disk full")
        self.metrics.append({"step": step, **values})

    @property
    def steps(self) -> list[float]:
        return [values["step"] for values in self.metrics]

    def close(self) -> None:
        self.num_closed += 1


def take_step(engine: zeroshard.Engine, log: zeroshard.StepLog, number: int, factor: float = 1.0) -> None:
    """A step of one micro-batch, with a loss times a factor."""
    loss = square_loss(engine, number) * factor
    engine.backward(loss)
    engine.step()
    log.step(loss)


class Trained(NamedTuple):
    """The metrics of a rank's log, and the same values noted by hand."""

    metrics: list[dict[str, float]]
    num_closed: int
    losses: list[float]
    norms: list[float]
    lrs: list[float]
    parameters: dict[str, torch.Tensor]


def log_a_training(num_steps: int, every: int, is_logged: bool = True, **config: Any) -> Trained:
    """Train with a schedule; note by hand the loss, norm and learning rate of each step."""
    model = seeded(Tiny)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    engine = zeroshard.initialize(model, optimizer, config, lr_scheduler=schedule).engine
    num_micro, kept = engine.config.gradient_accumulation_steps, Kept()
    losses, norms, lrs = [], [], []
    targets = [kept] if is_logged else []
    with zeroshard.StepLog(engine, *targets, every=every, num_steps=num_steps) as log:
        for number in range(num_steps):
            lrs.append(engine.get_lr()[0])
            for micro in range(num_micro):
                loss = square_loss(engine, 10 * number + micro)
                engine.backward(loss)
                engine.step()
                log.step(loss, num_tokens=5 + engine.dp_rank)
                losses.append(loss.item())
            assert engine.grad_norm is not None
            norms.append(engine.grad_norm.item())
    return Trained(kept.metrics, kept.num_closed, losses, norms, lrs, engine.full_state_dict())


@pytest.mark.long_where(num_ranks=[1, 3])
@pytest.mark.parametrize(("num_ranks", "num_micro"), [(1, 2), (3, 1), (2, 2)])
def test_metrics_are_those_of_all_ranks(ranks: Any, num_ranks: int, num_micro: int) -> None:
    config = {"stage": 3, "clip_grad_norm": 1.0, "gradient_accumulation_steps": num_micro}
    first, *others = ranks(num_ranks, log_a_training, 5, 2, **config)
    assert not any(other.metrics for other in others)
    assert [metrics["step"] for metrics in first.metrics] == [2, 4, 5]
    assert first.num_closed == 1
    for begin, metrics in zip((0, 2, 4), first.metrics, strict=True):
        steps = slice(begin * num_micro, metrics["step"] * num_micro)
        losses = [loss for rank in (first, *others) for loss in rank.losses[steps]]
        assert metrics["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)
        assert metrics["grad_norm"] == first.norms[metrics["step"] - 1]
        assert metrics["lr"] == first.lrs[metrics["step"] - 1] == pytest.approx(0.1 / metrics["step"])
        assert metrics["tokens_per_s"] > 0
        assert (metrics["skipped_steps"], metrics["loss_scale"]) == (0, 1.0)
        assert metrics["memory_bytes"] > 1 << 20


@on_ranks(2)
def test_a_log_changes_no_bit_of_a_training() -> None:
    for stage in SOME_STAGES:
        config = {"stage": stage, "clip_grad_norm": 1.0}
        logged, plain = (log_a_training(4, 1, is_logged, **config) for is_logged in (True, False))
        assert not plain.metrics
        assert logged.losses == plain.losses
        assert all(torch.equal(value, plain.parameters[name]) for name, value in logged.parameters.items())


@given(
    st.lists(st.tuples(st.integers(-99, 99), st.integers(0, 9)), min_size=1, max_size=4), st.integers(1, 3)
)
def test_the_ranks_of_a_model_part_count_as_one(data: list[tuple[int, int]], copies: int) -> None:
    shares = [Share(loss, 1, tokens, 7, None, None) for loss, tokens in data for _ in range(copies)]
    found = combine(shares, len(data), seconds=2.0)
    assert found["loss"] == pytest.approx(sum(loss for loss, _ in data) / len(data))
    assert found["tokens_per_s"] == sum(tokens for _, tokens in data) / 2


def test_the_largest_memory_and_the_first_values_are_taken() -> None:
    shares = [Share(1.0, 1, None, 5, None, None), Share(2.0, 1, None, 9, 0.1, 0.5)]
    assert combine(shares, 2, 1.0) == {"loss": 1.5, "grad_norm": 0.5, "lr": 0.1, "memory_bytes": 9}


@on_ranks(2)
def test_a_skipped_step_is_a_step_of_the_log() -> None:
    """The gradients of the second of three steps are not finite."""
    engine, _ = start(Tiny(), "SGD", nonfinite="skip", clip_grad_norm=1.0)
    kept = Kept()
    log = zeroshard.StepLog(engine, kept, every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(3):
            take_step(engine, log, number, math.inf if number == 1 else 1.0)
    if engine.dp_rank:
        return
    assert [metrics["step"] for metrics in kept.metrics] == [1, 2, 3]
    assert [metrics["skipped_steps"] for metrics in kept.metrics] == [0, 1, 1]
    assert kept.metrics[1]["loss"] == math.inf
    assert not math.isfinite(kept.metrics[1]["grad_norm"])
    assert not any("tokens_per_s" in metrics for metrics in kept.metrics)


@on_ranks(2)
def test_steps_go_on_after_a_checkpoint(tmp_path: Any) -> None:
    """Three steps and a save; two more steps of another engine."""
    for first, steps in ((True, [2]), (False, [5])):
        engine, _ = start(Tiny(), "SGD")
        if not first:
            engine.load_checkpoint(tmp_path)
        kept = Kept()
        log = zeroshard.StepLog(engine, kept, every=2)
        for number in range(3 if first else 2):
            take_step(engine, log, number)
        assert engine.dp_rank or kept.steps == steps
        if first:
            engine.save_checkpoint(tmp_path)


@on_ranks(2)
def test_a_target_that_fails_is_dropped_and_training_goes_on() -> None:
    """A target that fails at step 2."""
    engine, _ = start(Tiny(), "SGD")
    failing, sound = Kept(fails_at=2), Kept()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with zeroshard.StepLog(engine, failing, sound, every=1) as log:
            for number in range(3):
                take_step(engine, log, number)
                if number == 0:
                    with log.pause():
                        log.note(held_out=2.5)
        log.close()
        log.step(1.5)
    told = [str(warning.message) for warning in caught if "log target" in str(warning.message)]
    if engine.dp_rank:
        assert told == failing.steps == sound.metrics == []
        return
    assert told == ["log target Kept: OSError: disk full. It gets no more metrics"]
    assert (failing.steps, sound.steps, sound.num_closed) == ([1, 1], [1, 1, 2, 3], 1)
    assert {"step": 1, "held_out": 2.5} in sound.metrics


REFUSED: dict[object, str] = {
    "csv:file": r"ValueError: log target: expected terminal, jsonl:FILE, .*, got 'csv:file'",
    "jsonl": "ValueError: log target: expected terminal, jsonl:FILE, .*, got 'jsonl'",
    "terminal:red": "ValueError: log target: expected terminal, .*, got 'terminal:red'",
    7: r"ValueError: log target: .* or an object with log\(\) and close\(\), got 7",
    "jsonl:/proc/none/file": r"RuntimeError: .*No such file or directory.*\(rank 0\)",
}


@on_ranks(2)
def test_all_ranks_refuse_a_target_that_cannot_be_opened() -> None:
    engine, _ = start(Tiny(), "SGD")
    for target, text in REFUSED.items():
        assert re.match(text, caught(zeroshard.StepLog, engine, target, every=1))


@on_ranks(1)
def test_values_that_are_no_numbers_are_refused_and_tensors_are_taken() -> None:
    engine, _ = start(Tiny(), "SGD")
    kept = Kept()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log = zeroshard.StepLog(engine, kept, every=1)
        log.note(held_out=torch.tensor(2.5), number=3)
        for call, text in (
            (lambda: log.note(text="high"), "ValueError: could not convert string to float: 'high'"),
            (
                lambda: log.note(several=torch.ones(2)),
                "ValueError: only one element tensors can be converted",
            ),
            (lambda: log.step(torch.ones(3)), "RuntimeError: shape '[]' is invalid for input of size 3"),
        ):
            assert caught(call).startswith(text)
        log.note(last=1.5)
        log.close()
    assert kept.metrics == [{"step": 0, "held_out": 2.5, "number": 3}, {"step": 0, "last": 1.5}]
    assert all(type(value) in (int, float) for values in kept.metrics for value in values.values())


@on_ranks(2)
def test_a_log_that_reads_a_loss_of_nan_tells_of_it_once() -> None:
    engine, _ = start(Tiny(), "SGD", stage=1)
    with warnings.catch_warnings(record=True) as told, zeroshard.StepLog(engine, Kept(), every=1) as log:
        warnings.simplefilter("always")
        for _ in range(3):
            loss = square_loss(engine, 0)
            loss.backward()
            engine.step()
            log.step(loss * math.nan)
    (text,) = [str(one.message) for one in told]
    assert text.startswith("step 1 was taken with a loss or a gradient norm that is not finite")


# ------------------------------------------------------------------------------------------------ the targets


RUN = RunFacts({"lr": 0.1, "zeroshard.stage": 3, "zeroshard.mesh.tp": 2}, first_step=0, num_steps=20)
VALUES = {"seconds": 15.0, "loss": 2.25, "grad_norm": 0.5, "lr": 3e-4, "tokens_per_s": 12345.0}
VALUES |= {"memory_bytes": 3 << 30, "skipped_steps": 0, "loss_scale": 1.0}


def write(target: Target) -> None:
    """Send a report, a value of the user's with the same step, and a report with a metric less; close."""
    target.log(10, VALUES)
    target.log(10, {"held_out": 3.5})
    target.log(20, {name: VALUES[name] for name in VALUES if name != "grad_norm"} | {"loss": 1.75})
    target.close()


def test_the_terminal_has_a_line_for_each_report(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = open_target("terminal", RUN)
    write(terminal)
    terminal.log(21, {**VALUES, "skipped_steps": 2, "loss": float("nan"), "loss_scale": 1024.0})
    assert capsys.readouterr().out.splitlines() == [
        "step 10/20  loss 2.2500  norm 0.5  lr 3.00e-04  12,345 tokens/s  3.00 GiB  0:00:15 left",
        "step 10/20  held_out 3.5",
        "step 20/20  loss 1.7500  lr 3.00e-04  12,345 tokens/s  3.00 GiB",
        "step 21/20  loss nan  norm 0.5  lr 3.00e-04  12,345 tokens/s  3.00 GiB  2 skipped  scale 1024",
    ]


def test_json_lines_are_there_at_once_and_a_second_run_appends(tmp_path: Path) -> None:
    file = tmp_path / "new" / "metrics.jsonl"
    target = open_target(f"jsonl:{file}", RUN)
    target.log(10, {**VALUES, "loss": float("inf"), "grad_norm": float("nan")})
    (line,) = file.read_text().splitlines()
    assert json.loads(line) == {"step": 10, **VALUES, "loss": "inf", "grad_norm": "nan"}
    target.close()
    write(open_target(f"jsonl:{file}", RUN))
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [values["step"] for values in found] == [10, 10, 10, 20]
    assert found[2] == {"step": 10, "held_out": 3.5}
    assert found[3].keys() == VALUES.keys() - {"grad_norm"} | {"step"}


def test_tensorboard_has_all_and_hides_points_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(open_target(f"tensorboard:{tmp_path}", RUN))
    again = open_target(f"tensorboard:{tmp_path}", RUN._replace(first_step=15))
    again.log(20, {"loss": 1.5})
    again.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(10, 2.25), (20, 1.5)]
    assert [point.step for point in events.Scalars("train/held_out")] == [10]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"zeroshard.stage": 3' in text


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Put an object that notes its calls in the place of a package."""
    package = mock.MagicMock()
    monkeypatch.setitem(sys.modules, name, package)
    return package


def test_weights_and_biases_gets_config_metrics_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    package = stand_in(monkeypatch, "wandb")
    write(open_target("wandb:demo", RUN))
    package.init.assert_called_once_with(project="demo", config=dict(RUN.config))
    first, second, third, end = package.init.return_value.mock_calls
    assert first == mock.call.log({f"train/{name}": value for name, value in VALUES.items()}, step=10)
    assert second == mock.call.log({"train/held_out": 3.5}, step=10)
    assert third.kwargs == {"step": 20}
    assert end == mock.call.finish()


def test_mlflow_gets_parameters_metrics_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    package = stand_in(monkeypatch, "mlflow")
    package.start_run.return_value.info.run_id = "r1"
    write(open_target("mlflow:sqlite:///mlflow.db", RUN))
    write(open_target("mlflow", RUN._replace(config={"key": "x" * 600})))
    first, *calls = package.mock_calls
    assert first == mock.call.set_tracking_uri("sqlite:///mlflow.db")
    sent = ["start_run", "log_params", *["log_metrics"] * 3, "end_run"]
    assert [name for name, _, _ in calls] == sent * 2
    params = {"lr": "0.1", "zeroshard.stage": "3", "zeroshard.mesh.tp": "2"}
    assert package.log_params.mock_calls == [mock.call(params), mock.call({"key": "x" * 500})]
    assert calls[2] == mock.call.log_metrics(VALUES, step=10, run_id="r1")
