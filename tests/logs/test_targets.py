"""Each target gets the metrics.

TensorBoard is in the extra dev, and its files are read. Weights & Biases and MLflow are large: stand-ins note
the calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zeroshard.logs.steplog import RunFacts, Target, open_target

RUN = RunFacts({"lr": 0.1, "zeroshard.stage": 3, "zeroshard.mesh.tp": 2}, first_step=0, num_steps=20)


VALUES: dict[str, float] = {
    "seconds": 1.5,
    "loss": 2.25,
    "grad_norm": 0.5,
    "lr": 3e-4,
    "tokens_per_s": 12345.0,
    "memory_bytes": 3 << 30,
    "skipped_steps": 0,
    "loss_scale": 1.0,
}


def write(target: Target) -> None:
    """Send a report, a value of the user's with the same step, and a report with a metric less; close."""
    target.log(10, VALUES)
    target.log(10, {"held_out": 3.5})
    target.log(20, {**{name: VALUES[name] for name in VALUES if name != "grad_norm"}, "loss": 1.75})
    target.close()


def test_the_terminal_has_a_line_for_each_report(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = open_target("terminal", RUN)
    write(terminal)
    terminal.log(21, {**VALUES, "skipped_steps": 2, "loss": float("nan"), "loss_scale": 1024.0})
    assert capsys.readouterr().out.splitlines() == [
        "step 10/20  loss 2.2500  norm 0.5  lr 3.00e-04  12,345 tokens/s  3.00 GiB",
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


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """Put a module in the place of a package's."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


class Calls(list[tuple[str, tuple[Any, ...], dict[str, Any]]]):
    """Notes the calls of an object with any method; each returns what `answers` has for it."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.append((name, args, kwargs))
            return self._answers.get(name)

        return call


def test_weights_and_biases_gets_config_metrics_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    package = Calls(init=calls)
    stand_in(monkeypatch, "wandb", init=package.init)
    write(open_target("wandb:demo", RUN))
    assert package == [("init", (), {"project": "demo", "config": dict(RUN.config)})]
    first, second, third, end = calls
    assert first == ("log", ({f"train/{name}": value for name, value in VALUES.items()},), {"step": 10})
    assert second == ("log", ({"train/held_out": 3.5},), {"step": 10})
    assert third[2] == {"step": 20}
    assert end == ("finish", (), {})


def test_mlflow_gets_parameters_metrics_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(start_run=SimpleNamespace(info=SimpleNamespace(run_id="r1")))
    names = ("set_tracking_uri", "start_run", "log_params", "log_metrics", "end_run")
    stand_in(monkeypatch, "mlflow", **{name: getattr(calls, name) for name in names})
    write(open_target("mlflow:sqlite:///mlflow.db", RUN))
    write(open_target("mlflow", RUN._replace(config={"key": "x" * 600})))
    sent = [*["log_metrics"] * 3, "end_run"]
    assert [name for name, _, _ in calls] == [*names[:3], *sent, *names[1:3], *sent]
    assert calls[0][1] == ("sqlite:///mlflow.db",)
    params = [args[0] for name, args, _ in calls if name == "log_params"]
    first = {"lr": "0.1", "zeroshard.stage": "3", "zeroshard.mesh.tp": "2"}
    assert params == [first, {"key": "x" * 500}]
    assert calls[3] == ("log_metrics", (VALUES,), {"step": 10, "run_id": "r1"})
