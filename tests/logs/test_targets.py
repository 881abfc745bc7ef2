"""Each target gets the metrics.

TensorBoard is in the extra dev, and its files are read. Weights & Biases and MLflow are large: stand-ins note
the calls.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from zeroshard.logs.steplog import RunFacts, Target, parse_target

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
    terminal = parse_target("terminal")(RUN)
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
    target = parse_target(f"jsonl:{file}")(RUN)
    target.log(10, {**VALUES, "loss": float("inf"), "grad_norm": float("nan")})
    (line,) = file.read_text().splitlines()
    assert json.loads(line) == {"step": 10, **VALUES, "loss": "inf", "grad_norm": "nan"}
    target.close()
    write(parse_target(f"jsonl:{file}")(RUN))
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [values["step"] for values in found] == [10, 10, 10, 20]
    assert found[2] == {"step": 10, "held_out": 3.5}
    assert found[3].keys() == VALUES.keys() - {"grad_norm"} | {"step"}


def test_tensorboard_has_all_and_hides_points_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(parse_target(f"tensorboard:{tmp_path}")(RUN))
    again = parse_target(f"tensorboard:{tmp_path}")(RUN._replace(first_step=15))
    again.log(20, {"loss": 1.5})
    again.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(10, 2.25), (20, 1.5)]
    assert [point.step for point in events.Scalars("train/held_out")] == [10]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"zeroshard.stage": 3' in text


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> mock.MagicMock:
    """Put an object that notes all calls in the place of a module."""
    module = mock.MagicMock()
    module.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_weights_and_biases_gets_config_metrics_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    package = stand_in(monkeypatch, "wandb")
    write(parse_target("wandb:demo")(RUN))
    package.init.assert_called_once_with(project="demo", config=dict(RUN.config))
    assert package.init.return_value.method_calls == [
        mock.call.log({f"train/{name}": value for name, value in VALUES.items()}, step=10),
        mock.call.log({"train/held_out": 3.5}, step=10),
        mock.call.log(mock.ANY, step=20),
        mock.call.finish(),
    ]


def test_mlflow_gets_parameters_metrics_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "mlflow")
    tracking, entities = (stand_in(monkeypatch, f"mlflow.{name}") for name in ("tracking", "entities"))
    entities.Metric = lambda *it: it
    client = tracking.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_experiment.return_value = "7"
    client.create_run.return_value = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    write(parse_target("mlflow:sqlite:///mlflow.db")(RUN))
    write(parse_target("mlflow")(RUN._replace(config={"key": "x" * 600})))
    places = [call.kwargs["tracking_uri"] for call in tracking.MlflowClient.call_args_list]
    assert places == ["sqlite:///mlflow.db", None]
    names = [name for name, _, _ in client.method_calls]
    begin = ["get_experiment_by_name", "create_experiment", "create_run"]
    end = [*["log_batch"] * 3, "set_terminated"]
    assert names == [*begin, *["log_param"] * 3, *end, *begin, "log_param", *end]
    client.create_run.assert_called_with("7")
    params = [call.args for call in client.log_param.call_args_list]
    first = [("lr", "0.1"), ("zeroshard.stage", "3"), ("zeroshard.mesh.tp", "2")]
    assert params == [("r1", *pair) for pair in (*first, ("key", "x" * 500))]
    sent = client.log_batch.call_args_list[0].kwargs["metrics"]
    assert [(name, value, step) for name, value, _, step in sent] == [
        (name, value, 10) for name, value in VALUES.items()
    ]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.logs.steplog.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"log target 'wandb': expected the package wandb: pip install wandb"
    ):
        parse_target("wandb")
